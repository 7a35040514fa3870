"""Arrows point one way, and importing embens needs torch alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "embens"
ORDER = (
    ["checks", "laws", "metrics"],
    ["networks", "data"],
    ["reading", "gradient"],
    ["ensemble"],
    ["embedding"],
    ["theory"],
    ["finite"],
    ["training", "prediction"],
    ["estimators"],
    ["experiments", "report"],
    ["cli"],
)
HEAVY = set(
    "numpy scipy sklearn matplotlib pandas polars pyarrow rich safetensors onnx onnxruntime tqdm "
    "zarr ray plotly".split()
)
UPWARD = {("ensemble", "training"), ("ensemble", "storage")}  # conveniences, inside methods


def module_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def top_level_imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_no_module_imports_one_above_it():
    level = {name: i for i, names in enumerate(ORDER) for name in names}
    for path in SOURCE.rglob("*.py"):
        name = module_of(path)
        if name == "__init__":
            continue
        assert name in level, f"{name} has no place in the layering"
        for imported in top_level_imports(path):
            parts = imported.split(".")
            if parts[0] == "embens" and len(parts) > 1 and parts[1] in level:
                assert level[parts[1]] <= level[name], f"{path.name} imports {imported}"


def test_heavy_libraries_are_imported_where_they_are_used():
    for path in SOURCE.rglob("*.py"):
        assert not {i.split(".")[0] for i in top_level_imports(path)} & HEAVY, path


def test_metrics_import_only_torch():
    for path in (SOURCE / "metrics").glob("*.py"):
        for imported in top_level_imports(path):
            root = imported.split(".")[0]
            assert (
                root in ("torch", "__future__")
                or root in sys.stdlib_module_names
                or (imported.startswith("embens.metrics"))
            ), (path, imported)


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
    import embens

    for name in embens.__all__:
        value = getattr(embens, name)
        assert value.__doc__, name
