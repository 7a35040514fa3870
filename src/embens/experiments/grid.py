"""The grid: run the cells of an experiment that have no result yet, and keep what comes.

A result is written as it comes; whatever stops a run loses the cells in flight, and running again
goes on with the rest. A cell that fails is kept with its error and is not tried again unless asked
for. Cells that another run on the same folder works on are left to it.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from embens.experiments import contract
from embens.experiments.engines import Engine
from embens.experiments.store import Record, Store
from embens.experiments.task import Done, Task, code_version, make_task

_PATIENCE = 0.5  # seconds between looks at what other runs do


class Watcher(Protocol):
    """What the grid tells about its progress."""

    def start(self, total: float, done: float, cells: int, finished: int) -> None:
        """Begin: weights and numbers of all cells and of those that are done."""
        ...

    def update(self, task: Task, done: Done, weight: float) -> None:
        """Report a cell."""
        ...

    def skip(self, weight: float) -> None:
        """Report a cell that another run has measured meanwhile."""
        ...


@dataclass
class Outcome:
    """What a run did.

    Attributes:
        cells: how many there are.
        measured: how many this run measured.
        known: how many were known before, or were measured by another run.
        failed: keys of cells that have an error.
        seconds: that the run took.
    """

    cells: int = 0
    measured: int = 0
    known: int = 0
    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0


def run(
    name: str,
    cells: Sequence[Any],
    *,
    store: Store,
    engine: Engine,
    watcher: Watcher | None = None,
    retry_failed: bool = False,
) -> Outcome:
    """Measure the cells that have no result.

    Args:
        name: of the experiment.
        cells: which; measured from the longest to the shortest.
        store: has the results, and gets the new ones.
        engine: does the work; it is not closed.
        watcher: is told what happens.
        retry_failed: try cells again that have failed before.
    """
    started = time.perf_counter()
    tasks = {task.key: task for task in (make_task(name, cell) for cell in cells)}
    weights = {key: contract.weight(task.cell) for key, task in tasks.items()}
    store.refresh()
    retried = {k for k, r in store.records.items() if retry_failed and "error" in r}

    def is_known(key: str) -> bool:
        record = store.records.get(key)
        return record is not None and ("rows" in record or key not in retried)

    todo = sorted((k for k in tasks if not is_known(k)), key=lambda k: -weights[k])
    outcome = Outcome(cells=len(tasks), known=len(tasks) - len(todo))
    if watcher is not None:
        total = sum(weights.values())
        watcher.start(total, total - sum(weights[k] for k in todo), len(tasks), outcome.known)
    pending, flying = deque(todo), set[str]()
    try:
        while pending or flying:
            for key in _fill(engine, store, tasks, pending, flying, is_known):
                outcome.known += 1
                if watcher is not None:
                    watcher.skip(weights[key])
            for done in engine.wait(_PATIENCE) if flying else []:
                if done.key not in flying:
                    continue  # of a run before this one, which ended early
                flying.discard(done.key)
                retried.discard(done.key)
                store.add(_record(tasks[done.key], done))
                store.release(done.key)
                outcome.measured += 1
                if watcher is not None:
                    watcher.update(tasks[done.key], done, weights[done.key])
            if pending and not flying:
                time.sleep(_PATIENCE)  # all that is left is with another run
    finally:
        store.release_all()
    outcome.failed = [k for k in tasks if "error" in store.records.get(k, {})]
    outcome.seconds = time.perf_counter() - started
    return outcome


def _fill(
    engine: Engine,
    store: Store,
    tasks: dict[str, Task],
    pending: deque[str],
    flying: set[str],
    is_known: Callable[[str], bool],
) -> list[str]:
    """Give the engine as much as it takes; return what another run has done in the meantime.

    What another run is doing goes to the end of the queue.
    """
    found: list[str] = []
    for _ in range(len(pending)):
        if len(flying) >= engine.slots:
            break
        key = pending.popleft()
        mine = store.claim(key)
        store.refresh()
        if is_known(key):
            store.release(key)
            found.append(key)
        elif mine:
            flying.add(key)
            engine.submit(tasks[key])
        else:
            pending.append(key)
    return found


def _record(task: Task, done: Done) -> Record:
    record: Record = {
        "key": task.key,
        "code": code_version(task.experiment),
        "cell": dataclasses.asdict(task.cell),
        "seconds": round(done.seconds, 4),
    }
    if done.rows is not None:
        record["rows"] = done.rows
    else:
        record["error"] = done.error
    return record


def narrow(cells: Sequence[Any], **wanted: Sequence[Any] | None) -> list[Any]:
    """Return the cells whose fields have one of the wanted values; None means any.

    Raises:
        ValueError: if a field is not swept, or nothing is left.
    """
    found = list(cells)
    for name, values in wanted.items():
        if values is None:
            continue
        fields = {f.name for f in dataclasses.fields(found[0])} - {"setting"}
        if name not in fields:
            raise ValueError(f"{name}: this experiment does not sweep it; it has {sorted(fields)}")
        present = sorted({getattr(c, name) for c in found})
        found = [c for c in found if any(_same(getattr(c, name), v) for v in values)]
        if not found:
            raise ValueError(
                f"{name}: expected some of {', '.join(map(str, present))}; got "
                f"{', '.join(map(str, values))}"
            )
    return found


def _same(value: Any, wanted: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value) == str(wanted)
    try:
        return abs(float(value) - float(wanted)) < 1e-9
    except ValueError:
        return False


def folder_of(out: str | Path, name: str, preset: str) -> Path:
    """Return the folder of an experiment's results."""
    return Path(out) / name / preset
