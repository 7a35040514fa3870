"""Times of training and inference of the systems of ``compare`` (ours: compare-times).

The cells of ``compare`` were measured in several sessions, on two processors. Here all systems take
turns in one session: each is trained with the same compute, for fewer epochs on fewer images, and
the fastest of some rounds counts. ``EMBENS_DATA`` is the folder of the data:

    python -m reproduction.compare_times docs/reproduction/compare/cpu/times.csv
"""

import csv
import io
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from reproduction.baselines import with_validation
from reproduction.competitors import FOUR_NETWORKS, SYSTEMS, TWO_NETWORKS
from reproduction.few_networks import as_separate_networks
from reproduction.figures.compare import CHANGES, inference_seconds, train_system
from reproduction.grid.cells import Cell
from reproduction.grid.settings import PRESETS, Setting
from reproduction.problems import load_problem, timed
from reproduction.storage import write_atomically

BUDGET = 4
ROUNDS = 3
SETTING = replace(PRESETS["cpu"], **{**CHANGES["cpu"], "epochs": 4, "train": 1600, "test": 1250})


def measure_times(setting: Setting, rounds: int) -> list[dict[str, str | float]]:
    """Return the processor time of all systems with a budget of four networks.

    Args:
        setting: Data, network and training; one network is trained for four times its epochs.
        rounds: Number of rounds, of which the fastest counts.

    Returns:
        For each system ``training_seconds`` and ``inference_seconds``.
    """
    fastest: dict[str, dict[str, float]] = {}
    for _ in range(rounds):
        for system in (*SYSTEMS, TWO_NETWORKS, FOUR_NETWORKS):
            cell = Cell(setting, {"system": system, "budget": BUDGET, "seed": 0}, "compare")
            times = time_system(cell)
            best = fastest.setdefault(system, times)
            for name, seconds in times.items():
                best[name] = min(best[name], seconds)
    return [{"system": system, **times} for system, times in fastest.items()]


def time_system(cell: Cell) -> dict[str, float]:
    """Return the processor time of one training, and of 1,000 test images."""
    if cell["system"] in (TWO_NETWORKS, FOUR_NETWORKS):
        cell = as_separate_networks(cell)
    problem = load_problem(cell.setting)
    problem = replace(problem, data=with_validation(problem.data, cell.seed))
    rate = cell.setting.rate_of(cell["system"])
    training, seconds = timed(partial(train_system, cell, problem, rate))
    inference = inference_seconds(training.ensemble, problem.data.test.inputs)
    return {"training_seconds": seconds, "inference_seconds": inference}


def main(arguments: Sequence[str]) -> None:
    """Write the times as a table."""
    rows = measure_times(SETTING, ROUNDS)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _rounded(value) for name, value in row.items()})
    write_atomically(Path(arguments[0]), text.getvalue())


def _rounded(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


if __name__ == "__main__":
    main(sys.argv[1:])
