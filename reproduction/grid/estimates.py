"""Estimates of the duration of a run."""

from collections.abc import Sequence
from dataclasses import dataclass

from reproduction.grid.cells import Cell, cost_of
from reproduction.grid.runs import measure


@dataclass(frozen=True)
class Timing:
    """Duration of a cell as a linear function of its cost.

    Attributes:
        per_cell: Seconds of every cell, for example to load data.
        per_cost: Seconds per unit of cost.
    """

    per_cell: float
    per_cost: float

    def seconds(self, cell: Cell) -> float:
        """Return the estimated seconds of a cell."""
        return self.per_cell + self.per_cost * cost_of(cell)


def time_cells(cells: Sequence[Cell]) -> Timing:
    """Estimate the durations of cells from short runs of the cheapest one.

    Args:
        cells: Cells of one experiment.

    Returns:
        The timing.

    Raises:
        RuntimeError: If the timed cell fails.
    """
    cheapest = min(cells, key=cost_of)
    short, long = cheapest.shortened(epochs=1), cheapest.shortened(epochs=9)
    measure(short)  # loads the data and warms up
    short_record, long_record = measure(short), measure(long)
    if "error" in short_record:
        name = cheapest.experiment
        raise RuntimeError(f"{name}: the timed cell failed:\n{short_record['error']}")
    extra_cost = cost_of(long) - cost_of(short)
    extra_seconds = long_record["seconds"] - short_record["seconds"]
    if extra_cost > 0 and extra_seconds > 0:
        per_cost = extra_seconds / extra_cost
    else:
        # Nothing is trained, or training takes no measurable time.
        per_cost = short_record["seconds"] / cost_of(short)
    per_cell = max(0.0, short_record["seconds"] - per_cost * cost_of(short))
    return Timing(per_cell, per_cost)
