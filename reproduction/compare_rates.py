"""Choice of the learning rates of ``compare`` (ours: compare-rates).

Validation log loss against the learning rate, with the compute of one network. One system of each
family is tuned; the others of the family use its rate, at all budgets.

The test part is not used. ``python -m reproduction record DIR`` writes the choice to
``choices.json``, which ``compare`` reads.
"""

import math
from dataclasses import replace
from typing import Any

from reproduction.baselines import with_validation
from reproduction.claims import Claim
from reproduction.competitors import TUNED
from reproduction.drawing import Figure, Panel, curves, shades
from reproduction.figures import compare
from reproduction.figures.compare import train_system, validation_loss
from reproduction.grid.cells import Cell, Row, sweep
from reproduction.problems import load_problem
from reproduction.rows import Frame, MissingCellsError

RATES = {"quick": (0.012, 0.048), "cpu": (0.03, 0.1, 0.3), "paper": (0.01, 0.03, 0.1)}
BUDGET = 1
SEEDS = {"quick": 1, "cpu": 1, "gpu": 1, "paper": 1}
# The recorded rates are the result of this experiment, not a part of its setting.
CHANGES = {preset: {**changes, "rates": ()} for preset, changes in compare.CHANGES.items()}
SWEEP = [sweep(system=sorted(set(TUNED.values())), budget=BUDGET, lr=RATES)]
CLAIMS: list[Claim] = []
estimate_cost = compare.estimate_cost


def measure(cell: Cell) -> Row:
    """Train one system at one learning rate and return its validation loss."""
    problem = load_problem(cell.setting)
    problem = replace(problem, data=with_validation(problem.data, cell.seed))
    training = train_system(cell, problem, cell["lr"])
    return {"validation_nll": validation_loss(training)}


def choose(table: Frame) -> dict[str, Any]:
    """Return the best learning rate of each family for all its systems.

    Args:
        table: Table of the experiment.

    Returns:
        ``rates`` by system, and ``validation_nll`` by tuned system and rate.

    Raises:
        MissingCellsError: If a tuned system diverges at all rates.
    """
    means = table.groupby(["system", "lr"])["validation_nll"].mean()
    best, losses = {}, {}
    for system in sorted(table["system"].unique()):
        by_rate = means[system]
        if math.isinf(by_rate.min()):
            raise MissingCellsError(f"a learning rate at which {system} does not diverge")
        best[system] = float(by_rate.idxmin())
        losses[system] = {f"{rate:g}": round(loss, 4) for rate, loss in by_rate.items()}
    rates = {system: best[tuned] for system, tuned in TUNED.items() if tuned in best}
    return {"rates": rates, "validation_nll": losses}


def plot(table: Frame) -> Figure:
    """Return the loss of each tuned system against the learning rate."""
    all_panels = curves(table, "lr", "validation_nll", by="system", colours=shades(table["system"]))
    title = "which rate, with the compute of one network?"
    return Figure([Panel(title, "learning rate", "log loss, validation", all_panels, 10)])
