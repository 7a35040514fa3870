"""Choices: the arguments of both estimators, and what stands behind every "auto".

Arguments are checked when an estimator is fitted, as scikit-learn wants it; their meanings are in
:class:`embens.estimators.EmbeddedEnsembleClassifier`. All rules are in this one place, so that they
can be read, and changed, together. What they were chosen by is in ``docs/how-to/tables.md``.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeVar

import torch

from embens.checks import check_choice
from embens.laws import Law

Number = TypeVar("Number", int, float)

FAMILIES = {
    "batch_ensemble": "p",
    "last_layer_dropout": "law",
    "mc_dropout": "law",
    "independent": None,
}
"""Functions of embens that embed members, and the option that each of them takes."""
TINY = 50  # below so many rows nothing is held out, and a step sees all of them, in float64
LOOK = 100_000  # rows that bins and categories are taken from, at most
HELD_OUT = 10_000  # rows that are held out at most
BLIND = 100  # epochs at most where nothing is held out to stop by
P = 0.25  # mean of the modulations of a BatchEnsemble, N(p, 1 − p²)
LR = 2e-3  # rate of AdamW


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
    bins: Any = "auto"
    binning: str = "quantile"
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
    class_weight = None  # an argument of classifiers alone


_CHOICES = {
    "family": tuple(FAMILIES),
    "scaling": ("quantile", "standard"),
    "binning": ("quantile", "tree"),
    "numerical_embedding": ("piecewise", "periodic", "both", "none"),
}
_COUNTS = "members width depth bins max_categories batch_size max_epochs patience".split()
_RANGES = {"p": (-1, 1), "dropout": (0, 0.99), "validation_fraction": (0, 0.9)}
_RANGES |= dict.fromkeys(("gamma", "lr", "modulation_lr", "weight_decay"), (0, math.inf))
_RANGES |= dict.fromkeys(_COUNTS, (1, math.inf))


def check(options: Options) -> None:
    """Raise where an option has no meaning."""
    for name, allowed in _CHOICES.items():
        check_choice(name, getattr(options, name), allowed)
    for name, (low, high) in _RANGES.items():
        value = getattr(options, name)
        auto = " or 'auto'" if getattr(Options, name) == "auto" else ""
        if auto and isinstance(value, str) and value == "auto":
            continue
        kind, expected = Real, f"a number from {low:g} to {high:g}"
        if name in _COUNTS:
            kind, expected = Integral, "a whole number of at least 1"
        if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:  # type: ignore[operator]
            raise ValueError(f"{name}: expected {expected}{auto}; got {value!r}")
    given: Any = options.class_weight
    given = [given] if isinstance(given, dict) else given if isinstance(given, list) else []
    for label, weight in (pair for weights in given for pair in weights.items()):
        if not isinstance(weight, Real) or not 0 <= float(weight) < math.inf:
            raise ValueError(f"class_weight: expected a number ≥ 0 of {label!r}; got {weight!r}")
    if options.law is not None and not isinstance(options.law, Law):
        raise ValueError(
            f"law: expected a law such as embens.laws.Bernoulli(0.9); got {options.law!r}"
        )
    if options.law is not None and FAMILIES[options.family] != "law":
        raise ValueError(
            f"law: family={options.family!r} has no masks; choose p for batch_ensemble, or a "
            "dropout family"
        )


class Parts(NamedTuple):
    """Numbers of rows: to train on, to stop by, to calibrate with."""

    train: torch.Tensor
    stop: torch.Tensor
    calibrate: torch.Tensor


class Sizes(NamedTuple):
    """What every "auto" about the ensemble and its training has become."""

    members: int
    p: float
    width: int
    batch_size: int
    epochs: int
    dropout: float


def given(option: Any, usual: Number) -> Number:
    """Return an option, or where it is "auto" what is usual."""
    return usual if isinstance(option, str) else type(usual)(option)


def choose_sizes(rows: int, options: Options) -> Sizes:
    """Return the sizes, as given or as the number of rows to train on suggests.

    Example:
        >>> choose_sizes(10_000, Options())
        Sizes(members=16, p=0.25, width=256, batch_size=256, epochs=200, dropout=0.1)
        >>> choose_sizes(300, Options(members=4))
        Sizes(members=4, p=0.25, width=64, batch_size=64, epochs=200, dropout=0.1)
    """
    batches = ((rows, TINY), (64, 2500), (128, 5000), (256, 50_000), (512, 200_000))
    batch_size = next((size for size, below in batches if rows < below), 1024)
    epochs = 200 if rows <= 100_000 else max(20, 20_000_000 // rows)
    return Sizes(
        members=given(options.members, 16),
        p=given(options.p, P),
        width=given(options.width, 64 if rows < 500 else 256),
        batch_size=given(options.batch_size, batch_size),
        epochs=given(options.max_epochs, epochs),
        dropout=given(options.dropout, 0.0 if rows < TINY else 0.1),
    )


def split(
    rows: int,
    fraction: Any,
    *,
    calibrate: bool,
    groups: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Parts:
    """Deal out rows: half of what is held out is for calibration alone, if at all.

    Every class (``groups``) that has several rows keeps its share.
    """
    nothing = torch.empty(0, dtype=torch.int64)
    order = torch.randperm(rows, generator=generator)
    usual = 0 if rows < TINY else min(round(0.2 * rows), HELD_OUT)
    count = usual if fraction == "auto" else round(fraction * rows)
    if count == 0:
        return Parts(torch.arange(rows), nothing, nothing)
    if groups is not None:
        order = _by_turns(order, groups)
    held, train = order[:count], order[count:].sort().values
    if not calibrate:
        return Parts(train, held.sort().values, nothing)
    return Parts(train, held[::2].sort().values, held[1::2].sort().values)


def _by_turns(order: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return an order of which any beginning has the classes in proportion, and none whole."""
    import pandas

    codes = pandas.Series(groups[order].numpy())
    classes = codes.groupby(codes)
    size = classes.transform("size")
    position = ((classes.cumcount() + 0.5) / size).mask(size == 1, 1.0)
    return order[torch.tensor(position.to_numpy()).argsort(stable=True)]
