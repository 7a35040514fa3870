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
    """Return what a module imports, and within its blocks and functions; not for types alone."""
    found: set[str] = set()
    nodes: list[ast.AST] = list(syntax(name).body)
    for node in nodes:  # grows as it is read
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"{name}: relative imports hide where they lead"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            nodes += node.orelse
        elif inner:
            nodes += ast.iter_child_nodes(node)
    return found


def arrows(name: str) -> set[str]:
    """Return the modules of the library that a module imports, anywhere in it."""
    found = set()
    for imported in imports(name, inner=True):
        while imported not in MODULES and "." in imported:  # a name within a module
            imported = imported.rpartition(".")[0]
        if imported in MODULES and imported not in ("embens", name):
            found.add(imported)
    return found
