"""Width of the reference network (fig:many_widths).

Embedded ensembles in the independent regime against ordinary independent ensembles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from embens.embedding.families import independent
from embens.experiments import transition
from embens.experiments.claims import Claim, Frame, Missing, Rows, judge
from embens.experiments.contract import CellBase, Row, batch_ensemble
from embens.experiments.figure import MEASURES, Curve, Figure, Panel, curves, shades
from embens.experiments.setting import Setting
from embens.experiments.training import train

LABEL = "fig:many_widths"
TITLE = "Width of the reference network"
ABOUT = (
    "Modulations N(0, 1), γ=M, against M; a curve for each relative width. Dashed: ordinary "
    "independent ensembles. The last panel has all of them against their number of parameters."
)


WIDTHS = {
    "quick": (0.5, 1.0, 2.0, 4.0),
    "cpu": (0.5, 1.0, 2.0),
    "paper": (0.25, 0.5, 1.0, 2.0, 4.0),
}
MEMBERS = {
    "embedded": transition.MEMBERS,
    "independent": {"quick": (1, 2, 4, 8), "cpu": (1, 2, 4), "paper": (1, 2, 3, 5, 7, 10)},
}


@dataclass(frozen=True)
class Cell(CellBase):
    """One ensemble; ``family`` is ``"embedded"`` or ``"independent"``."""

    family: str
    width: float
    members: int


def cells(setting: Setting) -> list[Cell]:
    """Return the sweep over widths and members, for both families."""
    widths = WIDTHS[setting.preset]
    both = {family: members[setting.preset] for family, members in MEMBERS.items()}
    return [
        Cell(family, width, count, setting=setting)
        for family, members in both.items()
        for width in widths
        for count in members
    ]


def measure(cell: Cell) -> Row:
    """Train one ensemble."""
    network, generator = cell.draw()
    make = batch_ensemble if cell.family == "embedded" else independent
    ensemble = make(network, cell.members, generator=generator)
    return train(ensemble, cell.setting, seed=cell.seed).evaluate()


def _embedded(rows: Rows) -> Rows:
    return rows.where(family="embedded")


def _inner_best(rows: Rows) -> float:
    _, values = _embedded(rows).first("width").curve("members", "accuracy")
    return max(values) - values[-1]


def _advantage(rows: Rows) -> float:
    import numpy

    # Independent ensembles are interpolated in the logarithm of parameters along their upper
    # envelope; embedded ensembles smaller than all of them are left out.
    ensembles = rows.where(family="independent").frame.groupby(["width", "members"])
    means = ensembles[["parameters", "accuracy"]].mean().sort_values("parameters", kind="stable")
    envelope = means[means["accuracy"] > means["accuracy"].cummax().shift(fill_value=-math.inf)]
    sizes = numpy.log(envelope["parameters"])
    gains = []
    for _, mine in _embedded(rows).by("width"):
        chosen = mine.where(members=int(mine.best("members")))
        size = math.log(chosen.mean("parameters"))
        if size >= sizes.iloc[0] - 1e-9:
            found = numpy.interp(size, sizes, envelope["accuracy"])
            gains.append(chosen.mean("accuracy") - found)
    if not gains:
        raise Missing("independent ensembles with as many parameters")
    return sum(gains) / len(gains)


def claims(table: Frame) -> list[Claim]:
    """Return the paper's observations on this figure."""
    test = partial(judge, table)
    return [
        test("best M grows with width", lambda t: _embedded(t).growth_of_best(), above=0.0).says(
            "the best number of members grows with the width",
            paper="the optimal size increases with the network width",
            measure="exponent of best M in width, mean over seeds",
        ),
        test("too many members hurt", _inner_best, above=0.0).says(
            "at the smallest width the largest M is worse than the best",
            paper="an optimal number of models at finite width",
            measure="accuracy at the best M less that at the largest",
        ),
        test("parameters", _advantage, above=-0.005).says(
            "at equal numbers of parameters the best embedded ensemble is at least as "
            "good as independent ensembles (to 0.5 %)",
            paper="slightly outperforms at any fixed number of parameters",
            measure="difference of accuracies, mean over widths",
        ),
    ]


def plot(table: Frame) -> Figure:
    """Return the paper's four panels."""
    colours = shades(table["width"], "plasma")

    def of(family: str, x: str, y: str, **options: str) -> list[Curve]:
        rows = table[table["family"] == family]
        return curves(rows, x, y, by="width", colours=colours, **options)

    separate = {"label": "×{}, independent", "style": "dash"}
    panels = []
    for letter, column in (("a", "accuracy"), ("b", "member_accuracy"), ("c", "correlation")):
        (title, label), found = MEASURES[column], of("embedded", "members", column, label="×{}")
        found += of("independent", "members", column, **separate)
        panels.append(Panel(f"({letter}) {title}", "members M", label, found, x_log=2))
    scatter = of("embedded", "parameters", "accuracy", label="×{}", style="points")
    scatter += of("independent", "parameters", "accuracy", **separate)
    panels.append(Panel("(d) accuracy and size", "parameters", "accuracy", scatter, x_log=10))
    return Figure(TITLE, panels)
