"""One cell as a piece of work: what a worker is sent, what it does, what it returns.

A worker knows no grid and no engine; it imports the experiment by name, sets the threads that the
cell asks for, and measures.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import inspect
import json
import sys
import time
import traceback
import types
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from embens.experiments import contract


@dataclass(frozen=True)
class Task:
    """A cell of an experiment, and its key."""

    experiment: str
    cell: Any
    key: str

    @property
    def threads(self) -> int:
        """How many threads the cell asks for."""
        return self.cell.setting.threads

    @property
    def gpus(self) -> int:
        """How many GPUs it asks for."""
        return int(self.cell.setting.device.startswith("cuda"))


@dataclass(frozen=True)
class Done:
    """What became of a task: rows, or the text of an error."""

    key: str
    rows: list[dict[str, Any]] | None
    error: str | None
    seconds: float


def make_task(name: str, cell: Any) -> Task:
    """Return the task of a cell.

    The key is a hash of the experiment, of everything in the cell, and of the code that measures.
    """
    identity = {
        "experiment": name,
        "cell": dataclasses.asdict(cell),
        "code": code_version(name),
    }
    text = json.dumps(identity, sort_keys=True)
    return Task(name, cell, hashlib.sha256(text.encode()).hexdigest()[:24])


@functools.cache
def code_version(name: str) -> str:
    """Return a hash of the code that a measurement runs through.

    That is the library's version and torch's, the shared modules that train and evaluate, and
    whatever ``measure`` reaches in its own module; not sweeps, presets, claims, figures, comments
    and docstrings, which change no number.
    """
    from importlib.metadata import version

    from embens.experiments import lean, setting, training

    experiment = sys.modules[contract.load(name).measure.__module__]
    parts = [
        version("embens"),
        torch.__version__,
        reached_code(experiment, ("measure", "Cell")),
        reached_code(setting, ("Setting", "reference", "data_set")),
        reached_code(lean, ("lean", "Steps")),
        reached_code(training, ("train", "run", "evaluate", "score")),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def reached_code(module: types.ModuleType, roots: Iterable[str]) -> str:
    """Return the definitions of a module that the roots use, directly or not, without texts."""
    defined: dict[str, ast.stmt] = {}
    for node in ast.parse(inspect.getsource(module)).body:
        for found in _names(node):
            defined[found] = node
    todo, seen = list(roots), set[str]()
    while todo:
        name = todo.pop()
        if name in defined and name not in seen:
            seen.add(name)
            todo += [n.id for n in ast.walk(defined[name]) if isinstance(n, ast.Name)]
    return "\n".join(_plain_code(defined[name]) for name in sorted(seen))


def _plain_code(node: ast.AST) -> str:
    for part in ast.walk(node):
        body = getattr(part, "body", None)
        if isinstance(body, list) and body and _is_text(body[0]):
            body[:1] = [] if len(body) > 1 else [ast.Pass()]
    return ast.unparse(node)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _names(node: ast.stmt) -> list[str]:
    """Return the names that a statement defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]


def perform(task: Task) -> Done:
    """Measure a cell; an exception becomes the text of it."""
    started = time.perf_counter()
    before = torch.get_num_threads()
    try:
        if before != task.threads:
            torch.set_num_threads(task.threads)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows = contract.load(task.experiment).measure(task.cell)
        rows = [rows] if isinstance(rows, dict) else list(rows)
        return Done(task.key, rows, None, time.perf_counter() - started)
    except Exception:
        return Done(task.key, None, traceback.format_exc(), time.perf_counter() - started)
    finally:
        if before != task.threads:
            torch.set_num_threads(before)
