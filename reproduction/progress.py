"""Progress of a run on the console."""

import time
from collections.abc import Generator, Sequence
from contextlib import closing
from datetime import timedelta
from typing import TYPE_CHECKING

from reproduction.grid.cells import Cell, cost_of
from reproduction.grid.runs import Engine, Record

if TYPE_CHECKING:
    from rich.console import Console


def show_progress(engine: Engine, console: "Console", title: str) -> Engine:
    """Return an engine that reports its progress.

    A terminal shows one line that changes; other consoles get a line after each tenth of the cells.
    The remaining time is estimated from the cost of the cells.

    Args:
        engine: The engine.
        console: Where progress is shown.
        title: Name of the experiment.

    Returns:
        An engine with the same outcomes.
    """
    from rich.text import Text

    def measure_cells(cells: Sequence[Cell]) -> Generator[tuple[Cell, Record]]:
        started = time.perf_counter()
        total_cost = sum(cost_of(cell) for cell in cells)
        finished_cost = 0.0
        failed = 0
        with console.status(title) as status, closing(engine(cells)) as outcomes:
            for number, (cell, record) in enumerate(outcomes, 1):
                finished_cost += cost_of(cell)
                failed += "error" in record
                elapsed = time.perf_counter() - started
                remaining = format_time(elapsed * (total_cost / finished_cost - 1))
                text = f"{title} {number}/{len(cells)}"
                if failed:
                    text += f" ({failed} failed)"
                text += f", {remaining} left: {describe_outcome(cell, record)}"
                status.update(Text(text, no_wrap=True, overflow="ellipsis"))
                completes_tenth = 10 * number // len(cells) > 10 * (number - 1) // len(cells)
                if completes_tenth and not console.is_terminal:
                    console.print(text, markup=False)
                yield cell, record

    return measure_cells


def describe_outcome(cell: Cell, record: Record) -> str:
    """Return a short text of a cell and its outcome.

    Args:
        cell: The cell.
        record: Its outcome.

    Returns:
        The values of the cell, and the first quantities of its last row or the error.
    """
    values = " ".join(f"{axis}={value}" for axis, value in cell.values.items())
    if "error" in record:
        last_line = record["error"].strip().splitlines()[-1]
        return f"{values}: failed, {last_line[:80]}"
    quantities = []
    if record["rows"]:
        for name, value in list(record["rows"][-1].items())[:3]:
            quantities.append(f"{name} {value:.3g}")
    return f"{values}: {', '.join(quantities)}"


def format_time(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds.

    Example:
        >>> format_time(3661.2)
        '1:01:01'
    """
    return str(timedelta(seconds=round(seconds)))
