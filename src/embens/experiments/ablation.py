"""Variants of the baseline (fig:ablation).

Eight ensembles against M. The caption's shifted variant has a *standard deviation* of 1/√2, not a
variance: N(1/√2, 1/2) keeps the second moment at 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from embens import laws
from embens.embedding.families import embed, last_layer_dropout
from embens.ensemble import EmbeddedEnsemble
from embens.experiments import fair
from embens.experiments.claims import Claim, Frame, Rows, judge
from embens.experiments.contract import MEMBERS, CellBase, Row, product
from embens.experiments.figure import Figure, against_members, curves
from embens.experiments.setting import Setting, data_set
from embens.experiments.training import train
from embens.finite import gradient_norms

LABEL = "fig:ablation"
TITLE = "Variants of the baseline"
ABOUT = (
    "Ensemble accuracy, correlation and member accuracy against M for the baseline (modulations "
    "N(0, 1) at all hidden sites, γ=M) and seven changes to it; one network and separate ones at "
    "the best rate for one network."
)
VARIANTS: dict[str, str] = {
    "baseline": "#1f77b4",
    "post only": "#2ca02c",
    "pre only": "#d62728",
    "last layer, trainable": "#17becf",
    "shifted": "#9467bd",
    "input and output": "#bcbd22",
    "gamma=1": "#222222",
    "modulation rate ×5": "#ff7f0e",
}
"""With the paper's colours."""


@dataclass(frozen=True)
class Cell(CellBase):
    """One ensemble of one variant."""

    variant: str
    members: int


def cells(setting: Setting) -> list[CellBase]:
    """Return the sweep over variants and members, and fair lines."""
    sweep = product(Cell, setting, variant=VARIANTS, members=MEMBERS[setting.preset])
    return [*sweep, *fair.cells(setting)]


def make(cell: Cell) -> EmbeddedEnsemble:
    """Return the ensemble of a variant; some differ from the baseline in their training alone."""
    network, generator = cell.draw()
    if cell.variant == "last layer, trainable":
        return last_layer_dropout(network, cell.members, trainable=True, generator=generator)
    if cell.variant == "post only":
        return embed(network, cell.members, pre=None, generator=generator)
    if cell.variant == "pre only":
        return embed(network, cell.members, post=None, generator=generator)
    law = laws.Shifted(math.sqrt(0.5) if cell.variant == "shifted" else 0.0)
    sites = "all" if cell.variant == "input and output" else "hidden"
    return embed(network, cell.members, pre=law, post=law, sites=sites, generator=generator)


def measure(cell: Cell) -> Row:
    """Train one ensemble."""
    ensemble, setting = make(cell), cell.setting
    inputs, targets = data_set(setting).train
    ratio = gradient_ratio(ensemble, inputs[:128], targets[:128])
    training = train(
        ensemble,
        setting,
        seed=cell.seed,
        gamma=1.0 if cell.variant == "gamma=1" else None,
        modulation_lr=5 * setting.lr if cell.variant == "modulation rate ×5" else None,
    )
    return {**training.evaluate(), "gradient_ratio": ratio}


def gradient_ratio(ensemble: EmbeddedEnsemble, inputs: Tensor, target: Tensor) -> float:
    """Return the ratio of members' gradients in modulations and weights, root mean squares."""
    norms = gradient_norms(ensemble, inputs, target)
    own, shared = (
        sum(float(norm.square().sum()) for norm in part.values())
        for part in (norms.individual, norms.shared)
    )
    return math.sqrt(own / shared) if own > 0 < shared else math.nan


def _several(rows: Rows, variant: str, column: str) -> float:
    return rows.between("members", 4).where(variant=variant).mean(column)


def claims(table: Frame) -> list[Claim]:
    """Return the paper's observations on this figure."""
    test = partial(judge, table)

    def against(
        variant: str, column: str, above: float = -math.inf, below: float = math.inf
    ) -> Claim:
        return test(
            f"{variant}: {column}",
            lambda t: _several(t, variant, column) - _several(t, "baseline", column),
            above=above,
            below=below,
            measure=f"{column} less the baseline's, mean over M ≥ 4",
        )

    dependent = "more dependent models: larger correlation and smaller accuracy"
    same = "roughly the same as for the baseline"
    return [
        against("post only", "accuracy", above=-0.01, below=0.01).says(
            "post only is as accurate as the baseline (to 1 %)", paper=same
        ),
        against("post only", "correlation", above=-0.05, below=0.05).says(
            "post only is as correlated as the baseline (to 0.05)", paper=same
        ),
        against("pre only", "correlation", above=0.0).says(
            "pre only is more correlated", paper=dependent
        ),
        against("pre only", "accuracy", below=0.0).says(
            "pre only is less accurate", paper=dependent
        ),
        against("shifted", "correlation", above=0.0).says(
            "shifted is more correlated", paper=dependent
        ),
        against("shifted", "accuracy", below=0.0).says("shifted is less accurate", paper=dependent),
        test(
            "last layer: correlation",
            lambda t: _several(t, "last layer, trainable", "correlation"),
            above=0.95,
        ).says(
            "members with a trainable last-layer modulation alone end up the same",
            paper="≈100 % correlation: they converge to the same minimum",
            measure="correlation, mean over M ≥ 4",
        ),
        against("last layer, trainable", "accuracy", below=0.0).says(
            "last-layer trainable is less accurate", paper="low ensemble accuracy"
        ),
        against("input and output", "accuracy", below=-0.02).says(
            "input and output modulations are much worse (by 2 %)", paper="a severe drop"
        ),
        against("gamma=1", "accuracy", above=-0.03, below=0.0).says(
            "γ=1 is worse, but by less than 3 %", paper="just slightly worse after 1000 epochs"
        ),
        test(
            "modulation gradients",
            lambda t: t.where(variant="baseline").mean("gradient_ratio"),
            below=0.5,
        ).says(
            "gradients of modulations are much smaller than those of weights",
            paper="significantly lower",
            measure="ratio of norms at initialisation, baseline",
        ),
        against("modulation rate ×5", "accuracy", above=0.0).says(
            "five times the rate for modulations is better", paper="better by about 1 %"
        ),
        *fair.claims(table, partial(Rows.where, variant="baseline")),
    ]


def plot(table: Frame) -> Figure:
    """Return accuracy and correlation, as the paper, and the members' accuracies."""
    draw = partial(curves, table, "members", by="variant", colours=VARIANTS)
    columns = ("accuracy", "correlation", "member_accuracy", "member_train_accuracy")
    panels = against_members(lambda c: [*draw(y=c), *fair.lines(table, c)], columns)
    return Figure(TITLE, panels)
