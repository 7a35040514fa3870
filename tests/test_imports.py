"""Rooms import in one direction, and importing embens needs torch alone."""

from __future__ import annotations

import graphlib
import importlib.metadata
import subprocess
import sys

import pytest
from source import MODULES, arrows, imports

import embens

ORDER = (
    ["checks", "trees", "modes", "markdown", "optimizers"],
    ["laws", "files", "logits", "mixtures", "sources", "differences"],
    ["metrics"],
    ["networks", "uncertainty", "fields", "folders", "losses"],
    ["sites"],
    ["graph"],
    ["optim"],
    ["ensemble"],
    ["patterns"],
    ["adapters", "omissions"],
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
    up = {other for other in arrows(name) if LEVEL.get(room(other), 99) > LEVEL[room(name)]}
    assert {(name, other) for other in up} <= TO_DO


def test_no_imports_go_in_circles():
    graph = {
        name: {other for other in arrows(name) if (name, other) not in TO_DO} for name in INSIDE
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises with the circle


def test_what_is_to_do_is_not_done():
    done = {
        (name, other) for name, other in TO_DO if name not in MODULES or other not in arrows(name)
    }
    assert not done, "take these out of TO_DO"


@pytest.mark.parametrize("name", MODULES)
def test_heavy_libraries_are_imported_where_they_are_used(name):
    if name.startswith("embens.tabular"):
        return  # this room needs them, and is imported on first use
    assert not {i.split(".")[0] for i in imports(name, inner=False)} & HEAVY


@pytest.mark.parametrize("name", ["embens.metrics", "embens.logits"])
def test_metrics_import_only_torch(name):
    for imported in imports(name, inner=True):
        root = imported.split(".")[0]
        known = root in ("torch", "__future__") or root in sys.stdlib_module_names
        assert known or imported.startswith("embens.logits"), imported


def test_import_embens_works_with_everything_but_torch_missing():
    program = (
        "import sys\n"
        f"blocked = {sorted(HEAVY - {'numpy'})!r}\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in blocked: raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "import embens, torch\n"
        "net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))\n"
        "print(embens.batch_ensemble(net, 4)(torch.zeros(1, 2)).shape)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "[4, 1, 2]" in result.stdout


def test_everything_public_exists_and_is_documented():
    for name in embens.__all__:
        value = getattr(embens, name)
        assert value.__doc__, name
        assert name in dir(embens)


def test_theory_and_finite_networks_are_imported_when_they_are_asked_for():
    program = (
        "import sys, embens\n"
        "rooms = {'embens.theory', 'embens.finite', 'embens.tabular', 'embens.training'}\n"
        "assert not rooms & set(sys.modules), rooms & set(sys.modules)\n"
        "embens.diagnose, embens.theory.kernels, embens.finite.ntk\n"
        "from embens import *\n"
        "assert diagnose is finite.diagnose\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_version_is_that_of_the_installed_package():
    assert embens.__version__ == importlib.metadata.version("embens")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = embens.nothing


def test_the_walk_from_a_network_to_a_step_crosses_at_most_eight_files():
    """``batch_ensemble``, ``ensemble(x)``, ``objective`` and a step stay easy to follow."""
    program = (
        "import sys, torch, embens\n"
        "files = set()\n"
        "def profile(frame, event, argument):\n"
        "    code = frame.f_code\n"
        "    if event == 'call' and 'embens' in code.co_filename and code.co_name != '<module>':\n"
        "        files.add(code.co_filename)\n"
        "layers = [torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)]\n"
        "net = torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(8, 3))\n"
        "x, y = torch.randn(16, 4), torch.randint(3, (16,))\n"
        "sys.setprofile(profile)\n"
        "ensemble = embens.batch_ensemble(net, members=4)\n"
        "optimizer = torch.optim.SGD(ensemble.parameter_groups(lr=0.1))\n"
        "embens.objective(ensemble(x), y).backward()\n"
        "optimizer.step()\n"
        "sys.setprofile(None)\n"
        "print(len(files), sorted(files))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split()[0]) <= 8, result.stdout


def test_a_fit_of_a_table_crosses_at_most_twenty_files():
    """Default arguments, numeric and categorical columns, held-out rows, search."""
    program = (
        "import sys, numpy, pandas, embens.tabular\n"
        "def profile(frame, event, argument):\n"
        "    code = frame.f_code\n"
        "    if event == 'call' and 'embens' in code.co_filename and code.co_name != '<module>':\n"
        "        files.add(code.co_filename)\n"
        "rng = numpy.random.default_rng(0)\n"
        "size, colour = rng.normal(size=300), rng.choice(list('rgb'), 300)\n"
        "X = pandas.DataFrame({'size': size, 'colour': colour})\n"
        "y = size + (colour == 'r')\n"
        "for kind, target in (('Classifier', y > 0), ('Regressor', y)):\n"
        "    files = set()\n"
        "    model = getattr(embens.tabular, f'EmbeddedEnsemble{kind}')(max_epochs=10)\n"
        "    sys.setprofile(profile)\n"
        "    model.fit(X, target)\n"
        "    sys.setprofile(None)\n"
        "    assert model.held_out_\n"
        "    print(len(files), sorted(files))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    counts = [int(line.split()[0]) for line in result.stdout.splitlines()]
    assert len(counts) == 2
    assert max(counts) <= 20, result.stdout
