"""Learning curves of members (fig:trajectories_log).

Loss on the train data (mean over members and over the steps of an epoch) against epochs,
modulations N(0, 1); a curve for each M. Left γ=1, centre γ=M, right γ=M at 4× width; below, test
accuracy of members.

In the independent regime a member of an infinitely wide ensemble learns as if it were alone, if
γ = M. With γ = 1 it learns M times more slowly. At finite width curves coincide at first, and for
longer in a wider network.
"""

import math
from functools import partial
from statistics import fmean

from embens.embedding.families import embed
from reproduction.claims import Claim, Frame, Missing, Rows, line
from reproduction.grid.cells import MEMBERS, Cell, Row, sweep, train
from reproduction.drawing import Figure, curves, panels, shades

SCHEMES = (("1", 1.0), ("M", 1.0), ("M", 4.0))
APART = 0.2  # relative difference of losses at which curves are apart

SWEEP = [sweep(gamma=gamma, width=w, members=MEMBERS) for gamma, w in SCHEMES]


def measure(cell: Cell) -> list[Row]:
    """Train one ensemble; return a row for each epoch."""
    gamma, ensemble = float(cell.members) if cell.gamma == "M" else 1.0, cell.make(embed)
    return train(cell, ensemble, gamma=gamma, test_each_epoch=True).trace


def _losses(rows: Rows) -> Frame:
    """Return the loss by M and epoch, mean over seeds."""
    losses = rows.frame.groupby(["members", "epoch"])["loss"].mean().unstack("epoch")
    if 1 not in losses.index or len(losses) < 2:
        raise Missing("M=1 and another M")
    return losses


def _first(events: Frame, otherwise: float) -> list[float]:
    """Return the first epoch at which something happens, for each M."""
    return list(events.idxmax(axis=1).where(events.any(axis=1), otherwise))


def _slowdown(rows: Rows, gamma: str) -> float:
    """Exponent in M of the time until half of what one network gains has been gained.

    The loss that is waited for is half-way between the first and the last of one network; who does
    not reach it counts as if it did at the end.
    """
    losses = _losses(rows.where(gamma=gamma, width=1.0))
    alone = losses.loc[1]
    times = _first(losses <= (alone.iloc[0] + alone.iloc[-1]) / 2, losses.columns.max())
    return line([math.log2(m) for m in losses.index], [math.log2(time) for time in times])


def _duration(rows: Rows, width: float) -> float:
    """Return the log of the epoch at which curves part from that of one network, mean over M."""
    losses = _losses(rows.where(gamma="M", width=width))
    apart = (losses.drop(index=1) / losses.loc[1]).map(math.log).abs() > APART
    return fmean(map(math.log, _first(apart, apart.columns.max() + 1)))


def _longer(rows: Rows) -> float:
    """Log of the ratio of epochs until losses differ by a fifth."""
    wide, narrow = _duration(rows, 4.0), _duration(rows, 1.0)
    if wide == narrow == math.log(rows["epoch"].max() + 1):
        raise Missing("epochs enough for curves to part; none did")
    return wide - narrow


CLAIMS = [
    Claim(partial(_slowdown, gamma="M"), above=-0.2, below=0.2, jumps=True).says(
        "with γ=M members learn as fast whatever M is (exponent 0, to 0.2)",
        "almost identical early",
    ),
    Claim(partial(_slowdown, gamma="1"), above=0.2, jumps=True).says(
        "with γ=1 they learn more slowly the more there are (exponent above 0.2)", "γ=1 is slower"
    ),
    Claim(_longer, above=0.0, jumps=True).says(
        "curves coincide for longer in the wider network", "this time increases with width"
    ),
]


def plot(table: Frame) -> Figure:
    """Return the paper's three panels, and the same for test accuracy."""
    colours, found = shades(table["members"]), []
    losses = ("slower with M", "together at first?", "together for longer?")
    accuracies = ("later with M", "as good at first?", "as good for longer?")
    for column, log, see in (("loss", 10, losses), ("member_accuracy", 0, accuracies)):
        for (gamma, width), text in zip(SCHEMES, see, strict=True):
            rows = table[(table["gamma"] == gamma) & (table["width"] == width)]
            draw = partial(curves, rows, "epoch", by="members", label="M={}", colours=colours)
            title = {column: f"γ={gamma}, width ×{width:g}: {text}"}
            found += panels(partial(draw, ends="diverged"), title, "epoch", x_log=10, y_log=log)
    return Figure(found, columns=3)
