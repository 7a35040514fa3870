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
from embens.experiments import fair
from embens.experiments.claims import Claim, Frame, Missing, Rows, bootstrap, judge, trend
from embens.experiments.contract import MEMBERS, CellBase, Row, product
from embens.experiments.figure import LABELS, Figure, Panel, curves, shades
from embens.experiments.setting import Setting
from embens.experiments.training import score, train
from embens.prediction import predict

LABEL = "fig:gaussian_mc_dropout_shifted"
TITLE = "MC dropout with Gaussian masks"
ABOUT = (
    "Masks N(1, 0.1²) drawn afresh at every pass; N(0, 1) drawn afresh; N(0, 1) as a fixed set, at "
    "several widths. For fresh masks M counts the masks at test time. Dashed: one network and "
    "separate ones, at the best rate for one network."
)
KINDS = {
    "fresh shifted": laws.Normal(1.0, 0.1),
    "fresh centred": laws.Normal(),
    "fixed centred": laws.Normal(),
}
WIDTHS = (0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Cell(CellBase):
    """One ensemble; fresh masks are trained with one of them at a time."""

    kind: str
    width: float
    members: int


def cells(setting: Setting) -> list[CellBase]:
    """Return fresh masks at width 1, fixed ones at all widths, and fair lines at width 1."""
    fresh, fixed = ["fresh shifted", "fresh centred"], ["fixed centred"]
    return [
        *product(Cell, setting, kind=fresh, width=[1.0], members=[1]),
        *product(Cell, setting, kind=fixed, width=WIDTHS, members=MEMBERS[setting.preset]),
        *fair.cells(setting),
    ]


def measure(cell: Cell) -> list[Row]:
    """Train one ensemble; with fresh masks, test it with several numbers of them."""
    network, generator = cell.draw()
    fresh, law = cell.kind.startswith("fresh"), KINDS[cell.kind]
    ensemble = mc_dropout(network, cell.members, law=law, fresh=fresh, generator=generator)
    training = train(ensemble, cell.setting, seed=cell.seed)
    masks = MEMBERS[cell.setting.preset] if fresh else (cell.members,)
    inputs, target = training.data.test
    draws = torch.Generator().manual_seed(cell.seed + 1)
    outputs = predict(
        ensemble, inputs, members=max(masks) if fresh else None, generator=draws
    ).members
    diverged = float(training.diverged)
    return [
        {"masks": count, **score(outputs[:count], target), "diverged": diverged} for count in masks
    ]


def _fresh(rows: Rows) -> Rows:
    return rows.where(kind="fresh shifted")


def _fixed(rows: Rows) -> Rows:
    return rows.where(kind="fixed centred")


def _saturation(rows: Rows) -> float:
    """Gain over the first half of the doublings less that over the second."""
    _, values = _fresh(rows).curve("masks", "accuracy")
    if len(values) < 3:
        raise Missing("at least three numbers of masks")
    middle = values[len(values) // 2]
    return (middle - values[0]) - (values[-1] - middle)


def _last(rows: Rows, kind: str) -> float:
    return rows.where(kind=kind).last("masks").mean("accuracy")


def _correlation(rows: Rows) -> float:
    return rows.between("masks", 4).mean("correlation")


def _inverted_u(rows: Rows) -> float:
    """Smaller of rise to the best M and fall to the largest."""
    return _fixed(rows).first("width").rise_and_fall("masks")


def _growth_of_best(rows: Rows) -> float:
    """Exponent of best M in width, mean over seeds."""
    return _fixed(rows).growth_of_best("masks")


def claims(table: Frame) -> list[Claim]:
    """Return the paper's observations on these figures."""
    test = partial(judge, table)
    return [
        test("fresh shifted: accuracy", trend(_fresh, "accuracy", "masks"), above=0.0).says(
            "with fresh shifted masks accuracy approaches its limit from below",
            paper="almost monotonic, modest increase to a limit",
        ),
        test("fresh shifted: limit", _saturation, above=0.0).says(
            "most of that gain comes with the first masks",
            paper="asymptotically approaches some limit",
        ),
        test(
            "fresh shifted: members", trend(_fresh, "member_accuracy", "masks"), above=-0.002
        ).says(
            "members do not suffer (slope above −0.2 % per doubling)",
            paper="individual accuracy does not suffer from ensemble size",
        ),
        test("fresh shifted: correlation", lambda t: _correlation(_fresh(t)), above=0.8).says(
            "fresh shifted masks are highly correlated (collective)",
            paper="highly correlated",
            measure="correlation, mean over M ≥ 4",
        ),
        test(
            "fresh centred",
            lambda t: _last(t, "fresh centred") / _last(t, "fresh shifted"),
            below=0.5,
        ).says(
            "with fresh centred masks the network hardly learns (half the accuracy)",
            paper="does not learn",
            measure="accuracy relative to fresh shifted masks, at the largest M",
        ),
        test(
            "fixed centred: correlation",
            lambda t: _correlation(_fresh(t)) - _correlation(_fixed(t).where(width=1.0)),
            above=0.1,
        ).says(
            "fixed centred masks are much less correlated (independent; by 0.1)",
            paper="models are not correlated",
            measure="correlation of fresh shifted less fixed centred masks, M ≥ 4, width 1",
        ),
        test("fixed centred: inverted U", _inverted_u, above=0.0, draws=bootstrap(table)).says(
            "fixed centred masks have a best M (at the smallest width)",
            paper="an optimal number of models for each width",
        ),
        test("fixed centred: width", _growth_of_best, above=0.0).says(
            "the best M grows with width",
            paper="an optimal finite ratio of the number of models to the width",
        ),
        *fair.claims(table, lambda t: _fixed(t).where(width=1.0)),
    ]


def plot(table: Frame) -> Figure:
    """Return a row of panels for each of the paper's three figures."""
    colours = shades([0.0, *table["width"]], "plasma")
    draw = partial(curves, x="masks", by="width", label="×{}", colours=colours)
    panels = [
        Panel(
            *(kind, "masks M", label),
            [*draw(table[table["kind"] == kind], y=column), *fair.lines(table, column)],
            x_log=2,
        )
        for kind in KINDS
        for column, label in LABELS.items()
    ]
    return Figure(TITLE, panels, columns=3)
