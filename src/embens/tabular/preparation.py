"""From a table and a target to encoded rows: split, learn the encoding, encode."""

import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sklearn.model_selection import train_test_split
from torch import Tensor

from embens.tabular import defaults
from embens.tabular.columns import FOLDS, Preprocessing, choose_categorical, learn_columns
from embens.tabular.defaults import Arguments
from embens.tabular.frames import Table
from embens.tabular.gaussians import GaussianHead
from embens.tabular.perceptron import Encoder, Rows
from embens.tabular.targets import ClassHead, class_weight_factors

if TYPE_CHECKING:
    from embens.tabular.pipeline import Fitted

AnyHead = ClassHead | GaussianHead
MEASURED_ROWS = 1000  # rows that measure the speed of the preparation, if time is limited
PREPARATION_SHARE = 0.25  # of the remaining time, for the preparation


@dataclass(frozen=True, eq=False)
class Prepared:
    """Encoded rows and everything else that training needs.

    Attributes:
        arguments: Arguments of the estimator.
        seed: Seed of the initial weights and of training.
        preprocessing: The encoding of the columns.
        encoder: The inputs of the network.
        head: The head of the target.
        train: Training rows.
        validation: Held-out rows for the search, early stopping and temperatures; may be empty.
        calibration: Held-out rows for conformal scores only; may be empty.
        remarks: What the user should know about the rows.
        strata: Classes of the training rows, by which folds are stratified, if any.
        folds: Number of folds for cross-fitting; 1 means the split into training, validation and
            calibration rows.
    """

    arguments: Arguments
    seed: int
    preprocessing: Preprocessing
    encoder: Encoder
    head: AnyHead
    train: Rows
    validation: Rows
    calibration: Rows
    remarks: tuple[str, ...] = ()
    strata: np.ndarray | None = None
    folds: int = 1


@dataclass(frozen=True, eq=False)
class Split:
    """Sorted row numbers for training, for early stopping, and for conformal calibration."""

    train: np.ndarray
    validation: np.ndarray
    calibration: np.ndarray


def split_rows(
    rows: int, fraction: Any, stride: int, strata: np.ndarray | None, seed: int
) -> Split:
    """Split rows at random.

    Args:
        rows: Number of rows.
        fraction: Fraction of rows to hold out; "auto" is a fifth, at most
            ``MAX_HELD_OUT_ROWS``, and nothing for tiny tables.
        stride: Every ``stride``-th held-out row is reserved for conformal calibration.
        strata: Classes ``(row,)``; classes with several rows keep their proportion.
        seed: Seed of the split.
    """
    if fraction != "auto":
        held_out = round(fraction * rows)
    elif rows < defaults.TINY_ROWS:
        held_out = 0
    else:
        held_out = min(round(0.2 * rows), defaults.MAX_HELD_OUT_ROWS)
    if held_out == rows:
        raise ValueError(
            f"validation_fraction={fraction} leaves no training rows of {rows} rows. Reduce it."
        )
    held_out_rows = np.arange(0)
    if held_out > 0:
        held_out_rows = _draw_rows(rows, held_out, strata, seed)
    train = np.setdiff1d(np.arange(rows), held_out_rows)
    is_calibration = np.arange(held_out) % stride == stride - 1
    return Split(
        train,
        np.sort(held_out_rows[~is_calibration]),
        np.sort(held_out_rows[is_calibration]),
    )


def _draw_rows(rows: int, count: int, strata: np.ndarray | None, seed: int) -> np.ndarray:
    """Draw rows to hold out; classes keep their proportion where they are large enough."""
    candidates = np.arange(rows)
    if strata is not None:
        # The only row of a class is needed for training.
        class_sizes = np.bincount(strata)
        repeated = candidates[class_sizes[strata] > 1]
        if len(repeated) > count:
            candidates = repeated
            strata = strata[repeated]
        classes = len(np.unique(strata))
        if min(count, len(candidates) - count) < classes or np.bincount(strata).max() < 2:
            strata = None  # too few rows for one of each class in both parts
    _, drawn = train_test_split(candidates, test_size=count, stratify=strata, random_state=seed)
    return np.asarray(drawn)


def _learn_preprocessing(
    table: Table,
    values: Tensor,
    weights: Tensor,
    head: AnyHead,
    arguments: Arguments,
    train: np.ndarray,
    statistics_folds: np.ndarray,
) -> Preprocessing:
    """Learn bins and categories; a sample of the training rows is enough for a large table."""
    step = math.ceil(len(train) / defaults.MAX_LEARNING_ROWS)
    sample = train[::step]
    return learn_columns(
        table.take(sample),
        arguments,
        weights[sample],
        head.statistics_target(values[sample]),
        torch.from_numpy(statistics_folds[::step]),
    )


def prepare(
    table: Table,
    y: np.ndarray,
    weights: Tensor,
    arguments: Arguments,
    random_state: np.random.RandomState,
    previous: "Fitted | None" = None,
    classes: Any = None,
    deadline: float = math.inf,
) -> Prepared:
    """Split the rows of a table and learn its encoding from the training rows.

    Args:
        table: The features.
        y: The target, ``(row,)`` or ``(row, target)``.
        weights: Sample weights ``(row,)``; rows of weight 0 are ignored.
        arguments: Arguments of the estimator.
        random_state: Source of the seeds of training and of the split.
        previous: A previous fit, whose encoding is used again.
        classes: All classes, if ``y`` does not have all of them.
        deadline: When the fit has to end. Some rows are left out if they would take too long.
    """
    seed = int(random_state.randint(2**31 - 1))
    split_seed = int(random_state.randint(2**31 - 1))
    if previous is None:
        head = arguments.head_class.learn(y, arguments, classes)
    else:
        head = previous.head
    values = head.values(y)
    if arguments.class_weight is not None:
        weights = weights * class_weight_factors(arguments.class_weight, y, weights)
    if not weights.all():
        used = weights.nonzero().squeeze(1)
        table, values, weights = table.take(used.numpy()), values[used], weights[used]
    if previous is None:
        head = head.with_range(values)
    else:
        head = head.with_wider_range(values)

    def encode(rows: np.ndarray) -> Prepared:
        part = table
        if len(rows) < table.rows:
            part = table.take(rows)
        seeds = (seed, split_seed)
        return _encode_rows(part, values[rows], weights[rows], head, arguments, seeds, previous)

    rows = np.arange(table.rows)
    if deadline == math.inf or table.rows <= MEASURED_ROWS:
        return encode(rows)
    order = np.random.RandomState(split_seed).permutation(table.rows)
    start = time.monotonic()
    encode(order[:MEASURED_ROWS])
    end = time.monotonic()
    row_seconds = (end - start) / MEASURED_ROWS
    most = max(MEASURED_ROWS, int(PREPARATION_SHARE * (deadline - end) / row_seconds))
    if most >= table.rows:
        return encode(rows)
    remark = (
        f"time_limit={arguments.time_limit:g} is too short to prepare all rows: {most} of "
        f"{table.rows} were drawn at random."
    )
    return replace(encode(np.sort(order[:most])), remarks=(remark,))


def _encode_rows(
    table: Table,
    values: Tensor,
    weights: Tensor,
    head: AnyHead,
    arguments: Arguments,
    seeds: tuple[int, int],
    previous: "Fitted | None",
) -> Prepared:
    """Split the rows, learn the encoding from the training rows, and encode all of them."""
    seed, split_seed = seeds
    fraction = arguments.validation_fraction
    strata = head.strata(values)
    folds = count_folds(table, arguments, previous)
    if folds > 1:
        fraction = 0.0  # cross-fitting holds out each fold in turn
    split = split_rows(table.rows, fraction, head.calibration_stride, strata, split_seed)
    train_strata = None
    if strata is not None:
        train_strata = strata[split.train]
    statistics_folds = np.random.RandomState(split_seed).randint(FOLDS, size=len(split.train))
    if previous is None:
        head = head.scaled(values[split.train], weights[split.train])
        preprocessing = _learn_preprocessing(
            table, values, weights, head, arguments, split.train, statistics_folds
        )
        embedding = arguments.numerical_embedding
        encoder = Encoder(preprocessing, bins=embedding in ("piecewise", "both"))
        if encoder.inputs == 0:
            raise ValueError(f"X has no column to learn from. {' '.join(preprocessing.notes)}")
        if table.rows < defaults.TINY_ROWS:
            encoder = encoder.double()  # a weight of 2 equals two rows, to rounding
    else:
        preprocessing, encoder = previous.preprocessing, previous.encoder
    # Training rows use the target statistics without their fold, held-out rows those of all rows.
    row_folds = torch.zeros(table.rows, dtype=torch.int64)
    row_folds[split.train] = torch.from_numpy(1 + statistics_folds)
    dtype = encoder.left.dtype
    numbers, codes = preprocessing.encode(table, dtype, row_folds)
    target = head.pack(values, weights / weights[split.train].mean(), dtype)
    rows = Rows(numbers, codes, target)
    return Prepared(
        arguments,
        seed,
        preprocessing,
        encoder,
        head,
        train=rows[split.train],
        validation=rows[split.validation],
        calibration=rows[split.calibration],
        strata=train_strata,
        folds=folds,
    )


def count_folds(table: Table, arguments: Arguments, previous: "Fitted | None") -> int:
    """Return the number of folds; 1 is one split.

    By default a continued fit keeps its folds. A wide table has one split: its columns are selected
    by the targets of the training rows, which must not include the held-out rows.
    """
    if previous is not None:
        folds = len(getattr(previous.ensemble, "groups", [previous.ensemble]))
        if arguments.folds in ("auto", folds):
            return folds
    folds = defaults.choose_folds(table.rows, arguments)
    if folds == 1:
        return 1
    categorical = choose_categorical(table, arguments.categorical_features)
    numeric = len(table.names) - len(categorical)
    if not defaults.is_wide(arguments.max_columns, numeric, table.rows):
        return folds
    if arguments.folds == "auto":
        return 1
    raise ValueError(
        f"This table has {numeric} numeric columns and {table.rows} rows, so some columns are "
        f"selected, which needs one split of the rows, but folds={arguments.folds}. Use folds=1, "
        f"or max_columns={numeric} to use all columns."
    )
