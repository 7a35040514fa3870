"""Arrows point one way, and importing embens needs torch alone."""

from __future__ import annotations

import graphlib
import importlib.metadata
import subprocess
import sys

import pytest
from source import MODULES, arrows, imports

import embens

ORDER = (
    ["checks", "laws", "files", "metrics"],
    ["networks", "data", "uncertainty"],
    ["objective"],
    ["reading"],
    ["ensemble"],
    ["embedding"],
    ["theory"],
    ["training", "prediction"],
    ["finite"],
    ["estimators"],
    ["experiments", "report"],
    ["cli"],
)
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
    if name.startswith(("embens.estimators", "embens.cli.fit", "embens.cli.predict")):
        return  # this room needs them, and is imported when it is asked for
    assert not {i.split(".")[0] for i in imports(name, inner=False)} & HEAVY


@pytest.mark.parametrize("name", [name for name in INSIDE if room(name) == "metrics"])
def test_metrics_import_only_torch(name):
    for imported in imports(name, inner=True):
        root = imported.split(".")[0]
        known = root in ("torch", "__future__") or root in sys.stdlib_module_names
        assert known or imported.startswith("embens.metrics"), imported


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
        "rooms = {'embens.theory', 'embens.finite', 'embens.estimators', 'embens.experiments'}\n"
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
