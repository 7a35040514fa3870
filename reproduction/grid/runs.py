"""Runs: measure the cells of an experiment that have no result yet.

Results are written one by one. Cells that train on images also save their state after each epoch,
so an interrupted run loses at most one epoch of each cell in progress. A failed cell is kept with
its error and is retried only on request.
"""

import shutil
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from reproduction.grid.cells import Cell, cost_of, load_experiment
from reproduction.grid.keys import code_version, key_of, to_json

if TYPE_CHECKING:
    from reproduction.grid.results import Results

Record = dict[str, Any]
"""Outcome of a cell: ``seconds`` and either ``rows`` or an ``error`` text."""

Engine = Callable[[Sequence[Cell]], Generator[tuple[Cell, Record]]]
"""Measures cells and yields each with its outcome; see :mod:`reproduction.grid.engines`."""


def measure(cell: Cell) -> Record:
    """Measure a cell.

    Args:
        cell: The cell.

    Returns:
        Its rows, or the traceback of an exception as ``error``.
    """
    started = time.perf_counter()
    previous_threads = torch.get_num_threads()
    outcome: Record = {}
    try:
        torch.set_num_threads(cell.setting.threads)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows = load_experiment(cell.experiment).measure(cell)
        outcome["rows"] = [rows] if isinstance(rows, dict) else list(rows)
    except Exception:
        outcome["error"] = traceback.format_exc()
    finally:
        torch.set_num_threads(previous_threads)
    outcome["seconds"] = round(time.perf_counter() - started, 4)
    return outcome


def run(
    name: str, cells: Sequence[Cell], results: "Results", engine: Engine, retry_failed: bool = False
) -> tuple[int, list[Cell]]:
    """Measure the cells without a result, the most expensive first.

    Args:
        name: Name of the experiment.
        cells: All cells of the run.
        results: Where results are kept.
        engine: Where cells are measured.
        retry_failed: Measure failed cells again.

    Returns:
        The number of measured cells, and all cells of the run that failed.
    """
    results.borrow([cell for cell in cells if cell.experiment != name])
    missing = pending(cells, results, retry_failed=retry_failed)
    started = [with_checkpoints(cell, results.folder) for cell in missing]
    with closing(engine(started)) as outcomes:
        for cell, outcome in outcomes:
            identity = {
                "key": key_of(cell),
                "code": code_version(cell.experiment),
                "cell": to_json(cell),
            }
            results.add({**identity, **outcome})
            if cell.checkpoints:
                shutil.rmtree(cell.checkpoints, ignore_errors=True)
    failed = [cell for cell in cells if "error" in results.records.get(key_of(cell), {})]
    return len(missing), failed


def with_checkpoints(cell: Cell, folder: Path) -> Cell:
    """Return the cell with a folder for unfinished training runs, if they take long enough."""
    if cell.setting.data == "digits":
        return cell
    path = folder.resolve() / "unfinished" / key_of(cell)
    return replace(cell, checkpoints=str(path))


def pending(cells: Sequence[Cell], results: "Results", *, retry_failed: bool) -> list[Cell]:
    """Return the cells that have to be measured, the most expensive first.

    Args:
        cells: Cells of a run.
        results: Existing results.
        retry_failed: Include failed cells.

    Returns:
        Cells without a result.
    """
    missing = []
    for cell in cells:
        record = results.records.get(key_of(cell), {})
        is_done = "rows" in record or ("error" in record and not retry_failed)
        if not is_done:
            missing.append(cell)
    return sorted(missing, key=cost_of, reverse=True)


def select(cells: Sequence[Cell], **wanted: Sequence[Any]) -> list[Cell]:
    """Return the cells of an experiment with the wanted values.

    Baseline cells are kept for the remaining seeds and widths.

    Args:
        cells: Cells of an experiment; those of the baselines come last.
        **wanted: Accepted values of each axis, as numbers or text.

    Returns:
        The selected cells.

    Raises:
        ValueError: If an axis is not swept, or no cell has a wanted value.
    """
    name = cells[0].experiment
    selected = [cell for cell in cells if cell.experiment != "baselines"]
    baselines = [cell for cell in cells if cell.experiment == "baselines"]
    for axis, values in wanted.items():
        axes = selected[0].values
        if axis not in axes:
            raise ValueError(f"{name} does not sweep {axis}; its axes are {', '.join(axes)}.")
        available = sorted({cell[axis] for cell in selected})
        selected = [
            cell for cell in selected if any(_is_same(cell[axis], value) for value in values)
        ]
        if not selected:
            raise ValueError(
                f"{axis} must be among {', '.join(map(str, available))}, "
                f"got {', '.join(map(str, values))}."
            )
    seeds = {cell.seed for cell in selected}
    widths = {cell.width for cell in selected}
    for cell in baselines:
        if cell.seed in seeds and cell.width in widths:
            selected.append(cell)
    return selected


def _is_same(value: Any, wanted: Any) -> bool:
    try:
        return abs(float(value) - float(wanted)) < 1e-9
    except ValueError:
        return str(value) == str(wanted)
