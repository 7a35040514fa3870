"""Variants of the baseline (fig:ablation).

Eight ensembles against M. The caption's shifted variant has a *standard deviation* of 1/√2, not a
variance: N(1/√2, 1/2) keeps the second moment at 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from embens import laws
from embens.embedding.families import batch_ensemble, embed, last_layer_dropout
from embens.ensemble import EmbeddedEnsemble
from embens.experiments.claims import Claim, Table, judge, mean, select
from embens.experiments.figure import Figure, Panel, curves
from embens.experiments.setting import Setting, data_set, reference
from embens.experiments.training import Row, evaluate, train

LABEL = "fig:ablation"
TITLE = "Variants of the baseline"
ABOUT = (
    "Ensemble accuracy, correlation and member accuracy against M for the baseline (modulations "
    "N(0, 1) at all hidden sites, γ=M) and seven changes to it."
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

MAKE: dict[str, Callable[[nn.Module, int, torch.Generator], EmbeddedEnsemble]] = {
    "post only": lambda r, m, g: embed(r, m, pre=None, generator=g),
    "pre only": lambda r, m, g: embed(r, m, post=None, generator=g),
    "last layer, trainable": lambda r, m, g: last_layer_dropout(
        r, m, law=laws.Normal(), trainable=True, generator=g
    ),
    "shifted": lambda r, m, g: batch_ensemble(r, m, p=math.sqrt(0.5), generator=g),
    "input and output": lambda r, m, g: batch_ensemble(r, m, sites="all", generator=g),
}


@dataclass(frozen=True)
class Cell:
    """One ensemble of one variant."""

    setting: Setting
    variant: str
    members: int
    seed: int


MEMBERS = {"quick": (1, 2, 4, 8, 16, 32), "cpu": (1, 2, 4, 8, 16), "paper": (1, 2, 5, 10, 20, 40)}
SEEDS = {"quick": 5, "cpu": 3, "paper": 3}


def cells(setting: Setting, *, seeds: int | None = None) -> list[Cell]:
    """Return the sweep over variants, members and seeds."""
    return [
        Cell(setting, variant, members, seed)
        for seed in range(seeds or SEEDS[setting.preset])
        for variant in VARIANTS
        for members in MEMBERS[setting.preset]
    ]


def measure(cell: Cell) -> Row:
    """Train one ensemble."""
    generator = torch.Generator().manual_seed(cell.seed)
    network = reference(cell.setting, generator=generator)
    make = MAKE.get(cell.variant, lambda r, m, g: batch_ensemble(r, m, generator=g))
    ensemble = make(network, cell.members, generator)
    data = data_set(cell.setting)
    ratio = gradient_ratio(ensemble, data.train.inputs[:128], data.train.targets[:128])
    training = train(
        ensemble,
        cell.setting,
        data,
        seed=cell.seed,
        gamma=1.0 if cell.variant == "gamma=1" else None,
        modulation_lr=5 * cell.setting.lr if cell.variant == "modulation rate ×5" else None,
    )
    return {
        **evaluate(ensemble, data),
        "gradient_ratio": ratio,
        "diverged": float(training.diverged),
    }


def gradient_ratio(ensemble: EmbeddedEnsemble, inputs: torch.Tensor, target: torch.Tensor) -> float:
    """Return how large a member's modulation gradient is beside its gradient of the weights.

    Root mean squares over members of the norms of both, at initialisation.
    """
    shared, individual = list(ensemble.shared_parameters()), list(ensemble.individual_parameters())
    if not individual:
        return math.nan
    squares = [0.0, 0.0]
    outputs = ensemble(inputs)
    for mine in outputs:
        loss = nn.functional.cross_entropy(mine, target)
        found = torch.autograd.grad(loss, [*shared, *individual], retain_graph=True)
        for k, part in enumerate((found[: len(shared)], found[len(shared) :])):
            squares[k] += sum(float(g.square().sum()) for g in part)
    return math.sqrt(squares[1] / squares[0]) if squares[0] > 0 else math.nan


def _difference(table: Table, variant: str, column: str) -> float:
    """Return a variant's mean less the baseline's, over M ≥ 4."""
    rows = table[table["members"] >= 4]
    ours, theirs = (select(rows, variant=name) for name in (variant, "baseline"))
    return mean(ours, column) - mean(theirs, column)


def claims(table: Table) -> list[Claim]:
    """Return the paper's observations on this figure."""
    test = partial(judge, table)

    def against(variant: str, column: str, paper: str, text: str, **region: float) -> Claim:
        return test(
            partial(_difference, variant=variant, column=column),
            name=f"{variant}: {column}",
            statement=text,
            paper=paper,
            measure=f"{column.replace('_', ' ')} less the baseline's, mean over M ≥ 4",
            **region,
        )

    dependent = "more dependent models: larger correlation and smaller accuracy"
    same = "roughly the same as for the baseline"
    return [
        against("post only", "accuracy", same, "post only is as accurate as the baseline (to 1 %)",
                above=-0.01, below=0.01),
        against("post only", "correlation", same,
                "post only is as correlated as the baseline (to 0.05)", above=-0.05, below=0.05),
        against("pre only", "correlation", dependent, "pre only is more correlated", above=0.0),
        against("pre only", "accuracy", dependent, "pre only is less accurate", below=0.0),
        against("shifted", "correlation", dependent, "shifted is more correlated", above=0.0),
        against("shifted", "accuracy", dependent, "shifted is less accurate", below=0.0),
        test(
            lambda t: mean(
                select(t[t["members"] >= 4], variant="last layer, trainable"), "correlation"
            ),
            name="last layer: correlation",
            statement="members with a trainable last-layer modulation alone end up the same",
            paper="≈100 % correlation: they converge to the same minimum",
            measure="correlation, mean over M ≥ 4",
            above=0.95,
        ),
        against("last layer, trainable", "accuracy", "low ensemble accuracy",
                "last-layer trainable is less accurate", below=0.0),
        against("input and output", "accuracy", "a severe drop",
                "input and output modulations are much worse (by 2 %)", below=-0.02),
        against("gamma=1", "accuracy", "just slightly worse after 1000 epochs",
                "γ=1 is worse, but by less than 3 %", above=-0.03, below=0.0),
        test(
            lambda t: mean(select(t, variant="baseline"), "gradient_ratio"),
            name="modulation gradients",
            statement="gradients of modulations are much smaller than those of weights",
            paper="significantly lower",
            measure="ratio of norms at initialisation, baseline",
            below=0.5,
        ),
        against("modulation rate ×5", "accuracy", "better by about 1 %",
                "five times the rate for modulations is better", above=0.0),
    ]  # fmt: skip


def plot(table: Table) -> Figure:
    """Return accuracy and correlation, as the paper, and the members' accuracies."""
    panels = [
        Panel(
            title,
            "members M",
            label,
            [
                c
                for variant, colour in VARIANTS.items()
                for c in curves(
                    table[table["variant"] == variant],
                    "members",
                    column,
                    by="variant",
                    colours=[colour],
                )
            ],
            x_log=True,
        )
        for title, label, column in (
            ("ensemble, test", "accuracy", "accuracy"),
            ("correlation, test", "correlation", "correlation"),
            ("members, test", "mean accuracy", "member_accuracy"),
            ("members, train", "mean accuracy", "member_train_accuracy"),
        )
    ]
    return Figure(TITLE, panels)
