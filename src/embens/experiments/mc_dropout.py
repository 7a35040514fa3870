"""MC dropout with Gaussian masks.

Three figures of the paper: fig:gaussian_mc_dropout_shifted, fig:gaussian_mc_dropout_no_shift and
fig:MC-Dropout-zero-centred. Masks on the inputs of all but the first layers, never trained. Drawn
afresh at every pass they make no members: a network is trained once and M is the number of masks
that it is tested with. A fixed set of M masks is an ensemble like any other, with γ = M.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from embens import laws
from embens.embedding.families import mc_dropout
from embens.experiments.claims import (
    Claim,
    Missing,
    Table,
    curve,
    growth_of_best,
    judge,
    mean,
    rise_and_fall,
    select,
    slope,
)
from embens.experiments.figure import Figure, Panel, curves, shades
from embens.experiments.setting import Setting, data_set, reference
from embens.experiments.training import Row, score, train
from embens.prediction import predict

LABEL = "fig:gaussian_mc_dropout_shifted"
TITLE = "MC dropout with Gaussian masks"
ABOUT = (
    "Masks N(1, 0.1²) drawn afresh at every pass; N(0, 1) drawn afresh; N(0, 1) as a fixed set, at "
    "several widths. For fresh masks M counts the masks at test time."
)
KINDS = {
    "fresh shifted": laws.Normal(1.0, 0.1),
    "fresh centred": laws.Normal(),
    "fixed centred": laws.Normal(),
}


@dataclass(frozen=True)
class Cell:
    """One ensemble; fresh masks are trained with one of them at a time."""

    setting: Setting
    kind: str
    width: float
    members: int
    seed: int


WIDTHS = {"quick": (0.5, 1.0, 2.0), "cpu": (0.5, 1.0, 2.0), "paper": (0.5, 1.0, 2.0)}
MEMBERS = {"quick": (1, 2, 4, 8, 16, 32), "cpu": (1, 2, 4, 8, 16), "paper": (1, 2, 5, 10, 20, 40)}
SEEDS = {"quick": 5, "cpu": 3, "paper": 3}


def cells(setting: Setting, *, seeds: int | None = None) -> list[Cell]:
    """Return the sweep: fresh masks at width 1, fixed ones at all widths."""
    found = []
    for seed in range(seeds or SEEDS[setting.preset]):
        found += [Cell(setting, k, 1.0, 1, seed) for k in ("fresh shifted", "fresh centred")]
        found += [
            Cell(setting, "fixed centred", width, members, seed)
            for width in WIDTHS[setting.preset]
            for members in MEMBERS[setting.preset]
        ]
    return found


def measure(cell: Cell) -> list[Row]:
    """Train one ensemble; with fresh masks, test it with several numbers of them."""
    generator = torch.Generator().manual_seed(cell.seed)
    network = reference(cell.setting, cell.width, generator=generator)
    fresh = cell.kind.startswith("fresh")
    ensemble = mc_dropout(
        network, cell.members, law=KINDS[cell.kind], fresh=fresh, generator=generator
    )
    data = data_set(cell.setting)
    training = train(ensemble, cell.setting, data, seed=cell.seed)
    masks = MEMBERS[cell.setting.preset] if fresh else (cell.members,)
    draws = torch.Generator().manual_seed(cell.seed + 1)
    outputs = predict(
        ensemble, data.test.inputs, members=max(masks) if fresh else None, generator=draws
    ).members
    return [
        {
            "masks": count,
            **score(outputs[:count], data.test.targets),
            "diverged": float(training.diverged),
        }
        for count in masks
    ]


def _fresh(table: Table) -> Table:
    return select(table, kind="fresh shifted")


def _fixed(table: Table) -> Table:
    return select(table, kind="fixed centred")


def _saturation(table: Table) -> float:
    """Return the gain of the first half of the doublings of M less that of the second half."""
    _, values = curve(_fresh(table), "masks", "accuracy")
    if len(values) < 3:
        raise Missing("at least three numbers of masks")
    middle = values[len(values) // 2]
    return (middle - values[0]) - (values[-1] - middle)


def _last(table: Table, kind: str) -> float:
    rows = select(table, kind=kind)
    return mean(select(rows, masks=int(rows["masks"].max())), "accuracy")


def _correlations(table: Table) -> float:
    several = table[table["masks"] >= 4]
    return mean(_fresh(several), "correlation") - mean(
        select(several, kind="fixed centred", width=1.0), "correlation"
    )


def _inverted_u(table: Table) -> float:
    rows = _fixed(table)
    return rise_and_fall(select(rows, width=float(rows["width"].min())), "masks", "accuracy")


def _growth_of_best(table: Table) -> float:
    return growth_of_best(_fixed(table), "masks")


def claims(table: Table) -> list[Claim]:
    """Return the paper's observations on these figures."""
    test = partial(judge, table)
    return [
        test(
            lambda t: slope(_fresh(t), "masks", "accuracy"),
            name="fresh shifted: accuracy",
            statement="with fresh shifted masks accuracy approaches its limit from below",
            paper="almost monotonic, modest increase to a limit",
            measure="slope of accuracy per doubling of M",
            above=0.0,
        ),
        test(
            _saturation,
            name="fresh shifted: limit",
            statement="most of that gain comes with the first masks",
            paper="asymptotically approaches some limit",
            measure="gain over the first half of the doublings less that over the second",
            above=0.0,
        ),
        test(
            lambda t: slope(_fresh(t), "masks", "member_accuracy"),
            name="fresh shifted: members",
            statement="members do not suffer (slope above −0.2 % per doubling)",
            paper="individual accuracy does not suffer from ensemble size",
            measure="slope of member accuracy per doubling of M",
            above=-0.002,
        ),
        test(
            lambda t: mean(_fresh(t[t["masks"] >= 4]), "correlation"),
            name="fresh shifted: correlation",
            statement="fresh shifted masks are highly correlated (collective)",
            paper="highly correlated",
            measure="correlation, mean over M ≥ 4",
            above=0.8,
        ),
        test(
            lambda t: _last(t, "fresh centred") / _last(t, "fresh shifted"),
            name="fresh centred",
            statement="with fresh centred masks the network hardly learns (half the accuracy)",
            paper="does not learn",
            measure="accuracy relative to fresh shifted masks, at the largest M",
            below=0.5,
        ),
        test(
            _correlations,
            name="fixed centred: correlation",
            statement="fixed centred masks are much less correlated (independent; by 0.1)",
            paper="models are not correlated",
            measure="correlation of fresh shifted less fixed centred masks, M ≥ 4, width 1",
            above=0.1,
        ),
        test(
            _inverted_u,
            name="fixed centred: inverted U",
            statement="fixed centred masks have a best M (at the smallest width)",
            paper="an optimal number of models for each width",
            measure="smaller of rise to the best M and fall to the largest",
            above=0.0,
        ),
        test(
            _growth_of_best,
            name="fixed centred: width",
            statement="the best M grows with width",
            paper="an optimal finite ratio of the number of models to the width",
            measure="exponent of best M in width, mean over seeds",
            above=0.0,
        ),
    ]


def plot(table: Table) -> Figure:
    """Return a row of panels for each of the paper's three figures."""
    panels = []
    for kind in KINDS:
        rows = table[table["kind"] == kind]
        colours = shades([0.0, *table["width"]], "plasma")
        for label, column in (
            ("ensemble accuracy", "accuracy"),
            ("mean member accuracy", "member_accuracy"),
            ("correlation", "correlation"),
        ):
            found = curves(rows, "masks", column, by="width", label="×{}", colours=colours)
            panels.append(Panel(kind, "masks M", label, found, x_log=True))
    return Figure(TITLE, panels, columns=3)
