"""Rooms import in one direction, and importing embens needs torch alone."""

from __future__ import annotations

import graphlib
import importlib.metadata
import subprocess
import sys
import textwrap

import pytest
from source import MODULES, imported_modules, imports

import embens

ORDER = (
    ["checks", "trees", "modes", "markdown", "optimizers", "synonyms", "flops"],
    ["laws", "files", "logits", "mixtures", "sources", "differences"],
    ["metrics"],
    ["networks", "pictures", "conformal", "uncertainty", "fields", "folders", "losses"],
    ["sites"],
    ["spec"],
    ["graph"],
    ["optim"],
    ["ensemble"],
    ["patterns"],
    ["adapters", "omissions", "norm_statistics"],
    ["embed"],
    ["families"],
    ["theory"],
    ["prediction"],
    ["inference"],
    ["training"],
    ["finite", "evaluation", "comparison_folder"],
    ["comparison"],
    ["tabular"],
)
"""Rooms of the library; a room imports only from rooms on its own line or above it."""
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}
HEAVY = set(
    "numpy scipy sklearn matplotlib pandas polars pyarrow rich safetensors onnx onnxruntime tqdm "
    "ray plotly pooch".split()
)
TO_DO: set[tuple[str, str]] = set()
"""Arrows that point up or close a circle and are still to be turned; this set only shrinks."""


def room(name: str) -> str:
    return name.split(".")[1]


INSIDE = [name for name in MODULES if name != "embens"]


@pytest.mark.parametrize("name", INSIDE)
def test_no_module_imports_one_above_it(name):
    assert room(name) in LEVEL, f"{room(name)} has no place in the layering"
    for imported in imported_modules(name):
        is_above = LEVEL.get(room(imported), 99) > LEVEL[room(name)]
        assert not is_above or (name, imported) in TO_DO, imported


def test_no_imports_go_in_circles():
    graph = {}
    for name in INSIDE:
        graph[name] = {other for other in imported_modules(name) if (name, other) not in TO_DO}

    graphlib.TopologicalSorter(graph).prepare()  # raises with the circle


def test_what_is_to_do_is_not_done():
    for name, other in TO_DO:
        assert name in MODULES, f"take {name} out of TO_DO"
        assert other in imported_modules(name), f"take {name}, {other} out of TO_DO"


@pytest.mark.parametrize("name", MODULES)
def test_heavy_libraries_are_imported_where_they_are_used(name):
    if name.startswith("embens.tabular"):
        return  # this room needs them, and is imported on first use
    assert not {i.split(".")[0] for i in imports(name, inner=False)} & HEAVY


@pytest.mark.parametrize("name", ["embens.metrics", "embens.logits"])
def test_metrics_import_only_torch(name):
    for imported in imports(name, inner=True):
        root = imported.split(".")[0]
        if not imported.startswith("embens.logits"):
            assert root in ("torch", "__future__") or root in sys.stdlib_module_names, imported


def run_program(program: str) -> str:
    """Run a program in a new process and return its output."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_embens_works_with_everything_but_torch_missing():
    output = run_program(f"""
        import sys

        BLOCKED = {sorted(HEAVY - {"numpy"})!r}

        class Block:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in BLOCKED:
                    raise ModuleNotFoundError(name)

        sys.meta_path.insert(0, Block())
        import embens
        from torch import nn, zeros

        net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
        print(embens.batch_ensemble(net, 4)(zeros(1, 2)).shape)
    """)
    assert "[4, 1, 2]" in output


def test_everything_public_exists_and_is_documented():
    for name in embens.__all__:
        value = getattr(embens, name)
        assert value.__doc__, name
        assert name in dir(embens)


def test_theory_and_finite_networks_are_imported_when_they_are_asked_for():
    run_program("""
        import sys
        import embens

        rooms = {"embens.theory", "embens.finite", "embens.tabular", "embens.training"}
        assert not rooms & set(sys.modules), rooms & set(sys.modules)
        embens.diagnose, embens.theory.kernels, embens.finite.ntk
        from embens import *

        assert diagnose is finite.diagnose
    """)


def test_the_version_is_that_of_the_installed_package():
    assert embens.__version__ == importlib.metadata.version("embens")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = embens.nothing


RECORD_FILES = """
import sys

files = set()

def profile(frame, event, argument):
    code = frame.f_code
    if code.co_qualname == "<module>":
        return
    if event == "call" and "embens" in code.co_filename:
        files.add(code.co_filename)
"""
"""Code that collects the files of embens whose functions are called."""


def test_walk_from_a_network_to_a_step_crosses_at_most_eight_files():
    """``batch_ensemble``, ``ensemble(x)``, ``objective`` and a step stay easy to follow."""
    walk = """
        import torch
        import embens
        from torch import nn

        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
        x, y = torch.randn(16, 4), torch.randint(3, (16,))
        sys.setprofile(profile)
        ensemble = embens.batch_ensemble(net, members=4)
        optimizer = torch.optim.SGD(ensemble.parameter_groups(lr=0.1))
        embens.objective(ensemble(x), y).backward()
        optimizer.step()
        sys.setprofile(None)
        print(len(files), sorted(files))
    """
    output = run_program(RECORD_FILES + textwrap.dedent(walk))
    count = int(output.split()[0])
    assert 1 < count <= 8, output


def test_fit_of_a_table_crosses_at_most_twenty_files():
    """Default arguments, numeric and categorical columns, held-out rows, search."""
    fits = """
        import numpy
        import pandas
        from embens.tabular import EmbeddedEnsembleClassifier, EmbeddedEnsembleRegressor

        rng = numpy.random.default_rng(0)
        size, colour = rng.normal(size=300), rng.choice(list("rgb"), 300)
        X = pandas.DataFrame({"size": size, "colour": colour})
        y = size + (colour == "r")
        classifier = EmbeddedEnsembleClassifier(max_epochs=10)
        regressor = EmbeddedEnsembleRegressor(max_epochs=10)
        for model, target in ((classifier, y > 0), (regressor, y)):
            files.clear()
            sys.setprofile(profile)
            model.fit(X, target)
            sys.setprofile(None)
            assert model.held_out_
            print(len(files), sorted(files))
    """
    output = run_program(RECORD_FILES + textwrap.dedent(fits))
    counts = [int(line.split()[0]) for line in output.splitlines()]
    assert len(counts) == 2
    assert min(counts) > 1
    assert max(counts) <= 20, output
