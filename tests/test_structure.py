"""Tests mirror the source, private names stay in their files, signatures are short.

Each rule has a set of what is still to be done, which only shrinks: what is done must leave it.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
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
    counts = Counter(path.name for path in MODULES.values() if not path.name.startswith("__"))

    repeated = [name for name, count in counts.items() if count > 1]
    assert repeated == []


def test_every_source_file_has_a_test_file_of_its_name():
    missing = set()
    for path in MODULES.values():
        source = path.relative_to(SOURCE)
        test = TESTS / source.parent / f"test_{source.name}"
        if not source.name.startswith("__") and not test.exists():
            missing.add(str(source))

    assert missing - WITHOUT_TESTS == set()
    assert WITHOUT_TESTS - missing == set(), "take these out of WITHOUT_TESTS"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_definitions(name: str) -> set[str]:
    """Return the private names that a file defines, at any depth."""
    names = set()
    for node in ast.walk(syntax(name)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return set(filter(is_private, names))


def private_reads(name: str) -> set[str]:
    """Return the private names that a file imports, or reads of objects other than ``self``."""
    names = set()
    for node in ast.walk(syntax(name)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("embens"):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
            names.add(node.attr)
    return set(filter(is_private, names))


def test_private_names_are_read_in_the_file_that_defines_them():
    definitions = {module: private_definitions(module) for module in MODULES}
    # Names that modules of torch have too may be theirs.
    names_of_library = set().union(*definitions.values()) - vars(nn.Module()).keys()

    foreign_reads = set()
    for module in MODULES:
        for name in private_reads(module) - definitions[module]:
            if name in names_of_library:
                foreign_reads.add((module, name))

    assert foreign_reads - PRIVATE_READS == set()
    assert PRIVATE_READS - foreign_reads == set(), "take these out of PRIVATE_READS"


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


def count_parameters(function: ast.FunctionDef) -> int:
    arguments = function.args
    names = [a.arg for a in arguments.posonlyargs + arguments.args + arguments.kwonlyargs]
    return len([name for name in names if name not in ("self", "cls")])


def test_public_signatures_have_at_most_eight_parameters():
    long = set()
    for module in MODULES:
        for name, function in functions(syntax(module), module):
            if count_parameters(function) > 8:
                long.add(name)

    assert long - LONG - LONG_BY_PROMISE == set()
    assert (LONG | LONG_BY_PROMISE) - long == set(), "take these out of the sets above"


def test_oldest_tested_versions_are_the_lower_bounds():
    root = TESTS.parent
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    lower_bounds = {}
    for requirement in project["dependencies"]:
        name, version = re.match(r"([\w-]+)>=([\d.]+)", requirement).groups()
        lower_bounds[name] = Version(version)

    pins = {}
    for line in (root / "constraints-oldest.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, version = line.split("==")
            pins[name] = Version(version)

    assert lower_bounds == pins


def test_every_long_suite_is_in_a_part_that_make_can_run_alone():
    text = (SOURCE.parents[1] / "Makefile").read_text().replace("\\\n", " ")
    parts = [
        name for line in re.findall(r"^LONG_\w+ := (.*)$", text, re.M) for name in line.split()
    ]
    root = TESTS.parent
    assert len(parts) >= 12
    assert all((root / name).exists() for name in parts)
    missing = []
    for path in TESTS.rglob("test_*.py"):
        is_long = re.search(r"mark\.long|\bsampled\(", path.read_text())
        name = str(path.relative_to(root))
        if is_long and path.name != "test_structure.py" and not name.startswith(tuple(parts)):
            missing.append(name)
    assert missing == []
