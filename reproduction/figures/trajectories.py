"""Learning curves of members (fig:trajectories_log).

Training loss (mean over members and over the steps of an epoch) against epochs, modulations
N(0, 1); a curve for each M. Left γ=1, centre γ=M, right γ=M at four times the width; below, test
accuracy of members.

In the independent regime a member of an infinitely wide ensemble learns as if it were alone, if
γ = M. With γ = 1 it learns M times more slowly. At finite width the curves coincide at first, and
for longer in a wider network.
"""

import math
from functools import partial
from statistics import fmean

from embens import embed
from reproduction.claims import Claim
from reproduction.drawing import Figure, curves, guessing, panels, shades, state
from reproduction.grid import cells
from reproduction.grid.cells import Cell, Row, sweep
from reproduction.rows import Frame, MissingCellsError, Rows, fit_slope
from reproduction.training import scaled_gamma, train

NARROW = {"quick": 1.0, "cpu": 0.5, "paper": 1.0}
WIDE = {"quick": 4.0, "cpu": 2.0, "paper": 4.0}
MEMBERS = {**cells.MEMBERS, "cpu": (1, 4, 16)}
APART = 0.2
"""Difference of log losses at which two curves count as separate."""

POOLED = True
SWEEP = [
    sweep(gamma=("1", "M"), width=NARROW, members=MEMBERS),
    sweep(gamma="M", width=WIDE, members=MEMBERS),
]


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
    return exponent_of_time(losses_by_members(rows.where(gamma=gamma).first("width")))


def exponent_of_time(losses: Frame) -> float:
    """Return the exponent in M of the time to half of one network's improvement."""
    single = losses.loc[1]
    halfway_loss = (single.iloc[0] + single.iloc[-1]) / 2
    times = first_epochs(losses <= halfway_loss, losses.columns.max())
    log_members = [math.log2(members) for members in losses.index]
    return fit_slope(log_members, [math.log2(time) for time in times])


def log_duration(rows: Rows) -> float:
    """Return the mean log of the epoch at which curves separate from that of one network."""
    losses = losses_by_members(rows)
    log_ratios = (losses.drop(index=1) / losses.loc[1]).map(math.log)
    separated = log_ratios.abs() > APART
    epochs = first_epochs(separated, separated.columns.max() + 1)
    return fmean(math.log(epoch) for epoch in epochs)


def duration_ratio(rows: Rows) -> float:
    """Return the log of the ratio of durations, wide to narrow."""
    scaled = rows.where(gamma="M")
    if scaled["width"].nunique() < 2:
        raise MissingCellsError("two widths with γ=M")
    wide = log_duration(scaled.last("width"))
    narrow = log_duration(scaled.first("width"))
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


def title_of_scheme(rows: Rows, column: str, scheme: str) -> str:
    """Return the title of a panel, with the result of one scheme."""

    def slowdown_text() -> str:
        return f"{scheme}: time to learn ∝ M^{exponent_of_time(losses_by_members(rows)):.2f}"

    def accuracy_text() -> str:
        final = rows.last("epoch")
        change = 100 * final.slope("members", "member_accuracy")
        return f"{scheme}: members {change:+.1f} % per doubling of M"

    if column == "loss":
        return state(slowdown_text, f"{scheme}: training loss")
    return state(accuracy_text, f"{scheme}: member accuracy")


def plot(table: Frame) -> Figure:
    """Return the paper's three panels, and the same for test accuracy."""
    colours = shades(table["members"])
    narrow, wide = table["width"].min(), table["width"].max()
    # An unfinished run can have one width only.
    schemes = dict.fromkeys([("1", narrow), ("M", narrow), ("M", wide)])
    all_panels = []
    for column, y_log in (("loss", 10), ("member_accuracy", 0)):
        for gamma, width in schemes:
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
            title = title_of_scheme(Rows(selected), column, f"γ={gamma}, width ×{width:g}")
            marks = {"loss": guessing(table)}
            all_panels += panels(draw, {column: title}, "epoch", x_log=10, y_log=y_log, marks=marks)
    return Figure(all_panels, columns=3)
