"""Variants of the baseline (fig:ablation).

Ensemble accuracy, correlation and member accuracy against M for the baseline (modulations N(0, 1)
at all hidden sites, γ=M) and seven changes to it. Dashed: one network and separate networks, at the
best learning rate for one network.

The caption's shifted variant has a *standard deviation* of 1/√2, not a variance: N(1/√2, 1/2) keeps
the second moment at 1.
"""

import math
from functools import partial

from torch import Tensor

from embens import EmbeddedEnsemble, embed, last_layer_dropout, laws
from embens.finite import gradient_norms
from reproduction import baselines
from reproduction.claims import Claim, difference
from reproduction.drawing import (
    BLUE,
    CYAN,
    GREEN,
    OLIVE,
    ORANGE,
    PURPLE,
    RED,
    Figure,
    curves,
    panels,
    state,
)
from reproduction.grid import cells
from reproduction.grid.cells import Cell, Row, sweep
from reproduction.grid.settings import MODULATIONS, load_data
from reproduction.rows import Frame, Rows, where
from reproduction.training import train

BASELINE, POST_ONLY, PRE_ONLY = "baseline", "post only", "pre only"
LAST, SHIFTED, ENDS = "last layer, trainable", "shifted", "input and output"
UNSCALED, FAST = "gamma=1", "modulation rate ×5"
VARIANTS = {
    BASELINE: BLUE,
    POST_ONLY: GREEN,
    PRE_ONLY: RED,
    LAST: CYAN,
    SHIFTED: PURPLE,
    ENDS: OLIVE,
    UNSCALED: "#222222",
    FAST: ORANGE,
}
"""Variants with the paper's colours."""

MEMBERS = {**cells.MEMBERS, "cpu": (1, 4, 16)}
POOLED = True
SWEEP = [sweep(variant=list(VARIANTS), members=MEMBERS), baselines.sweep(1.0)]


def build_variant(cell: Cell) -> EmbeddedEnsemble:
    """Return the ensemble of a variant; some variants differ in their training only."""
    variant = cell["variant"]
    if variant == LAST:
        return cell.build_ensemble(last_layer_dropout, law=laws.Normal(), trainable=True)
    law = laws.Shifted(math.sqrt(0.5)) if variant == SHIFTED else laws.Shifted(0.0)
    return cell.build_ensemble(
        embed,
        pre=None if variant == POST_ONLY else law,
        post=None if variant == PRE_ONLY else law,
        sites="all" if variant == ENDS else "hidden",
    )


def measure(cell: Cell) -> Row:
    """Train one ensemble and score it."""
    ensemble = build_variant(cell)
    inputs, targets = load_data(cell.setting).train
    ratio = gradient_ratio(ensemble, inputs[:128], targets[:128])
    gamma = 1.0 if cell["variant"] == UNSCALED else None
    modulation_lr = None
    if cell["variant"] == FAST:
        modulation_lr = 5 * cell.setting.rate_of(MODULATIONS)
    training = train(cell, ensemble, gamma=gamma, modulation_lr=modulation_lr)
    return {**training.evaluate(), "gradient_ratio": ratio}


def gradient_ratio(ensemble: EmbeddedEnsemble, inputs: Tensor, target: Tensor) -> float:
    """Return the root mean square gradient of the modulations relative to that of the weights.

    Args:
        ensemble: The ensemble.
        inputs: The inputs.
        target: Class indices ``(batch,)``.

    Returns:
        The ratio; NaN if there are no trainable modulations.
    """
    norms = gradient_norms(ensemble, inputs, target)
    individual = sum(float(norm.square().sum()) for norm in norms.individual.values())
    shared = sum(float(norm.square().sum()) for norm in norms.values())
    if individual == 0 or shared == 0:
        return math.nan
    return math.sqrt(individual / shared)


def several_members(rows: Rows, variant: str = BASELINE) -> Rows:
    """Return the ensembles of a variant with at least four members."""
    return rows.between("members", 4).where(variant=variant)


def compared(
    variant: str, column: str, text: str, paper: str, *, above: float, below: float
) -> Claim:
    """Return a claim on the difference of a variant to the baseline."""
    return Claim(
        statement=f"{variant}: {text}",
        measure=f"{column} minus the baseline's, mean over M ≥ 4",
        statistic=difference(column, partial(several_members, variant=variant), several_members),
        above=above,
        below=below,
        paper=paper,
    )


def extreme(rows: Rows, column: str, position: int) -> str:
    """Return the variant with the smallest (0) or largest (−1) mean of a column, M ≥ 4."""
    several = rows.between("members", 4).where(variant=list(VARIANTS))
    means = several.frame.groupby("variant")[column].mean().sort_values()
    return str(means.index[position])


MORE_DEPENDENT = "more dependent models: larger correlation and smaller accuracy"
SAME = "roughly the same as for the baseline"
INF = math.inf
CLAIMS = [
    compared(
        POST_ONLY,
        "accuracy",
        "as accurate as the baseline (to 1 %)",
        SAME,
        above=-0.01,
        below=0.01,
    ),
    compared(
        POST_ONLY,
        "correlation",
        "as correlated as the baseline (to 0.05)",
        SAME,
        above=-0.05,
        below=0.05,
    ),
    compared(PRE_ONLY, "correlation", "more correlated", MORE_DEPENDENT, above=0.0, below=INF),
    compared(PRE_ONLY, "accuracy", "less accurate", MORE_DEPENDENT, above=-INF, below=0.0),
    compared(SHIFTED, "correlation", "more correlated", MORE_DEPENDENT, above=0.0, below=INF),
    compared(SHIFTED, "accuracy", "less accurate", MORE_DEPENDENT, above=-INF, below=0.0),
    compared(LAST, "accuracy", "less accurate", "low ensemble accuracy", above=-INF, below=0.0),
    compared(ENDS, "accuracy", "much worse (by 2 %)", "a severe drop", above=-INF, below=-0.02),
    compared(
        UNSCALED,
        "accuracy",
        "worse, but by less than 3 %",
        "just slightly worse",
        above=-0.03,
        below=0.0,
    ),
    compared(FAST, "accuracy", "better", "better by about 1 %", above=0.0, below=INF),
    Claim(
        statement="members with only a trainable last-layer modulation become equal",
        measure="correlation, mean over M ≥ 4",
        statistic=lambda rows: several_members(rows, LAST).mean("correlation"),
        above=0.95,
        paper="≈100 % correlation: they converge to the same minimum",
    ),
    Claim(
        statement="gradients of modulations are much smaller than those of weights",
        measure="ratio of norms at initialisation, baseline",
        statistic=lambda rows: rows.where(variant=BASELINE).mean("gradient_ratio"),
        below=0.5,
        paper="significantly lower",
    ),
    *baselines.claims(where(variant=BASELINE)),
]


def plot(table: Frame) -> Figure:
    """Return accuracy and correlation, as in the paper, and the members' accuracies."""
    draw = partial(curves, table, "members", by="variant", colours=VARIANTS)
    rows = Rows(table)
    titles = {
        "accuracy": state(
            lambda: (
                f"most accurate: {extreme(rows, 'accuracy', -1)}; "
                f"least: {extreme(rows, 'accuracy', 0)}"
            ),
            "ensemble accuracy",
        ),
        "correlation": state(
            lambda: f"most correlated: {extreme(rows, 'correlation', -1)}", "correlation"
        ),
        "member_accuracy": state(
            lambda: f"best members: {extreme(rows, 'member_accuracy', -1)}", "member accuracy"
        ),
        "member_train_accuracy": state(
            lambda: f"best fit: {extreme(rows, 'member_train_accuracy', -1)}",
            "member accuracy in training",
        ),
    }
    return Figure(panels(baselines.with_lines(draw, table), titles))
