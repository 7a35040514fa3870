"""Keys: hashes of everything that a result depends on.

A key covers the cell, the versions of embens and torch, and the code that measures. Results are
stored under their keys, so that changed code never reuses old results, while new claims, figures or
comments keep them.
"""

import ast
import dataclasses
import functools
import hashlib
import inspect
import json
import sys
import textwrap
from importlib.metadata import version
from typing import Any

import torch

from reproduction.grid.cells import Cell, load_experiment
from reproduction.grid.settings import Setting

_PACKAGE = "reproduction"


def key_of(cell: Cell) -> str:
    """Return the key of a cell.

    Args:
        cell: The cell. Equal cells have equal keys, also in different experiments.

    Returns:
        24 hexadecimal digits.
    """
    identity = {
        "experiment": cell.experiment,
        "cell": to_json(cell),
        "code": code_version(cell.experiment),
    }
    text = json.dumps(identity, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def to_json(cell: Cell) -> dict[str, Any]:
    """Return the setting and the values of a cell as plain values."""
    return {"setting": dataclasses.asdict(cell.setting), **cell.values}


def setting_to_json(setting: Setting) -> dict[str, Any]:
    """Return a setting with the types that it has after a round trip through JSON."""
    return json.loads(json.dumps(dataclasses.asdict(setting)))


@functools.cache
def code_version(name: str) -> str:
    """Return a hash of the code that measures an experiment, and of its dependencies' versions.

    Args:
        name: Name of the experiment.

    Returns:
        16 hexadecimal digits.
    """
    measure = load_experiment(name).measure
    parts = [version("embens"), torch.__version__, measuring_code(measure)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def measuring_code(measure: Any) -> str:
    """Return the code of a function and of everything in this package that it uses.

    Functions and classes are followed through the names in their code. Constants count with their
    values. Comments and docstrings do not count.

    Args:
        measure: The function that measures cells.

    Returns:
        The code as one text.

    Raises:
        TypeError: If the code uses a module of this package, or an object without a stable text.
    """
    texts: dict[str, str] = {}
    queue = [inspect.unwrap(measure)]
    while queue:
        item = queue.pop()
        name = f"{item.__module__}.{item.__qualname__}"
        if name in texts:
            continue
        tree = _parse(item)
        texts[name] = ast.unparse(tree)
        namespace = vars(sys.modules[item.__module__])
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        for used in names & namespace.keys():
            value = inspect.unwrap(namespace[used])
            if inspect.isfunction(value) or inspect.isclass(value):
                if value.__module__.startswith(_PACKAGE):
                    queue.append(value)
            elif not callable(value):
                texts[f"{item.__module__}.{used}"] = _constant_text(used, value)
    return "\n".join(f"{name}: {texts[name]}" for name in sorted(texts))


def _parse(item: Any) -> ast.Module:
    """Return the syntax tree of a function or class without docstrings."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(item)))
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node):
            node.body[0] = ast.Pass()
    return tree


def _constant_text(name: str, value: Any) -> str:
    if inspect.ismodule(value):
        text = value.__name__
    else:
        text = repr(value)
    # Modules of this package would hide code from the hash; addresses differ between processes.
    if text.startswith(_PACKAGE) or " at 0x" in text:
        raise TypeError(
            f"{name} cannot be hashed: measuring code may use functions, classes and plain values "
            f"of {_PACKAGE}, each imported by name, got {text}."
        )
    return text
