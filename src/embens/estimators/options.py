"""Options: the arguments that both estimators take, and checks of them.

They are checked when an estimator is fitted, as scikit-learn wants it. Their meanings are in
:class:`embens.estimators.EmbeddedEnsembleClassifier`, and what stands behind "auto" in
:mod:`embens.estimators.choices`.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from numbers import Integral, Real
from typing import Any

from embens.checks import check_choice
from embens.laws import Law

FAMILIES = {
    "batch_ensemble": "p",
    "last_layer_dropout": "law",
    "mc_dropout": "law",
    "independent": None,
}
"""Functions of embens that embed members, and the option that each of them takes."""


@dataclass(eq=False, repr=False)
class Options:
    """Arguments of an estimator, as they were given."""

    family: str = "batch_ensemble"
    members: Any = "auto"
    p: Any = "auto"
    law: Any = None
    _: KW_ONLY
    width: Any = "auto"
    depth: int = 2
    dropout: Any = "auto"
    numerical_embedding: str = "piecewise"
    scaling: str = "quantile"
    bins: int = 32
    categorical_features: Any = "auto"
    max_categories: int = 256
    gamma: Any = "auto"
    lr: Any = "auto"
    modulation_lr: Any = "auto"
    weight_decay: float = 3e-4
    batch_size: Any = "auto"
    max_epochs: Any = "auto"
    patience: int = 10
    validation_fraction: Any = "auto"
    calibrate: bool = True
    warm_start: bool = False
    random_state: Any = None
    n_jobs: int | None = None
    verbose: int = 0


_CHOICES = {
    "family": tuple(FAMILIES),
    "scaling": ("quantile", "standard"),
    "numerical_embedding": ("piecewise", "periodic", "none"),
}
_COUNTS = "members width depth bins max_categories batch_size max_epochs patience".split()
_RANGES = {"p": (-1.0, 1.0), "dropout": (0.0, 0.99), "validation_fraction": (0.0, 0.9)}
_RANGES |= dict.fromkeys(("gamma", "lr", "modulation_lr", "weight_decay"), (0.0, math.inf))


def check(options: Options) -> None:
    """Raise where an option has no meaning."""
    for name, allowed in _CHOICES.items():
        check_choice(name, getattr(options, name), allowed)
    for name in (*_COUNTS, *_RANGES):
        value = getattr(options, name)
        auto = " or 'auto'" if getattr(Options, name) == "auto" else ""
        if auto and isinstance(value, str) and value == "auto":
            continue
        if name in _COUNTS:
            kind, low, high, expected = Integral, 1, math.inf, "a whole number of at least 1"
        else:
            kind, (low, high) = Real, _RANGES[name]
            expected = f"a number from {low:g} to {high:g}"
        if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:  # type: ignore[operator]
            raise ValueError(f"{name}: expected {expected}{auto}; got {value!r}")
    if options.law is not None and not isinstance(options.law, Law):
        raise ValueError(
            f"law: expected a law such as embens.laws.Bernoulli(0.9); got {options.law!r}"
        )
    if options.law is not None and FAMILIES[options.family] != "law":
        raise ValueError(
            f"law: family={options.family!r} has no masks; choose p for batch_ensemble, or a "
            "dropout family"
        )
