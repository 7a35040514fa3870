"""Checks of an estimator's arguments, made when it is fitted, as scikit-learn does."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from embens.checks import closest
from embens.estimators.choices import FAMILIES
from embens.estimators.network import EMBEDDINGS
from embens.laws import Law

_CHOICES = {
    "family": FAMILIES,
    "scaling": ("quantile", "standard"),
    "numerical_embedding": EMBEDDINGS,
}
_COUNTS = {"members": 1, "width": 1, "batch_size": 1, "max_epochs": 1}
_NUMBERS = {"p": (-1.0, 1.0), "gamma": (0.0, math.inf), "lr": (0.0, math.inf)}
_NUMBERS |= {"modulation_lr": (0.0, math.inf), "validation_fraction": (0.0, 0.9)}
_NUMBERS |= {"dropout": (0.0, 0.99)}
_ALWAYS_COUNTS = {"depth": 1, "patience": 1, "bins": 1, "max_categories": 1}
_ALWAYS_NUMBERS = {"weight_decay": (0.0, math.inf)}


def check(arguments: dict[str, Any]) -> None:
    """Raise where an argument has no meaning."""
    for name, allowed in _CHOICES.items():
        if arguments[name] not in allowed:
            hint = closest(str(arguments[name]), allowed)
            raise ValueError(f"{name}: unknown {arguments[name]!r}{hint}")
    for table, auto in ((_COUNTS, " or 'auto'"), (_ALWAYS_COUNTS, "")):
        for name, least in table.items():
            value = arguments[name]
            if auto and value == "auto":
                continue
            if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
                raise ValueError(
                    f"{name}: expected a whole number of at least {least}{auto}; got {value!r}"
                )
    for table, auto in ((_NUMBERS, " or 'auto'"), (_ALWAYS_NUMBERS, "")):
        for name, (low, high) in table.items():
            value = arguments[name]
            if auto and isinstance(value, str) and value == "auto":
                continue
            if (
                isinstance(value, bool)
                or not isinstance(value, Real)
                or not low <= float(value) <= high
            ):
                raise ValueError(
                    f"{name}: expected a number from {low:g} to {high:g}{auto}; got {value!r}"
                )
    law = arguments["law"]
    if law is not None and not isinstance(law, Law):
        raise ValueError(f"law: expected a law such as embens.laws.Bernoulli(0.9); got {law!r}")
    if law is not None and arguments["family"] in ("batch_ensemble", "independent"):
        raise ValueError(
            f"law: family={arguments['family']!r} has no masks; choose p for batch_ensemble, or a "
            "dropout family"
        )
