"""Width of the reference network (fig:many_widths).

Embedded ensembles in the independent regime (modulations N(0, 1), γ = M) and ordinary independent
ensembles, at several widths; and all of them against the number of their parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch

from embens.embedding.families import batch_ensemble, independent
from embens.experiments.claims import (
    Claim,
    Missing,
    Table,
    best,
    curve,
    growth_of_best,
    judge,
    select,
)
from embens.experiments.figure import Figure, Panel, curves, shades
from embens.experiments.setting import Setting, data_set, reference
from embens.experiments.training import Row, evaluate, train

LABEL = "fig:many_widths"
TITLE = "Width of the reference network"
ABOUT = (
    "Modulations N(0, 1), γ=M, against M; a curve for each relative width. Dashed: ordinary "
    "independent ensembles. The last panel has all of them against their number of parameters."
)


@dataclass(frozen=True)
class Cell:
    """One ensemble; ``family`` is ``"embedded"`` or ``"independent"``."""

    setting: Setting
    family: str
    width: float
    members: int
    seed: int


@dataclass(frozen=True)
class Sweep:
    """What a preset sweeps."""

    widths: tuple[float, ...]
    members: tuple[int, ...]
    separate: tuple[int, ...]  # members of independent ensembles
    seeds: int


SWEEPS = {
    "quick": Sweep((0.5, 1.0, 2.0, 4.0), (1, 2, 4, 8, 16, 32), (1, 2, 4, 8), 5),
    "cpu": Sweep((0.5, 1.0, 2.0), (1, 2, 4, 8, 16), (1, 2, 4), 3),
    "paper": Sweep(
        (0.25, 0.5, 1.0, 2.0, 4.0), (1, 2, 3, 5, 7, 10, 14, 20, 28, 40), (1, 2, 3, 5, 7, 10), 3
    ),
}


def cells(setting: Setting, *, seeds: int | None = None) -> list[Cell]:
    """Return the sweep over widths, members and seeds, for both families."""
    sweep = SWEEPS[setting.preset]
    return [
        Cell(setting, family, width, members, seed)
        for seed in range(seeds or sweep.seeds)
        for family, sizes in (("embedded", sweep.members), ("independent", sweep.separate))
        for width in sweep.widths
        for members in sizes
    ]


def measure(cell: Cell) -> Row:
    """Train one ensemble."""
    generator = torch.Generator().manual_seed(cell.seed)
    network = reference(cell.setting, cell.width, generator=generator)
    if cell.family == "embedded":
        ensemble = batch_ensemble(network, cell.members, generator=generator)
    else:
        ensemble = independent(network, cell.members, generator=generator)
    data = data_set(cell.setting)
    training = train(ensemble, cell.setting, data, seed=cell.seed)
    return {**evaluate(ensemble, data), "diverged": float(training.diverged)}


def _growth_of_best(table: Table) -> float:
    return growth_of_best(select(table, family="embedded"))


def _inner_best(table: Table) -> float:
    """Return by how much the best M beats the largest, at the smallest width."""
    rows = select(table, family="embedded")
    _, values = curve(select(rows, width=float(rows["width"].min())), "members", "accuracy")
    return max(values) - values[-1]


def _advantage(table: Table) -> float:
    """Return accuracy at the best M less that of independent ensembles with as many parameters.

    Those are interpolated in the logarithm of parameters along their upper envelope; embedded
    ensembles outside its range are left out.
    """
    envelope: list[tuple[float, float]] = []
    separate = select(table, family="independent")
    for _, rows in sorted(separate.groupby(["width", "members"]), key=_parameters):
        size, accuracy = math.log(rows["parameters"].mean()), rows["accuracy"].mean()
        if not envelope or accuracy > envelope[-1][1]:
            envelope.append((size, accuracy))
    gains = []
    for _, rows in select(table, family="embedded").groupby("width"):
        chosen = select(rows, members=int(best(rows, "members", "accuracy")))
        size = math.log(chosen["parameters"].mean())
        against = _interpolated(envelope, size)
        if against is not None:
            gains.append(chosen["accuracy"].mean() - against)
    if not gains:
        raise Missing("independent ensembles with as many parameters")
    return sum(gains) / len(gains)


def _parameters(group) -> float:
    return group[1]["parameters"].mean()


def _interpolated(points: list[tuple[float, float]], x: float) -> float | None:
    if not points or x < points[0][0] - 1e-9:
        return None
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return points[-1][1]  # more parameters never helped


def claims(table: Table) -> list[Claim]:
    """Return the paper's observations on this figure."""
    test = partial(judge, table)
    return [
        test(
            _growth_of_best,
            name="best M grows with width",
            statement="the best number of members grows with the width",
            paper="the optimal size increases with the network width",
            measure="exponent of best M in width, mean over seeds",
            above=0.0,
        ),
        test(
            _inner_best,
            name="too many members hurt",
            statement="at the smallest width the largest M is worse than the best",
            paper="an optimal number of models at finite width",
            measure="accuracy at the best M less that at the largest",
            above=0.0,
        ),
        test(
            _advantage,
            name="parameters",
            statement="at equal numbers of parameters the best embedded ensemble is at least as "
            "good as independent ensembles (to 0.5 %)",
            paper="slightly outperforms at any fixed number of parameters",
            measure="difference of accuracies, mean over widths",
            above=-0.005,
        ),
    ]


def plot(table: Table) -> Figure:
    """Return the paper's four panels."""
    colours = shades(list(table["width"]), "plasma")
    families = (("embedded", "line", "×{}"), ("independent", "dash", "×{}, independent"))

    def panel(title: str, label: str, column: str) -> Panel:
        found = [
            c
            for family, style, text in families
            for c in curves(
                *(table[table["family"] == family], "members", column),
                by="width",
                label=text,
                colours=colours,
                style=style,
            )
        ]
        return Panel(title, "members M", label, found, x_log=True)

    scatter = [
        c
        for family, style, text in (("embedded", "points", "×{}"), families[1])
        for c in curves(
            *(table[table["family"] == family], "parameters", "accuracy"),
            by="width",
            label=text,
            colours=colours,
            style=style,
        )
    ]
    return Figure(
        TITLE,
        [
            panel("(a) ensemble, test", "accuracy", "accuracy"),
            panel("(b) members, test", "mean accuracy", "member_accuracy"),
            panel("(c) correlation, test", "correlation", "correlation"),
            Panel("(d) accuracy and size", "parameters", "accuracy", scatter, x_log=True),
        ],
    )
