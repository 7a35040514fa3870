"""Fair lines: one network and M separate ones, at the rate that is best for one network.

Rates of the presets suit the largest collective ensembles; an ensemble has to beat its reference as
well trained as that can be. The rate is chosen by the log loss on a fifth of the train rows, or by
the accuracy there where images are learnt by heart (the log loss of all that has learnt is then
worse than that of guessing), and networks are then trained on all rows. A cell of this kind belongs
to no experiment: what one of them has measured, the others in the same results folder take over.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from embens import metrics
from reproduction.datasets import DataSet
from embens.embedding.families import independent
from reproduction.grid import cells as contract
from reproduction.claims import Claim, Frame, Rows, Some
from reproduction.grid.cells import Cell, Row, Training, run, train
from reproduction.drawing import Curve, curves
from reproduction.grid.settings import Setting, data_set

FACTORS = (1.0, 4.0, 16.0)  # of the preset's rate
TRIED = 2  # networks for each of them
NETWORKS = 8  # about the paper's best M
ONE, SEPARATE, GREY = "one network", "separate networks", "#7f7f7f"


def sweep(width: Any) -> Callable[[Setting], list[Cell]]:
    """Return the sweep of separate networks of some widths."""
    return contract.sweep("fair", width=width, networks=NETWORKS)


def weight(cell: Cell) -> float:
    """Return roughly what a cell costs: about as many networks are trained to choose the rate."""
    return contract.weight(cell.but(members=2 * cell.networks))


def measure(cell: Cell) -> list[Row]:
    """Choose the rate, train separate networks with it; return a row for each number of them."""
    data = data_set(cell.setting)
    generator = torch.Generator().manual_seed(cell.seed)
    fifth = len(data.train.targets) // 5
    held = data if data.validation else data.split(fifth, generator=generator)
    factor = min(FACTORS, key=partial(_held_out_loss, cell, held))
    trained = train_separate(cell, cell.networks, factor, data)
    several = {m: trained.ensemble.subset(range(m)) for m in (1, 2, 4, cell.networks)}
    return [
        {"members": members, "factor": factor, **replace(trained, ensemble=some).evaluate()}
        for members, some in several.items()
    ]


def train_separate(cell: Cell, networks: int, factor: float, data: DataSet) -> Training:
    """Train some networks at a multiple of the preset's rate."""
    network, generator = cell.draw()
    ensemble = independent(network, networks, generator=generator)
    return train(cell, ensemble, data=data, lr=factor * cell.setting.lr)


def _held_out_loss(cell: Cell, held: DataSet, factor: float) -> float:
    tried = train_separate(cell, TRIED, factor, held)
    assert held.validation is not None
    outputs, targets = run(tried.ensemble, held.validation.inputs), held.validation.targets
    if cell.setting.preset == "quick":
        loss = metrics.member_nll(outputs, targets).mean()
    else:
        loss = -metrics.member_accuracy(outputs, targets).mean()
    return math.inf if tried.diverged else float(loss)


def only(rows: Rows) -> Rows:
    """Return the rows of fair cells, which alone have a number of networks."""
    return Rows(rows.frame[rows.frame.reindex(columns=["networks"])["networks"].notna()])


def without(rows: Rows) -> Rows:
    """Return the other rows."""
    return Rows(rows.frame.drop(only(rows).frame.index))


def lines(table: Frame, column: str, *, width: float = 1.0) -> list[Curve]:
    """Return one network as a flat line, and separate ones against M, if they were measured."""
    rows = only(Rows(table)).frame
    rows = rows[rows["width"] == width] if len(rows) else rows
    most, few = float(table["members"].max()), rows["members"].max()
    one = curves(rows[rows["members"] == 1], "members", column, label=ONE, colours="#000000")
    separate = curves(rows[rows["members"] > 1], "members", column, label=SEPARATE, colours=GREY)
    ends = f"{few:g} were trained" if few < most else ""
    return [
        *(replace(c, x=[1.0, most], y=c.y * 2, error=[], style="dash") for c in one),
        *(replace(c, ends=ends, style="dash") for c in separate),
    ]


def beside(draw: Callable[..., list[Curve]], table: Frame, width: float = 1.0) -> Callable:
    """Return how to draw a column, with fair lines beside the curves of ``draw(y=column)``."""
    return lambda y: [*draw(y=y), *lines(table, y, width=width)]


def claims(some: Some, jumps: bool = False) -> list[Claim]:
    """Return how some members compare with one network, and with as many separate ones.

    There are eight of them, or as many as there are below that. Networks are as wide as those
    members', which are of width 1 if nothing is said of it; which members these are may jump from
    seeds to other seeds.
    """

    def less(rows: Rows, networks: int | None) -> float:
        """Difference of test accuracies, at the largest M up to 8."""
        mine = some(rows).between("members", high=NETWORKS).last("members")
        width = float(mine.frame.reindex(columns=["width"]).fillna(1.0)["width"].max())
        count = networks or int(mine.mean("members"))
        others = only(rows).where(width=width, members=count)
        return mine.mean("accuracy") - others.mean("accuracy")

    return [
        Claim(partial(less, networks=1), above=0.0, jumps=jumps).says(
            "members together are more accurate than one network at its own best rate",
            "ensembles improve on a single model",
        ),
        Claim(partial(less, networks=None), above=-0.01, jumps=jumps).says(
            "members are as accurate as so many separate networks (to 1 %)", "as if trained apart"
        ),
    ]
