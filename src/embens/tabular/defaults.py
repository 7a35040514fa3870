"""Arguments of the estimators, their valid values, and the rules behind every ``"auto"``.

The meaning of each argument is documented in
:class:`embens.tabular.EmbeddedEnsembleClassifier`. Arguments are validated in ``fit``, as
scikit-learn requires. The measurements behind the rules are in ADR 9.
"""

import math
import sys
from dataclasses import KW_ONLY, dataclass, replace
from numbers import Integral, Real
from typing import Any, ClassVar

import numpy as np

from embens.laws import Law

FAMILIES = ("batch_ensemble", "last_layer_dropout", "mc_dropout", "independent")
TINY_ROWS = 50  # smaller tables are trained without held-out rows, in full batches and float64
DEFAULT_MEMBERS = 16
DEFAULT_FOLDS = 4
LARGE_ROWS = 5000  # from here on the learning rate is higher
MEDIUM_ROWS = 2500  # from here on patience is shorter, and the quantile loss has larger steps
MAX_LEARNING_ROWS = 100_000  # rows from which bins and categories are learned
MAX_HELD_OUT_ROWS = 10_000
MAX_EPOCHS_WITHOUT_VALIDATION = 60
BATCH_SIZES = ((2500, 64), (LARGE_ROWS, 128), (50_000, 256), (200_000, 512))
"""Number of training rows, and batch size of tables with fewer rows."""
LARGEST_BATCH_SIZE = 1024
STEPS = 1800  # approximate number of optimizer steps of a run, within the bounds on epochs
QUANTILE_STEPS = 900  # the same for the quantile loss from MEDIUM_ROWS on
QUANTILE_BATCH_SIZE = 256  # for the quantile loss from MEDIUM_ROWS on, or more
QUANTILE_LR = 8e-3  # for the quantile loss from MEDIUM_ROWS on
MIN_EPOCHS = 24
MAX_EPOCHS = 100
WIDE_COLUMNS = 256  # numeric columns from which a table can be wide
WIDE_ROWS_PER_COLUMN = 4  # rows for each numeric column; with more rows it is not wide
SELECTED_COLUMNS = 32  # numeric columns that are used of a wide table
REGULARISATIONS = ((0.1, 3e-4), (0.0, 3e-4), (0.3, 3e-4), (0.1, 0.1))
"""Candidates (dropout, weight decay) of the search; the first one is the default."""


@dataclass(eq=False, repr=False)
class Arguments:
    """Arguments that both estimators have, with their defaults."""

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
    bins: Any = "auto"
    categorical_features: Any = "auto"
    max_categories: int = 256
    max_columns: Any = "auto"
    lr: Any = "auto"
    weight_decay: Any = "auto"
    batch_size: Any = "auto"
    max_epochs: Any = "auto"
    patience: Any = "auto"
    validation_fraction: Any = "auto"
    tune: bool = False
    time_limit: float | None = None
    refit: bool = False
    keep_members: Any = "all"
    folds: Any = "auto"
    calibrate: bool = True
    warm_start: bool = False
    random_state: Any = None
    n_jobs: int | None = None
    verbose: int = 0
    head_class: ClassVar[Any]  # set by the two estimators
    # Arguments that only one of the estimators has, with the value that the other one uses. They
    # have no annotation, so they are not fields of this dataclass.
    class_weight = None
    loss = "likelihood"
    target_transform = "none"
    metric = "auto"


HINTS = {
    "device": ". Estimators train on the CPU.",
    "progress": "; use verbose=1.",
    "epochs": "; did you mean 'max_epochs'?",
    "n_epochs": "; did you mean 'max_epochs'?",
    "num_epochs": "; did you mean 'max_epochs'?",
    "max_iter": "; did you mean 'max_epochs'?",
    "learning_rate": "; did you mean 'lr'?",
    "learning_rate_init": "; did you mean 'lr'?",
    "alpha": "; did you mean 'weight_decay'?",
    "n_estimators": "; did you mean 'members'?",
    "n_members": "; did you mean 'members'?",
    "seed": "; did you mean 'random_state'?",
    "hidden_layer_sizes": ". Use width= and depth=.",
    "n_layers": "; did you mean 'depth'?",
    "early_stopping": ". Use patience= and validation_fraction=.",
    "n_iter_no_change": "; did you mean 'patience'?",
    "cat_features": "; did you mean 'categorical_features'?",
}
"""Ends of the error "the estimator has no argument 'name'", for names of other libraries."""

CHOICES = {
    "family": FAMILIES,
    "sites": ("auto", "first", "hidden", "all"),
    "loss": ("quantile", "likelihood", "squared", "student"),
    "target_transform": ("auto", "none", "log", "quantile"),
    "metric": ("auto", "nll", "crps", "rmse"),
    "numerical_embedding": ("piecewise", "periodic", "both", "none"),
}
COUNTS = (
    "members",
    "width",
    "depth",
    "bins",
    "max_categories",
    "max_columns",
    "batch_size",
    "max_epochs",
    "patience",
    "folds",
)
# Arguments that need one split. If one differs from its default, folds="auto" resolves to 1, and
# more folds raise an error.
NEEDS_ONE_SPLIT = ("time_limit", "refit", "keep_members", "validation_fraction")
SWITCHES = ("own", "tune", "refit", "calibrate", "warm_start")
RANGES = {
    "p": (-1, 1),
    "dropout": (0, 0.99),
    "validation_fraction": (0, 0.9),
    "weight_decay": (0, math.inf),
    "time_limit": (1, math.inf),
}


@dataclass(frozen=True)
class Sizes:
    """Resolved values, chosen for one table, of the arguments that may be "auto"."""

    members: int
    p: float
    width: int
    batch_size: int
    epochs: int
    patience: int
    dropout: float
    weight_decay: float
    lr: float


def check_arguments(arguments: Arguments) -> None:
    """Raise ValueError if an argument is invalid."""
    for name, choices in CHOICES.items():
        value = getattr(arguments, name)
        if value not in choices:
            names = ", ".join(repr(choice) for choice in choices)
            raise ValueError(f"{name} must be one of {names}, got {value!r}.")
    for name in SWITCHES:
        value = getattr(arguments, name)
        if not isinstance(value, (bool, np.bool_)):
            raise ValueError(f"{name} must be True or False, got {value!r}.")
    for name in COUNTS:
        _check_number(arguments, name, Integral, 1, math.inf, "a positive integer")
    for name, (low, high) in RANGES.items():
        _check_number(arguments, name, Real, low, high, f"a number from {low:g} to {high:g}")
    is_whole = isinstance(arguments.n_jobs, Integral) and not isinstance(arguments.n_jobs, bool)
    if arguments.n_jobs is not None and (not is_whole or arguments.n_jobs == 0):
        raise ValueError(
            "n_jobs must be a positive number of threads, a negative one as in joblib, or None, "
            f"got {arguments.n_jobs!r}."
        )
    # Between the smallest and the largest positive float: not 0 and not infinite.
    _check_number(arguments, "lr", Real, math.ulp(0.0), sys.float_info.max, "a positive number")
    if arguments.keep_members != "all":
        _check_number(arguments, "keep_members", Integral, 1, math.inf, "a positive integer")
        if arguments.refit:
            raise ValueError(
                "keep_members chooses by validation rows, but refit=True trains with them. Use "
                "one of the two."
            )
    if arguments.folds not in ("auto", 1):
        _check_folds(arguments)
    if arguments.law is None:
        return
    if not isinstance(arguments.law, Law):
        raise ValueError(f"law must be a law of embens.laws or None, got {arguments.law!r}.")
    if arguments.family == "independent":
        raise ValueError(
            "law must be None for family='independent', whose members have no modulations, "
            f"got {arguments.law!r}."
        )


def _check_folds(arguments: Arguments) -> None:
    """Raise ValueError if cross-fitting contradicts another argument."""
    members = resolve(arguments.members, DEFAULT_MEMBERS)
    if members % arguments.folds:
        raise ValueError(
            f"folds must divide the number of members, got folds={arguments.folds} and "
            f"{members} members."
        )
    for name in NEEDS_ONE_SPLIT:
        if getattr(arguments, name) != getattr(Arguments, name):
            raise ValueError(
                f"{name} needs one split of the rows, but folds={arguments.folds}. Use folds=1, "
                f"or leave {name} at its default."
            )


def _check_number(
    arguments: Arguments, name: str, kind: Any, low: float, high: float, expected: str
) -> None:
    value = getattr(arguments, name)
    default = getattr(Arguments, name)
    if default == "auto":
        expected += " or 'auto'"
        if isinstance(value, str) and value == "auto":
            return
    if default == "all":
        expected += " or 'all'"
    if default is None:
        expected += " or None"
        if value is None:
            return
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:  # type: ignore[operator]
        raise ValueError(f"{name} must be {expected}, got {value!r}.")


def resolve(value: Any, default: Any) -> Any:
    """Return an argument converted to the type of its default, or the default for "auto"."""
    if isinstance(value, str):
        return default
    return type(default)(value)


def choose_folds(rows: int, arguments: Arguments) -> int:
    """Return the number of folds of a first fit; 1 is one split of the rows.

    By default, members are cross-fitted if they can form four groups of several members.

    Args:
        rows: Number of rows.
        arguments: Arguments of the estimator.

    Example:
        >>> choose_folds(1000, Arguments()), choose_folds(1000, Arguments(time_limit=10))
        (4, 1)
    """
    if rows < TINY_ROWS:
        return 1
    if arguments.folds != "auto":
        return int(arguments.folds)
    for name in NEEDS_ONE_SPLIT:
        if getattr(arguments, name) != getattr(Arguments, name):
            return 1
    members = resolve(arguments.members, DEFAULT_MEMBERS)
    if members % DEFAULT_FOLDS or members < 2 * DEFAULT_FOLDS:
        return 1
    return DEFAULT_FOLDS


def choose_sizes(rows: int, arguments: Arguments) -> Sizes:
    """Return the given arguments, with every "auto" resolved by the number of training rows.

    Example:
        >>> sizes = choose_sizes(10_000, Arguments())
        >>> sizes.members, sizes.width, sizes.batch_size, sizes.epochs, sizes.patience
        (16, 256, 256, 46, 10)
    """
    batch_size = default_batch_size(rows)
    steps = STEPS
    lr = 2e-3
    if rows >= LARGE_ROWS:
        lr = 4e-3
    if arguments.loss == "quantile" and rows >= MEDIUM_ROWS:
        batch_size = max(batch_size, QUANTILE_BATCH_SIZE)
        steps = QUANTILE_STEPS
        lr = QUANTILE_LR
    batch_size = resolve(arguments.batch_size, batch_size)
    steps_per_epoch = max(1, rows // batch_size)
    epochs = min(MAX_EPOCHS, max(MIN_EPOCHS, steps // steps_per_epoch))
    epochs = resolve(arguments.max_epochs, epochs)
    patience = max(8, epochs // 4)
    if rows >= MEDIUM_ROWS:
        patience = max(10, epochs // 8)
    width = 256
    if rows < 500:
        width = 64
    dropout, weight_decay = REGULARISATIONS[0]
    if rows < TINY_ROWS:
        dropout = 0.0
    return Sizes(
        members=resolve(arguments.members, DEFAULT_MEMBERS),
        p=resolve(arguments.p, 0.0),
        width=resolve(arguments.width, width),
        batch_size=batch_size,
        epochs=epochs,
        patience=resolve(arguments.patience, patience),
        dropout=resolve(arguments.dropout, dropout),
        weight_decay=resolve(arguments.weight_decay, weight_decay),
        lr=resolve(arguments.lr, lr),
    )


def default_batch_size(rows: int) -> int:
    """Return the default batch size for a number of training rows."""
    if rows < TINY_ROWS:
        return rows
    for limit, batch_size in BATCH_SIZES:
        if rows < limit:
            return batch_size
    return LARGEST_BATCH_SIZE


def is_wide(max_columns: Any, columns: int, rows: int) -> bool:
    """Return whether a table has more numeric columns than a network may be able to use.

    Args:
        max_columns: The argument of the estimator.
        columns: Number of numeric columns.
        rows: Number of training rows.
    """
    if isinstance(max_columns, str):
        return columns > max(WIDE_COLUMNS, rows / WIDE_ROWS_PER_COLUMN)
    return columns > max_columns


def size_candidates(sizes: Sizes, arguments: Arguments) -> list[Sizes]:
    """Return distinct values of dropout and weight decay, as far as they are "auto"."""
    candidates = []
    for dropout, weight_decay in REGULARISATIONS:
        candidate = sizes
        if arguments.dropout == "auto":
            candidate = replace(candidate, dropout=dropout)
        if arguments.weight_decay == "auto":
            candidate = replace(candidate, weight_decay=weight_decay)
        if candidate not in candidates:
            candidates.append(candidate)
    return candidates
