"""Last-layer dropout with shifted masks (fig:last_layer_dropout).

Frozen masks N(p, 1 − p²) on the inputs of the last layer, over p, width and M, with γ = M.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch

from embens import laws
from embens.embedding.families import last_layer_dropout
from embens.experiments.claims import (
    Claim,
    Table,
    curve,
    growth_of_best,
    judge,
    line,
    rise_and_fall,
    select,
    slope,
)
from embens.experiments.figure import Figure, Panel, curves, shades
from embens.experiments.setting import Setting, data_set, reference
from embens.experiments.training import Row, evaluate, train

LABEL = "fig:last_layer_dropout"
TITLE = "Last-layer dropout"
ABOUT = (
    "Frozen masks N(p, 1−p²) on the inputs of the last layer, γ=M; a colour for each p, a row for "
    "each width of the network."
)


@dataclass(frozen=True)
class Cell:
    """One ensemble."""

    setting: Setting
    p: float
    width: float
    members: int
    seed: int


@dataclass(frozen=True)
class Sweep:
    """What a preset sweeps."""

    p: tuple[float, ...]
    widths: tuple[float, ...]
    members: tuple[int, ...]
    seeds: int


SWEEPS = {
    "quick": Sweep((0.0, 0.3, 0.6, 0.9), (0.5, 1.0, 2.0), (1, 2, 4, 8, 16, 32), 5),
    "cpu": Sweep((0.0, 0.5, 0.9), (0.5, 1.0, 2.0), (1, 2, 5, 10, 20, 40), 3),
    "paper": Sweep((0.0, 0.25, 0.5, 0.75, 0.9), (0.5, 1.0, 2.0), (1, 2, 5, 10, 20, 30, 50), 3),
}


def cells(setting: Setting, *, seeds: int | None = None) -> list[Cell]:
    """Return the sweep over p, width, M and seeds."""
    sweep = SWEEPS[setting.preset]
    return [
        Cell(setting, p, width, members, seed)
        for seed in range(seeds or sweep.seeds)
        for p in sweep.p
        for width in sweep.widths
        for members in sweep.members
    ]


def measure(cell: Cell) -> Row:
    """Train one ensemble."""
    generator = torch.Generator().manual_seed(cell.seed)
    network = reference(cell.setting, cell.width, generator=generator)
    law = laws.Shifted(cell.p)
    ensemble = last_layer_dropout(network, cell.members, law=law, generator=generator)
    data = data_set(cell.setting)
    training = train(ensemble, cell.setting, data, seed=cell.seed)
    return {**evaluate(ensemble, data), "diverged": float(training.diverged)}


def _centred(table: Table) -> Table:
    return select(table, p=0.0)


def _gain(table: Table) -> float:
    """Return the slope in log2(width) of the relative gain of the best M over M=1, at p=0."""
    points = []
    for width, rows in _centred(table).groupby("width"):
        _, values = curve(rows, "members", "accuracy")
        points.append((math.log2(width), max(values) / values[0] - 1))
    return line(*zip(*points, strict=True))


def _flattening(table: Table) -> float:
    """Return the slope in p of the range of ensemble accuracy over M."""
    points = []
    for p, rows in table.groupby("p"):
        ranges = []
        for _, mine in rows.groupby("width"):
            _, values = curve(mine, "members", "accuracy")
            ranges.append(max(values) - min(values))
        points.append((float(p), sum(ranges) / len(ranges)))
    return line(*zip(*points, strict=True))


def _suffering(table: Table) -> float:
    """Return the slope of member accuracy in M at the largest p, less that at p=0."""
    large = select(table, p=float(table["p"].max()))
    return slope(large, "members", "member_accuracy") - slope(
        _centred(table), "members", "member_accuracy"
    )


def claims(table: Table) -> list[Claim]:
    """Return the paper's observations on this figure."""
    test = partial(judge, table)
    return [
        test(
            lambda t: mean_of_widths(_centred(t)),
            name="inverted U",
            statement="at p=0 ensemble accuracy rises with M and falls again",
            paper="a clear maximum at some M > 1",
            measure="smaller of rise to the best M and fall to the largest, mean over widths",
            above=0.0,
        ),
        test(
            lambda t: growth_of_best(_centred(t)),
            name="best M grows with width",
            statement="at p=0 the best M moves right with width",
            paper="width moves the point of optimal performance to the right",
            measure="exponent of best M in width, mean over seeds",
            above=0.0,
        ),
        test(
            lambda t: slope(_centred(t), "width", "correlation"),
            name="wider, less correlated",
            statement="at p=0 wider networks have less correlated members",
            paper="correlation is lower for the wider network",
            measure="slope of correlation per doubling of width",
            below=0.0,
        ),
        test(
            _gain,
            name="wider, smaller gain",
            statement="at p=0 the relative gain of ensembling is smaller in wider networks",
            paper="relative gain is lower for wider networks",
            measure="slope of the relative gain per doubling of width",
            below=0.0,
        ),
        test(
            _flattening,
            name="curves flatten",
            statement="curves flatten as p grows",
            paper="increasing p flattens all curves",
            measure="slope in p of the range of accuracy over M",
            below=0.0,
        ),
        test(
            _suffering,
            name="members stop suffering",
            statement="at large p members suffer less from M than at p=0",
            paper="no detrimental effect on individual accuracy",
            measure="slope of member accuracy per doubling of M, largest p less p=0",
            above=0.0,
        ),
        test(
            lambda t: slope(t[t["members"] >= 4], "p", "correlation", log_x=False),
            name="correlation grows with p",
            statement="correlation grows with p",
            paper="mean correlation increases with p",
            measure="slope of correlation in p, M ≥ 4",
            above=0.0,
        ),
    ]


def mean_of_widths(table: Table) -> float:
    """Return the inverted U of ensemble accuracy in M, averaged over widths."""
    values = [rise_and_fall(rows, "members", "accuracy") for _, rows in table.groupby("width")]
    return sum(values) / len(values)


def plot(table: Table) -> Figure:
    """Return a row of panels for each width."""
    colours = shades(list(table["p"]))
    panels = [
        Panel(
            f"width ×{width:g}",
            "members M",
            label,
            curves(rows, "members", column, by="p", label="p={}", colours=colours),
            x_log=True,
        )
        for width, rows in table.groupby("width")
        for label, column in (
            ("ensemble accuracy", "accuracy"),
            ("mean member accuracy", "member_accuracy"),
            ("correlation", "correlation"),
        )
    ]
    return Figure(TITLE, panels, columns=3)
