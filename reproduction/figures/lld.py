"""Last-layer dropout (fig:last_layer_dropout).

Frozen masks N(p, 1−p²) on the inputs of the last layer, γ=M; a colour for each p, a row for each
width of the network. Dashed: one network and separate ones, at the best rate for one.
"""

import math
from functools import partial

from embens import laws
from embens.embedding.families import last_layer_dropout
from reproduction.grid import cells as contract
from reproduction import baselines as fair
from reproduction.claims import Claim, Frame, Rows, growth_of_best, line, trend, where
from reproduction.grid.cells import Cell, Row, sweep, train
from reproduction.drawing import Figure, curves, panels, shades

SHIFTS = {"quick": (0.0, 0.3, 0.6, 0.9), "cpu": (0.0, 0.5, 0.9), "paper": (0, 0.25, 0.5, 0.75, 0.9)}
WIDTHS = (0.5, 1.0, 2.0)
MEMBERS = {**contract.MEMBERS, "cpu": (1, 2, 5, 10, 20, 40), "paper": (1, 2, 5, 10, 20, 30, 50)}

SWEEP = [sweep(p=SHIFTS, width=WIDTHS, members=MEMBERS), fair.sweep(WIDTHS)]


def measure(cell: Cell) -> Row:
    """Train one ensemble."""
    ensemble = cell.make(last_layer_dropout, law=laws.Shifted(cell.p))
    return train(cell, ensemble).evaluate()


_centred, _several = where(p=0.0), partial(Rows.between, column="members", low=4)


def _inverted_u(rows: Rows) -> float:
    """Smaller of rise to the best M and fall to the largest, mean over widths."""
    widths = _centred(rows).by("width")
    return sum(mine.rise_and_fall("members") for _, mine in widths) / len(widths)


def _gain(rows: Rows) -> float:
    """Slope of the relative gain per doubling of width."""
    points = []
    for width, mine in _centred(rows).by("width"):
        _, values = mine.curve("members", "accuracy")
        points.append((math.log2(width), max(values) / values[0] - 1))
    return line(*zip(*points, strict=True))


def _flattening(rows: Rows) -> float:
    """Slope in p of the range of accuracy over M."""
    means = rows.frame.groupby(["p", "width", "members"])["accuracy"].mean()
    ranges = means.groupby(["p", "width"]).agg(lambda some: some.max() - some.min())
    ranges = ranges.groupby("p").mean()
    return line(list(ranges.index), list(ranges))


_slope = partial(Rows.slope, x="members", y="member_accuracy")
CLAIMS = [
    Claim(_inverted_u, above=0.0, jumps=True).says(
        "at p=0 ensemble accuracy rises with M and falls again", "a clear maximum at some M > 1"
    ),
    Claim(growth_of_best(_centred), above=0.0).says(
        "at p=0 the best M moves right with width", "the optimum moves to the right"
    ),
    Claim(trend(_centred, "correlation", "width"), below=0.0).says(
        "at p=0 wider networks have less correlated members", "correlation is lower there"
    ),
    Claim(_gain, below=0.0, jumps=True).says(
        "at p=0 the relative gain of ensembling is smaller in wider networks", "it is lower there"
    ),
    Claim(_flattening, below=0.0, jumps=True).says(
        "curves flatten as p grows", "increasing p flattens all curves"
    ),
    Claim(lambda t: _slope(t.last("p")) - _slope(_centred(t)), above=0.0).says(
        "at large p members suffer less from M than at p=0",
        "no effect on members' accuracy",
        "Slope of member accuracy per doubling of M, largest p less p=0",
    ),
    Claim(trend(_several, "correlation", "p", log_x=False), above=0.0).says(
        "correlation grows with p", "mean correlation increases with p"
    ),
    *fair.claims(lambda t: _centred(t).last("width")),
]


def plot(table: Frame) -> Figure:
    """Return a row of panels for each width."""
    draw = partial(curves, x="members", by="p", label="p={}", colours=shades(table["p"].dropna()))
    found = []
    for width, rows in table.groupby("width"):
        titles = {
            "accuracy": f"width ×{width:g}: a best M at small p?",
            "member_accuracy": f"width ×{width:g}: what M costs a member",
            "correlation": f"width ×{width:g}: members alike at large p",
        }
        found += panels(fair.beside(partial(draw, rows), rows, width), titles)
    return Figure(found, columns=3)
