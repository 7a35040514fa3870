"""Choices: the arguments of both estimators, and what stands behind every "auto".

Arguments are checked when an estimator is fitted, as scikit-learn wants it; their meanings are in
:class:`embens.estimators.EmbeddedEnsembleClassifier`. All rules are in this one place, so that they
can be read, and changed, together. What they were chosen by is in ``docs/how-to/tables.md``.
"""

import math
from dataclasses import KW_ONLY, dataclass
from numbers import Integral, Real
from typing import Any, ClassVar, NamedTuple, TypeVar

import pandas
import torch

from embens.checks import check_choice
from embens.laws import Law

Number = TypeVar("Number", int, float)

FAMILIES = ("batch_ensemble", "last_layer_dropout", "mc_dropout", "independent")
TINY = 50  # below so many rows nothing is held out, and a step sees all of them, in float64
LOOK = 100_000  # rows that bins and categories are taken from, at most
HELD_OUT = 10_000  # rows that are held out at most
BLIND = 60  # epochs at most where nothing is held out to stop by
STEPS = 1800  # of the optimizer in a run, about, as far as EPOCHS allow
EPOCHS = (24, 100)
P = 0.0  # mean of the modulations of a BatchEnsemble, which are +1 and −1
LR = (2e-3, 4e-3)  # rate of AdamW at its highest, below and from LARGE rows on
LARGE = 5000
RACE = ((0.1, 3e-4), (0.0, 3e-4), (0.3, 3e-4), (0.1, 0.1))  # dropout and weight decay to choose of


@dataclass(eq=False, repr=False)
class Options:
    """Arguments of an estimator, as they were given."""

    family: str = "batch_ensemble"
    members: Any = "auto"
    p: Any = "auto"
    law: Any = None
    _: KW_ONLY
    sites: str = "auto"
    own: bool = True
    width: Any = "auto"
    depth: int = 2
    dropout: Any = "auto"
    numerical_embedding: str = "piecewise"
    scaling: str = "quantile"
    bins: Any = "auto"
    binning: str = "quantile"
    categorical_features: Any = "auto"
    max_categories: int = 256
    lr: Any = "auto"
    weight_decay: Any = "auto"
    batch_size: Any = "auto"
    max_epochs: Any = "auto"
    patience: Any = "auto"
    validation_fraction: Any = "auto"
    tune: bool = True
    time_limit: float | None = None
    refit: bool = False
    select: int | None = None
    calibrate: bool = True
    warm_start: bool = False
    random_state: Any = None
    n_jobs: int | None = None
    verbose: int = 0
    head: ClassVar[Any]
    class_weight = None  # an argument of classifiers alone
    loss = "likelihood"  # and of regressors
    target_transform = "none"
    metric = "auto"


CHOICES = {
    "family": FAMILIES,
    "sites": ("auto", "first", "hidden", "all"),
    "scaling": ("quantile", "standard"),
    "binning": ("quantile", "tree"),
    "loss": ("quantile", "likelihood", "squared", "student"),
    "target_transform": ("auto", "none", "log", "quantile"),
    "metric": ("auto", "nll", "crps", "rmse"),
    "numerical_embedding": ("piecewise", "periodic", "both", "none"),
}
_COUNTS = "members width depth bins max_categories batch_size max_epochs patience select".split()
_RANGES = {"p": (-1, 1), "dropout": (0, 0.99), "validation_fraction": (0, 0.9)}
_RANGES |= {"lr": (0, math.inf), "weight_decay": (0, math.inf), "time_limit": (1, math.inf)}
_RANGES |= dict.fromkeys(_COUNTS, (1, math.inf))


def check(options: Options) -> None:
    """Raise where an option has no meaning."""
    for name, allowed in CHOICES.items():
        check_choice(name, getattr(options, name), allowed)
    for name, (low, high) in _RANGES.items():
        value = getattr(options, name)
        usual = getattr(Options, name)
        auto = f" or {usual!r}" if usual in ("auto", None) else ""
        if auto and (value is None if usual is None else str(value) == "auto"):
            continue
        kind, expected = Real, f"a number from {low:g} to {high:g}"
        if name in _COUNTS:
            kind, expected = Integral, "a whole number of at least 1"
        if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:  # type: ignore[operator]
            raise ValueError(f"{name}: expected {expected}{auto}; got {value!r}")
    if options.law is not None and not isinstance(options.law, Law):
        raise ValueError(f"law: expected a law of embens.laws; got {options.law!r}")
    if options.law is not None and options.family == "independent":
        raise ValueError("law: separate networks have no modulations; choose another family")
    if options.refit and options.select:
        raise ValueError("refit leaves no rows to select members by; choose one of the two")


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
    patience: int
    dropout: float
    weight_decay: float
    lr: float


def given(option: Any, usual: Number) -> Number:
    """Return an option, or where it is "auto" what is usual."""
    return usual if isinstance(option, str) else type(usual)(option)


def choose_sizes(rows: int, options: Options) -> Sizes:
    """Return the sizes, as given or as the number of rows to train on suggests.

    Example:
        >>> choose_sizes(10_000, Options())[:6]
        (16, 0.0, 256, 256, 46, 11)
        >>> choose_sizes(300, Options(members=4))[:6]
        (4, 0.0, 64, 64, 100, 25)
    """
    batches = ((rows, TINY), (64, 2500), (128, LARGE), (256, 50_000), (512, 200_000))
    usual = next((size for size, below in batches if rows < below), 1024)
    batch_size, (least, most) = given(options.batch_size, usual), EPOCHS
    epochs = min(most, max(least, STEPS // max(1, rows // batch_size)))
    epochs = given(options.max_epochs, epochs)
    dropout, decay = RACE[0]
    return Sizes(
        members=given(options.members, 16),
        p=given(options.p, P),
        width=given(options.width, 64 if rows < 500 else 256),
        batch_size=batch_size,
        epochs=epochs,
        patience=given(options.patience, max(8, epochs // 4)),
        dropout=given(options.dropout, 0.0 if rows < TINY else dropout),
        weight_decay=given(options.weight_decay, decay),
        lr=given(options.lr, LR[rows >= LARGE]),
    )


def shortened(sizes: Sizes) -> Sizes:
    """Return the sizes of a trial run: a quarter of the members and of the epochs."""
    epochs = max(4, sizes.epochs // 4)
    return sizes._replace(members=max(1, sizes.members // 4), epochs=epochs, patience=epochs)


def candidates(sizes: Sizes, options: Options) -> list[Sizes]:
    """Return what a race is run between: dropout and weight decay, where these are "auto"."""
    found = []
    for dropout, decay in RACE:
        mine = given(options.dropout, dropout), given(options.weight_decay, decay)
        found.append(sizes._replace(dropout=mine[0], weight_decay=mine[1]))
    return list(dict.fromkeys(found))


def split(
    rows: int,
    fraction: Any,
    *,
    apart: int | None = None,
    groups: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Parts:
    """Deal out rows: every ``apart``-th of those held out is for conformal scores alone.

    Every class (``groups``) that has several rows keeps its share.
    """
    nothing = torch.empty(0, dtype=torch.int64)
    order = torch.randperm(rows, generator=generator)
    usual = 0 if rows < TINY else min(round(0.2 * rows), HELD_OUT)
    count = usual if fraction == "auto" else round(fraction * rows)
    if count == 0:
        return Parts(torch.arange(rows), nothing, nothing)
    if groups is not None:  # any beginning has the classes in proportion, and none whole
        codes = pandas.Series(groups[order].numpy())
        classes = codes.groupby(codes)
        size = classes.transform("size")
        position = ((classes.cumcount() + 0.5) / size).mask(size == 1, 1.0)
        order = order[torch.tensor(position.to_numpy()).argsort(stable=True)]
    held, train = order[:count], order[count:].sort().values
    mine = torch.arange(count) % (apart or count + 1) == (apart or 0) - 1
    return Parts(train, held[~mine].sort().values, held[mine].sort().values)
