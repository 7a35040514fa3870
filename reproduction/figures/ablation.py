"""Variants of the baseline (fig:ablation).

Ensemble accuracy, correlation and member accuracy against M for the baseline (modulations N(0, 1)
at all hidden sites, γ=M) and seven changes to it; one network and separate ones at the best rate
for one network.

The caption's shifted variant has a *standard deviation* of 1/√2, not a variance: N(1/√2, 1/2) keeps
the second moment at 1.
"""

import math
from functools import partial

from torch import Tensor

from embens import laws
from embens.embedding.families import embed, last_layer_dropout
from embens.ensemble import EmbeddedEnsemble
from reproduction import baselines as fair
from reproduction.claims import Claim, Frame, Rows, less, where
from reproduction.grid.cells import MEMBERS, Cell, Row, sweep, train
from reproduction.drawing import Figure, curves, panels
from reproduction.grid.settings import data_set
from embens.finite import gradient_norms

LAST, ENDS, FAST = "last layer, trainable", "input and output", "modulation rate ×5"
VARIANTS: dict[str, str] = {
    "baseline": "#1f77b4",
    "post only": "#2ca02c",
    "pre only": "#d62728",
    LAST: "#17becf",
    "shifted": "#9467bd",
    ENDS: "#bcbd22",
    "gamma=1": "#222222",
    FAST: "#ff7f0e",
}
"""With the paper's colours."""

SWEEP = [sweep(variant=list(VARIANTS), members=MEMBERS), fair.sweep(1.0)]


def make(cell: Cell) -> EmbeddedEnsemble:
    """Return the ensemble of a variant; some differ from the baseline in their training alone."""
    if cell.variant == LAST:
        return cell.make(last_layer_dropout, trainable=True)
    options = {
        "post only": {"pre": None},
        "pre only": {"post": None},
        "shifted": dict.fromkeys(("pre", "post"), laws.Shifted(math.sqrt(0.5))),
        ENDS: {"sites": "all"},
    }
    law = laws.Shifted(0.0)
    return cell.make(embed, **{"pre": law, "post": law, **options.get(cell.variant, {})})


def measure(cell: Cell) -> Row:
    """Train one ensemble."""
    ensemble, setting = make(cell), cell.setting
    inputs, targets = data_set(setting).train
    ratio = gradient_ratio(ensemble, inputs[:128], targets[:128])
    gamma = 1.0 if cell.variant == "gamma=1" else None
    modulation_lr = 5 * setting.lr if cell.variant == FAST else None
    training = train(cell, ensemble, gamma=gamma, modulation_lr=modulation_lr)
    return {**training.evaluate(), "gradient_ratio": ratio}


def gradient_ratio(ensemble: EmbeddedEnsemble, inputs: Tensor, target: Tensor) -> float:
    """Return the ratio of members' gradients in modulations and weights, root mean squares."""
    norms = gradient_norms(ensemble, inputs, target)
    own, shared = (
        sum(float(norm.square().sum()) for norm in part.values())
        for part in (norms.individual, norms)
    )
    return math.sqrt(own / shared) if own > 0 < shared else math.nan


def _several(rows: Rows, variant: str = "baseline") -> Rows:
    return rows.between("members", 4).where(variant=variant)


_DEPENDENT = "more dependent models: larger correlation and smaller accuracy"
_SAME = "roughly the same as for the baseline"
_COMPARED = (
    ("post only", "accuracy", -0.01, 0.01, "as accurate as the baseline (to 1 %)", _SAME),
    ("post only", "correlation", -0.05, 0.05, "as correlated as the baseline (to 0.05)", _SAME),
    ("pre only", "correlation", 0.0, math.inf, "more correlated", _DEPENDENT),
    ("pre only", "accuracy", -math.inf, 0.0, "less accurate", _DEPENDENT),
    ("shifted", "correlation", 0.0, math.inf, "more correlated", _DEPENDENT),
    ("shifted", "accuracy", -math.inf, 0.0, "less accurate", _DEPENDENT),
    (LAST, "accuracy", -math.inf, 0.0, "less accurate", "low ensemble accuracy"),
    (ENDS, "accuracy", -math.inf, -0.02, "much worse (by 2 %)", "a severe drop"),
    ("gamma=1", "accuracy", -0.03, 0.0, "worse, but by less than 3 %", "just slightly worse"),
    (FAST, "accuracy", 0.0, math.inf, "better", "better by about 1 %"),
)
CLAIMS = [
    *(
        Claim(less(column, partial(_several, variant=variant), _several), above, below).says(
            f"{variant}: {text}", paper, f"{column} less the baseline's, mean over M ≥ 4"
        )
        for variant, column, above, below, text, paper in _COMPARED
    ),
    Claim(lambda t: _several(t, LAST).mean("correlation"), above=0.95).says(
        "members with a trainable last-layer modulation alone end up the same",
        "≈100 % correlation: they converge to the same minimum",
        "correlation, mean over M ≥ 4",
    ),
    Claim(lambda t: t.where(variant="baseline").mean("gradient_ratio"), below=0.5).says(
        "gradients of modulations are much smaller than those of weights",
        "significantly lower",
        "ratio of norms at initialisation, baseline",
    ),
    *fair.claims(where(variant="baseline")),
]


def plot(table: Frame) -> Figure:
    """Return accuracy and correlation, as the paper, and the members' accuracies."""
    draw = partial(curves, table, "members", by="variant", colours=VARIANTS)
    titles = {
        "accuracy": "which change costs accuracy?",
        "correlation": "which change makes members alike?",
        "member_accuracy": "what M costs a member",
        "member_train_accuracy": "do members still fit the train data?",
    }
    return Figure(panels(fair.beside(draw, table), titles))
