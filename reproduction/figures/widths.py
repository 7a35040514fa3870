"""Width of the reference network (fig:many_widths).

Modulations N(0, 1), γ=M, against M; a curve for each relative width. Dashed: separate networks at
the best rate for one. The last panel has all against their number of parameters.
"""

import math
from dataclasses import replace
from functools import partial

from embens.embedding.families import embed
from reproduction import baselines as fair
from reproduction.claims import Claim, Frame, Missing, Rows, growth_of_best
from reproduction.grid.cells import Cell, Row, sweep, train
from reproduction.drawing import LABELS, Curve, Figure, Panel, curves, panels, shades
from reproduction.figures.transition import MEMBERS

_FEW = (0.5, 1.0, 2.0)
WIDTHS = {"quick": (*_FEW, 4.0), "cpu": _FEW, "paper": (0.25, *_FEW, 4.0)}

SWEEP = [sweep(width=WIDTHS, members=MEMBERS), fair.sweep(WIDTHS)]


def measure(cell: Cell) -> Row:
    """Train one ensemble."""
    return train(cell, cell.make(embed)).evaluate()


def _fall(rows: Rows) -> float:
    """Accuracy at the best M less that at the largest."""
    _, values = fair.without(rows).first("width").curve("members", "accuracy")
    return max(values) - values[-1]


def _advantage(rows: Rows) -> float:
    """Difference of accuracies at equal numbers of parameters, mean over widths."""
    import numpy

    # Separate networks are interpolated in the logarithm of parameters along their upper envelope;
    # embedded ensembles smaller than all of them are left out.
    ensembles = fair.only(rows).frame.groupby(["width", "members"])
    means = ensembles[["parameters", "accuracy"]].mean().sort_values("parameters", kind="stable")
    envelope = means[means["accuracy"] > means["accuracy"].cummax().shift(fill_value=-math.inf)]
    sizes, gains = numpy.log(envelope["parameters"]), []
    for _, mine in fair.without(rows).by("width"):
        chosen = mine.where(members=int(mine.best("members")))
        size = math.log(chosen.mean("parameters"))
        if size >= sizes.iloc[0] - 1e-9:
            gains.append(chosen.mean("accuracy") - numpy.interp(size, sizes, envelope["accuracy"]))
    if not gains:
        raise Missing("separate networks with as many parameters")
    return sum(gains) / len(gains)


CLAIMS = [
    Claim(growth_of_best(fair.without), above=0.0).says(
        "the best number of members grows with the width", "it increases with the width"
    ),
    Claim(_fall, above=0.0, jumps=True).says(
        "at the smallest width the largest M is worse than the best", "an optimum at finite width"
    ),
    Claim(_advantage, above=-0.005, jumps=True).says(
        "at equal numbers of parameters the best embedded ensemble is at least as "
        "good as separate networks at their best rate (to 0.5 %)",
        "slightly outperforms at any fixed number of parameters",
    ),
    *fair.claims(lambda rows: fair.without(rows).last("width")),
]


def plot(table: Frame) -> Figure:
    """Return the paper's four panels."""
    embedded, separate = (some(Rows(table)).frame for some in (fair.without, fair.only))
    colours, trained = shades(table["width"], "plasma"), f"{fair.NETWORKS} were trained"

    def both(x: str, y: str, style: str = "line", ends: str = "") -> list[Curve]:
        draw = partial(curves, x=x, y=y, by="width", colours=colours)
        others = draw(separate, label="×{}, separate", style="dash")
        own = draw(embedded, label="×{}", style=style)
        return [*own, *(replace(curve, ends=ends) for curve in others)]

    titles = {
        "accuracy": "(a) does the best M grow with width?",
        "member_accuracy": "(b) narrow members suffer most",
        "correlation": "(c) wider members err more apart?",
    }
    found = panels(partial(both, "members", ends=trained), titles)
    see, scatter = "(d) who is better for its size?", both("parameters", "accuracy", "points")
    return Figure([*found, Panel(see, "parameters", LABELS["accuracy"], scatter, 10)])
