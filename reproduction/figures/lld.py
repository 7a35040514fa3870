"""Last-layer dropout (fig:last_layer_dropout).

Frozen masks N(p, 1−p²) on the inputs of the last layer, γ=M; a colour for each p, a row for each
width of the network. Dashed: one network and separate networks, at the best learning rate for one
network.
"""

import math
from functools import partial

from embens import last_layer_dropout, laws
from reproduction import baselines
from reproduction.claims import Claim, growth_of_best, slope
from reproduction.drawing import Figure, curves, panels, shades, state
from reproduction.grid import cells
from reproduction.grid.cells import Cell, Row, sweep, training_cost
from reproduction.grid.settings import LAST_LAYER
from reproduction.rows import Frame, Rows, fit_slope, where
from reproduction.training import train

SHIFTS = {
    "quick": (0.0, 0.3, 0.6, 0.9),
    "cpu": (0.0, 0.5, 0.9),
    "paper": (0, 0.25, 0.5, 0.75, 0.9),
}
WIDTHS = (0.5, 1.0, 2.0)
MEMBERS = {**cells.MEMBERS, "cpu": (1, 2, 5, 10, 20, 40), "paper": (1, 2, 5, 10, 20, 30, 50)}

POOLED = True
SWEEP = [sweep(p=SHIFTS, width=WIDTHS, members=MEMBERS), baselines.sweep(WIDTHS)]


def estimate_cost(cell: Cell) -> float:
    """Return the rough cost of a cell; its members share all layers but the last."""
    return training_cost(cell.with_values(members=1 + cell["members"] / 20))


def measure(cell: Cell) -> Row:
    """Train one ensemble and score it."""
    ensemble = cell.build_ensemble(last_layer_dropout, law=laws.Shifted(cell["p"]))
    return train(cell, ensemble, family=LAST_LAYER).evaluate()


centred = where(p=0.0)


def rise_and_fall_when_centred(rows: Rows) -> float:
    """Return the smaller of rise and fall over M at p=0, mean over widths."""
    by_width = centred(rows).by("width")
    values = [rows_of_width.rise_and_fall("members") for _, rows_of_width in by_width]
    return sum(values) / len(values)


def slope_of_gain(rows: Rows) -> float:
    """Return the slope of the relative gain of ensembling per doubling of width, at p=0."""
    log_widths, gains = [], []
    for width, rows_of_width in centred(rows).by("width"):
        _, accuracies = rows_of_width.curve("members", "accuracy")
        log_widths.append(math.log2(width))
        gains.append(max(accuracies) / accuracies[0] - 1)
    return fit_slope(log_widths, gains)


def slope_of_range(rows: Rows) -> float:
    """Return the slope in p of the range of accuracy over M, mean over widths."""
    means = rows.frame.groupby(["p", "width", "members"])["accuracy"].mean()
    by_curve = means.groupby(["p", "width"])
    ranges = (by_curve.max() - by_curve.min()).groupby("p").mean()
    return fit_slope(list(ranges.index), list(ranges))


def effect_of_large_shift(rows: Rows) -> float:
    """Return the slope of member accuracy per doubling of M, largest p minus p=0."""
    at_largest = rows.last("p").slope("members", "member_accuracy")
    return at_largest - centred(rows).slope("members", "member_accuracy")


CLAIMS = [
    Claim(
        statement="at p=0 ensemble accuracy rises with M and falls again",
        measure="smaller of the rise to the best M and the fall to the largest M, mean over widths",
        statistic=rise_and_fall_when_centred,
        above=0.0,
        paper="a clear maximum at some M > 1",
        jumps=True,
    ),
    Claim(
        statement="at p=0 the best M grows with width",
        measure="exponent of the best M in the width, mean over seeds",
        statistic=growth_of_best(centred),
        above=0.0,
        paper="the optimum moves to the right",
    ),
    Claim(
        statement="at p=0 wider networks have less correlated members",
        measure="slope of correlation per doubling of width",
        statistic=slope(centred, "correlation", "width"),
        below=0.0,
        paper="correlation is lower there",
    ),
    Claim(
        statement="at p=0 the relative gain of ensembling is smaller in wider networks",
        measure="slope of the relative gain per doubling of width",
        statistic=slope_of_gain,
        below=0.0,
        paper="it is lower there",
        jumps=True,
    ),
    Claim(
        statement="curves flatten as p grows",
        measure="slope in p of the range of accuracy over M",
        statistic=slope_of_range,
        below=0.0,
        paper="increasing p flattens all curves",
        jumps=True,
    ),
    Claim(
        statement="at large p members suffer less from M than at p=0",
        measure="slope of member accuracy per doubling of M, largest p minus p=0",
        statistic=effect_of_large_shift,
        above=0.0,
        paper="no effect on members' accuracy",
    ),
    Claim(
        statement="correlation grows with p",
        measure="slope of correlation in p (M ≥ 4)",
        statistic=slope(
            lambda rows: rows.between("members", low=4), "correlation", "p", log_x=False
        ),
        above=0.0,
        paper="mean correlation increases with p",
    ),
    *baselines.claims(lambda rows: centred(rows).last("width")),
]


def titles_of_width(rows: Rows, width: float) -> dict[str, str]:
    """Return the titles of the panels of one width, with its results."""

    def accuracy() -> str:
        low, high = (rows.where(p=p).best("members") for p in (0.0, 0.9))
        return f"width ×{width:g}: best M={low:g} at p=0, {high:g} at p=0.9"

    def members() -> str:
        low, high = (100 * rows.where(p=p).slope("members", "member_accuracy") for p in (0.0, 0.9))
        return f"width ×{width:g}: members {low:+.1f} % per doubling at p=0, {high:+.1f} % at 0.9"

    def correlation() -> str:
        low, high = (rows.where(p=p).mean("correlation") for p in (0.0, 0.9))
        return f"width ×{width:g}: correlation {low:.2f} at p=0, {high:.2f} at p=0.9"

    return {
        "accuracy": state(accuracy, f"width ×{width:g}: ensemble accuracy"),
        "member_accuracy": state(members, f"width ×{width:g}: member accuracy"),
        "correlation": state(correlation, f"width ×{width:g}: correlation"),
    }


def plot(table: Frame) -> Figure:
    """Return a row of panels for each width."""
    draw = partial(curves, x="members", by="p", label="p={}", colours=shades(table["p"].dropna()))
    all_panels = []
    for width, rows in table.groupby("width"):
        titles = titles_of_width(Rows(rows), width)
        all_panels += panels(baselines.with_lines(partial(draw, rows), rows, width), titles)
    return Figure(all_panels, columns=3)
