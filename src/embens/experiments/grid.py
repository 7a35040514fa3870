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
from typing import Any

from embens.experiments.contract import CellBase
from embens.experiments.engines import Engine
from embens.experiments.job import Done, Job, code_version, make_job
from embens.experiments.results import Record, Results

_PATIENCE = 0.5  # seconds between looks at what other runs do


class Watcher:
    """Is told about a run; this one says nothing."""

    def start(self, total: float, done: float, cells: int, finished: int) -> None:
        """Hear the weights and numbers of all cells and of those that are done."""

    def update(self, job: Job, done: Done) -> None:
        """Hear of a cell that was measured."""

    def skip(self, weight: float) -> None:
        """Hear of a cell that another run has measured meanwhile."""


@dataclass
class Outcome:
    """What a run did."""

    measured: int = 0
    known: int = 0  # before, or measured by another run
    failed: list[str] = field(default_factory=list)  # keys of cells that have an error
    seconds: float = 0.0


def run(
    name: str,
    cells: Sequence[CellBase],
    *,
    results: Results,
    engine: Engine,
    watcher: Watcher | None = None,
    retry_failed: bool = False,
) -> Outcome:
    """Measure the cells that have no result, longest first; the engine is not closed."""
    started, watcher = time.perf_counter(), watcher or Watcher()
    jobs = {job.key: job for job in (make_job(name, cell) for cell in cells)}
    results.refresh()
    results.borrow({job.key for job in jobs.values() if job.experiment != name})
    retried = {k for k, r in results.records.items() if retry_failed and "error" in r}

    def is_known(key: str) -> bool:
        record = results.records.get(key)
        return record is not None and ("rows" in record or key not in retried)

    todo = [job for job in jobs.values() if not is_known(job.key)]
    pending = deque(sorted(todo, key=lambda job: -job.cell.weight))
    outcome = Outcome(known=len(jobs) - len(todo))
    total = sum(job.cell.weight for job in jobs.values())
    left = sum(job.cell.weight for job in todo)
    watcher.start(total, total - left, len(jobs), outcome.known)
    flying: dict[str, Job] = {}
    try:
        while pending or flying:
            for job in _fill(engine, results, pending, flying, is_known):
                outcome.known += 1
                watcher.skip(job.cell.weight)
            for done in engine.wait(_PATIENCE) if flying else []:
                job = flying.pop(done.key, None)
                if job is None:
                    continue  # of a run before this one, which ended early
                retried.discard(job.key)
                results.add(_record(job, done))
                results.release(job.key)
                outcome.measured += 1
                watcher.update(job, done)
            if pending and not flying:
                time.sleep(_PATIENCE)  # all that is left is with another run
    finally:
        results.release_all()
    outcome.failed = [k for k in jobs if "error" in results.records.get(k, {})]
    outcome.seconds = time.perf_counter() - started
    return outcome


def _fill(
    engine: Engine,
    results: Results,
    pending: deque[Job],
    flying: dict[str, Job],
    is_known: Callable[[str], bool],
) -> list[Job]:
    """Give the engine as much as it takes; return what another run has done in the meantime."""
    found: list[Job] = []
    for _ in range(len(pending)):
        if len(flying) >= engine.slots:
            break
        job = pending.popleft()
        mine = results.claim(job.key)
        results.refresh()
        if is_known(job.key):
            results.release(job.key)
            found.append(job)
        elif mine:
            flying[job.key] = job
            engine.submit(job)
        else:
            pending.append(job)  # another run is at it
    return found


def _record(job: Job, done: Done) -> Record:
    return {
        "key": job.key,
        "code": code_version(job.experiment),
        "cell": {"setting": dataclasses.asdict(job.cell.setting), **job.cell.swept()},
        "seconds": round(done.seconds, 4),
        **({"error": done.error} if done.rows is None else {"rows": done.rows}),
    }


def narrow(cells: Sequence[CellBase], **wanted: Sequence[Any]) -> list[CellBase]:
    """Return the cells whose fields have one of the wanted values; an error if there are none.

    Cells that belong to several experiments stay, for the seeds that are left.
    """
    found = [cell for cell in cells if not cell.owner]
    for name, values in wanted.items():
        swept = found[0].swept()
        if name not in swept:
            raise ValueError(f"{name}: this experiment does not sweep it; it has {sorted(swept)}")
        present = sorted({getattr(c, name) for c in found})
        found = [c for c in found if any(_same(getattr(c, name), v) for v in values)]
        if not found:
            raise ValueError(
                f"{name}: expected some of {', '.join(map(str, present))}; got "
                f"{', '.join(map(str, values))}"
            )
    seeds = {cell.seed for cell in found}
    return [*found, *(cell for cell in cells if cell.owner and cell.seed in seeds)]


def _same(value: Any, wanted: Any) -> bool:
    try:
        return abs(float(value) - float(wanted)) < 1e-9
    except ValueError:
        return str(value) == str(wanted)
