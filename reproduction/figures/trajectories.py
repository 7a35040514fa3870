"""Learning curves of members (fig:trajectories_log).

Training loss (mean over members and over the steps of an epoch) against epochs, modulations
N(0, 1); a curve for each M. Left γ=1, centre γ=M, right γ=M at 4× width; below, test accuracy of
members.

In the independent regime a member of an infinitely wide ensemble learns as if it were alone, if
γ = M. With γ = 1 it learns M times more slowly. At finite width the curves coincide at first, and
for longer in a wider network.
"""

import math
from functools import partial
from statistics import fmean

from embens import embed
from reproduction.claims import Claim
from reproduction.drawing import Figure, curves, panels, shades
from reproduction.grid.cells import MEMBERS, Cell, Row, sweep
from reproduction.rows import Frame, MissingCellsError, Rows, fit_slope
from reproduction.training import scaled_gamma, train

SCHEMES = (("1", 1.0), ("M", 1.0), ("M", 4.0))
"""Pairs of γ and relative width."""
APART = 0.2
"""Difference of log losses at which two curves count as separate."""

SWEEP = [sweep(gamma=gamma, width=width, members=MEMBERS) for gamma, width in SCHEMES]


def measure(cell: Cell) -> list[Row]:
    """Train one ensemble; return a row for each epoch."""
    ensemble = cell.build_ensemble(embed)
    return train(cell, ensemble, gamma=scaled_gamma(cell), test_each_epoch=True).trace


def losses_by_members(rows: Rows) -> Frame:
    """Return the loss by M (rows) and epoch (columns), mean over seeds."""
    losses = rows.frame.groupby(["members", "epoch"])["loss"].mean().unstack("epoch")
    if 1 not in losses.index or len(losses) < 2:
        raise MissingCellsError("M=1 and another M")
    return losses


def first_epochs(events: Frame, default: float) -> list[float]:
    """Return, for each M, the first epoch with an event, or a default if there is none."""
    return list(events.idxmax(axis=1).where(events.any(axis=1), default))


def slowdown(rows: Rows, gamma: str) -> float:
    """Return the exponent in M of the time to reach half of one network's improvement.

    The loss to reach is halfway between the first and the last loss of one network. Ensembles that
    do not reach it count with the last epoch.
    """
    losses = losses_by_members(rows.where(gamma=gamma, width=1.0))
    single = losses.loc[1]
    halfway_loss = (single.iloc[0] + single.iloc[-1]) / 2
    times = first_epochs(losses <= halfway_loss, losses.columns.max())
    log_members = [math.log2(members) for members in losses.index]
    return fit_slope(log_members, [math.log2(time) for time in times])


def log_duration(rows: Rows, width: float) -> float:
    """Return the mean log of the epoch at which curves separate from that of one network."""
    losses = losses_by_members(rows.where(gamma="M", width=width))
    log_ratios = (losses.drop(index=1) / losses.loc[1]).map(math.log)
    separated = log_ratios.abs() > APART
    epochs = first_epochs(separated, separated.columns.max() + 1)
    return fmean(math.log(epoch) for epoch in epochs)


def duration_ratio(rows: Rows) -> float:
    """Return the log of the ratio of durations, wide to narrow."""
    wide = log_duration(rows, 4.0)
    narrow = log_duration(rows, 1.0)
    never = math.log(rows["epoch"].max() + 1)
    if wide == narrow == never:
        raise MissingCellsError("enough epochs for the curves to separate")
    return wide - narrow


CLAIMS = [
    Claim(
        statement="with γ=M members learn equally fast for every M (exponent 0, to 0.2)",
        measure="exponent in M of the time to half of one network's improvement",
        statistic=partial(slowdown, gamma="M"),
        above=-0.2,
        below=0.2,
        paper="almost identical early",
        jumps=True,
    ),
    Claim(
        statement="with γ=1 members learn more slowly with more members (exponent above 0.2)",
        measure="exponent in M of the time to half of one network's improvement",
        statistic=partial(slowdown, gamma="1"),
        above=0.2,
        paper="γ=1 is slower",
        jumps=True,
    ),
    Claim(
        statement="curves coincide for longer in the wider network",
        measure="log of the ratio of epochs until losses differ by a fifth",
        statistic=duration_ratio,
        above=0.0,
        paper="this time increases with width",
        jumps=True,
    ),
]


def plot(table: Frame) -> Figure:
    """Return the paper's three panels, and the same for test accuracy."""
    colours = shades(table["members"])
    rows_of_panels = (
        ("loss", 10, ("slower with M", "together at first?", "together for longer?")),
        ("member_accuracy", 0, ("later with M", "as good at first?", "as good for longer?")),
    )
    drawn = []
    for column, y_log, texts in rows_of_panels:
        for (gamma, width), text in zip(SCHEMES, texts, strict=True):
            selected = table[(table["gamma"] == gamma) & (table["width"] == width)]
            draw = partial(
                curves,
                selected,
                "epoch",
                by="members",
                label="M={}",
                colours=colours,
                ends="diverged",
            )
            title = f"γ={gamma}, width ×{width:g}: {text}"
            drawn += panels(draw, {column: title}, "epoch", x_log=10, y_log=y_log)
    return Figure(drawn, columns=3)
