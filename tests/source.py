"""The library's source as text: its files, their syntax, who imports whom."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "embens"


def name_of(path: Path) -> str:
    """Return a module's dotted name; that of a package's ``__init__`` is the package's."""
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in sorted(SOURCE.rglob("*.py"))}


@cache
def syntax(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text())


def imports(name: str, *, inner: bool) -> set[str]:
    """Return the names that a module imports, without those for types only.

    Args:
        name: The module.
        inner: Include imports within functions and other blocks.
    """
    imported: set[str] = set()
    nodes: list[ast.AST] = list(syntax(name).body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"{name}: relative imports hide where they lead"
            imported.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            nodes += node.orelse
        elif inner:
            nodes += ast.iter_child_nodes(node)
    return imported


def imported_modules(name: str) -> set[str]:
    """Return the modules of the library that a module imports, anywhere in it."""
    modules = set()
    for imported in imports(name, inner=True):
        while imported not in MODULES and "." in imported:  # a name within a module
            imported = imported.rpartition(".")[0]
        if imported in MODULES and imported not in ("embens", name):
            modules.add(imported)
    return modules
