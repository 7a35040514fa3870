"""Tests mirror the source, private names stay in their files, signatures are short.

Each rule has a set of what is still to be done, which only shrinks: what is done must leave it.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator

from packaging.version import Version
from source import MODULES, SOURCE, TESTS, syntax
from torch import nn

WITHOUT_TESTS: set[str] = set()
"""Files of the source that have no test file of their name yet."""

PRIVATE_READS = {
    ("embens.graph.tracing", "_autograd"),
}  # of torch
"""Private names of other files that a file still reads."""

LONG_BY_PROMISE = {
    "embens.embed.embed",
    "embens.networks.cnn",
    "embens.networks.mlp",
    "embens.training.loop.fit",
}
"""Signatures that the public promise fixes."""

LONG = {
    "embens.comparison.compare",
    "embens.families.low_rank",
    "embens.graph.convolutions.modulated_convolution",
    "embens.training.run.Run.__init__",
}
"""Other signatures of more than eight parameters."""


def test_file_names_are_unique():
    names = [path.name for path in MODULES.values() if not path.name.startswith("__")]
    repeated = sorted({name for name in names if names.count(name) > 1})
    assert repeated == []


def test_every_source_file_has_a_test_file_of_its_name():
    sources = [p.relative_to(SOURCE) for p in MODULES.values() if not p.name.startswith("__")]
    missing = {
        str(path) for path in sources if not (TESTS / path.parent / f"test_{path.name}").exists()
    }
    assert missing - WITHOUT_TESTS == set()
    assert WITHOUT_TESTS - missing == set(), "take these out of WITHOUT_TESTS"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined(name: str) -> set[str]:
    """Return the private names that a file defines, at any depth."""
    found = set()
    for node in ast.walk(syntax(name)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return {name for name in found if is_private(name)}


def read(name: str) -> set[str]:
    """Return the private names that a file imports, or reads of objects other than ``self``."""
    found = set()
    for node in ast.walk(syntax(name)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("embens"):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
            found.add(node.attr)
    return {name for name in found if is_private(name)}


def test_private_names_are_read_in_the_file_that_defines_them():
    own = {name: defined(name) for name in MODULES}
    everyones = set().union(*own.values()) - vars(nn.Module()).keys()
    found = {(name, attr) for name in MODULES for attr in (read(name) & everyones) - own[name]}
    assert found - PRIVATE_READS == set()
    assert PRIVATE_READS - found == set(), "take these out of PRIVATE_READS"


def functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the public functions and methods of a file or a class, with their dotted names."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.ClassDef)) or is_private(child.name):
            continue
        name = f"{prefix}.{child.name}"
        if isinstance(child, ast.ClassDef):
            yield from functions(child, name)
        else:
            yield name, child


def test_public_signatures_have_at_most_eight_parameters():
    long = set()
    for module in MODULES:
        for name, function in functions(syntax(module), module):
            every = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
            if len([a for a in every if a.arg not in ("self", "cls")]) > 8:
                long.add(name)
    assert long - LONG - LONG_BY_PROMISE == set()
    assert (LONG | LONG_BY_PROMISE) - long == set(), "take these out of the sets above"


def test_the_oldest_versions_that_are_tested_are_the_lower_bounds():
    root = TESTS.parent
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    bounds = dict(
        re.match(r"([\w-]+)>=([\d.]+)", text).groups() for text in project["dependencies"]
    )
    lines = (root / "constraints-oldest.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert {name: Version(v) for name, v in bounds.items()} == {
        name: Version(v) for name, v in pins.items()
    }
