"""One cell as a piece of work: what a worker is sent, what it does, what it returns.

A worker knows no grid and no engine; it imports the experiment by name, sets the threads that the
cell asks for, and measures. A cell's key is a hash of all that its numbers depend on: the cell, the
versions of embens and torch, and the code that measures.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import inspect
import json
import sys
import textwrap
import time
import traceback
import types
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from embens.experiments import contract

_PACKAGE = "embens.experiments"


@dataclass(frozen=True)
class Job:
    """A cell of an experiment, and its key."""

    experiment: str
    cell: Any
    key: str

    @property
    def threads(self) -> int:
        return self.cell.setting.threads

    @property
    def gpus(self) -> int:
        return int(self.cell.setting.device.startswith("cuda"))


@dataclass(frozen=True)
class Done:
    """What became of a job: rows, or the text of an error."""

    key: str
    rows: list[dict[str, Any]] | None
    error: str | None
    seconds: float


def make_job(name: str, cell: Any) -> Job:
    """Return the job of a cell; one that several experiments have is the same in all of them."""
    name = cell.owner or name
    identity = {"experiment": name, "cell": dataclasses.asdict(cell), "code": code_version(name)}
    text = json.dumps(identity, sort_keys=True)
    return Job(name, cell, hashlib.sha256(text.encode()).hexdigest()[:24])


@functools.cache
def code_version(name: str) -> str:
    """Return a hash of the versions of embens and torch, and of the code that measures."""
    from importlib.metadata import version

    parts = [version("embens"), torch.__version__, measuring_code(contract.module(name).measure)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def measuring_code(measure: Any) -> str:
    """Return a function's code and that of everything in this package that it uses.

    Functions and classes are followed by the names in their code; constants count by their values.
    Comments, docstrings and what is not used (sweeps, claims, figures) change no number.
    """
    found: dict[str, str] = {}
    todo = [inspect.unwrap(measure)]
    while todo:
        item = todo.pop()
        name = f"{item.__module__}.{item.__qualname__}"
        if name in found:
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(item)))
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node):
                node.body[0] = ast.Pass()
        found[name] = ast.unparse(tree)
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        known = vars(sys.modules[item.__module__])
        for used in names & known.keys():
            value = inspect.unwrap(known[used])
            if inspect.isfunction(value) or inspect.isclass(value):
                todo += [value] if value.__module__.startswith(_PACKAGE) else []
            elif not callable(value):
                found[f"{item.__module__}.{used}"] = _text_of(value, used)
        if inspect.isclass(item):
            todo += [base for base in item.__bases__ if base.__module__.startswith(_PACKAGE)]
    return "\n".join(f"{name}: {found[name]}" for name in sorted(found))


def _text_of(constant: Any, name: str) -> str:
    text = constant.__name__ if isinstance(constant, types.ModuleType) else repr(constant)
    if text.startswith(_PACKAGE) or " at 0x" in text:
        raise TypeError(
            f"{name}: code that measures may use functions, classes and plain values of "
            f"{_PACKAGE}, each imported by its own name; got {text}. Results are kept under a hash "
            "of that code, which cannot be taken of this."
        )
    return text


def perform(job: Job) -> Done:
    """Measure a cell; an exception becomes the text of it."""
    started = time.perf_counter()
    before = torch.get_num_threads()
    try:
        if before != job.threads:
            torch.set_num_threads(job.threads)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows = contract.module(job.experiment).measure(job.cell)
        rows = [rows] if isinstance(rows, dict) else list(rows)
        return Done(job.key, rows, None, time.perf_counter() - started)
    except Exception:
        return Done(job.key, None, traceback.format_exc(), time.perf_counter() - started)
    finally:
        if before != job.threads:
            torch.set_num_threads(before)
