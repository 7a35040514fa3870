"""The grid: run the cells of an experiment that have no result yet, and keep what comes.

A worker knows no grid and no engine; it imports the experiment by name, sets the threads that the
cell asks for, and measures. A cell's key is a hash of all that its numbers depend on: the cell, the
versions of embens and torch, and the code that measures. A result is written as it comes; whatever
stops a run loses the cells in flight, and running again goes on with the rest. A cell that fails is
kept with its error and is not tried again unless asked for.
"""

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
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

from reproduction.grid import cells as contract
from reproduction.grid.cells import Cell

if TYPE_CHECKING:
    from reproduction.grid.results import Results

_PACKAGE = "reproduction"

Record = dict[str, Any]
"""What became of a cell: its ``seconds`` and ``rows``, or an ``error``, which is text."""
Engine = Callable[[Sequence[Cell]], Generator[tuple[Cell, Record]]]
"""Runs cells, and yields what became of each as it comes; see :mod:`reproduction.grid.engines`."""


def key_of(cell: Cell) -> str:
    """Return the key of a cell; one that several experiments sweep is the same in all of them."""
    code = code_version(cell.experiment)
    identity = {"experiment": cell.experiment, "cell": plain(cell), "code": code}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:24]


def plain(cell: Cell) -> dict[str, Any]:
    """Return all that determines a cell, for JSON."""
    return {"setting": dataclasses.asdict(cell.setting), **cell.swept}


@functools.cache
def code_version(name: str) -> str:
    """Return a hash of the versions of embens and torch, and of the code that measures."""
    parts = [version("embens"), torch.__version__, measuring_code(contract.load(name).measure)]
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
                text = value.__name__ if inspect.ismodule(value) else repr(value)
                if text.startswith(_PACKAGE) or " at 0x" in text:
                    raise TypeError(
                        f"{used}: code that measures may use functions, classes and plain values "
                        f"of {_PACKAGE}, each imported by its own name; got {text}, of which no "
                        "hash can be taken to keep results under."
                    )
                found[f"{item.__module__}.{used}"] = text
    return "\n".join(f"{name}: {found[name]}" for name in sorted(found))


def perform(cell: Cell) -> Record:
    """Measure a cell; an exception becomes the text of it."""
    started, before = time.perf_counter(), torch.get_num_threads()
    try:
        torch.set_num_threads(cell.setting.threads)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows = contract.load(cell.experiment).measure(cell)
        found = {"rows": [rows] if isinstance(rows, dict) else list(rows)}
    except Exception:
        found = {"error": traceback.format_exc()}
    finally:
        torch.set_num_threads(before)
    return {"seconds": round(time.perf_counter() - started, 4), **found}


def run(
    name: str, cells: Sequence[Cell], results: "Results", engine: Engine, retry_failed: bool = False
) -> tuple[int, list[Cell]]:
    """Measure the cells that have no result, longest first.

    Return how many these were, and all cells that have an error.
    """
    results.borrow({key_of(cell) for cell in cells if cell.experiment != name})
    todo = unknown(cells, results, retry_failed=retry_failed)
    with closing(engine(todo)) as measured:
        for cell, found in measured:
            identity = {"key": key_of(cell), "code": code_version(cell.experiment)}
            results.add({**identity, "cell": plain(cell), **found})
    failed = [cell for cell in cells if "error" in results.records.get(key_of(cell), {})]
    return len(todo), failed


def unknown(cells: Sequence[Cell], results: "Results", *, retry_failed: bool) -> list[Cell]:
    """Return the cells that have no result, or only an error that is to be tried again."""
    done = {"rows"} if retry_failed else {"rows", "error"}
    found = [cell for cell in cells if not done & results.records.get(key_of(cell), {}).keys()]
    return sorted(found, key=lambda cell: -cell.weight)


def narrow(cells: Sequence[Cell], **wanted: Sequence[Any]) -> list[Cell]:
    """Return the cells whose fields have one of the wanted values; an error if there are none.

    Cells of another experiment, which come after its own, stay for the seeds that are left.
    """
    own = cells[0].experiment
    found = [cell for cell in cells if cell.experiment == own]
    for name, values in wanted.items():
        swept = found[0].swept
        if name not in swept:
            raise ValueError(f"{name}: this experiment does not sweep it; it has {sorted(swept)}")
        present = sorted({getattr(c, name) for c in found})
        found = [c for c in found if any(_same(getattr(c, name), v) for v in values)]
        if not found:
            some, got = (", ".join(map(str, each)) for each in (present, values))
            raise ValueError(f"{name}: expected some of {some}; got {got}")
    seeds = {cell.seed for cell in found}
    return [*found, *(cell for cell in cells if cell.experiment != own and cell.seed in seeds)]


def _same(value: Any, wanted: Any) -> bool:
    try:
        return abs(float(value) - float(wanted)) < 1e-9
    except ValueError:
        return str(value) == str(wanted)
