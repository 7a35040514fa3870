"""Tables: one way to read columns, targets and weights from arrays and data frames.

A table is a two-dimensional array (also a list of lists), or a data frame of pandas, polars or
pyarrow, read through narwhals. A column is *categorical* if its type says so (categories, strings,
truth values) or the user does, else *numeric*; dates count as numbers, in seconds, and have parts
(:data:`PARTS`) beside. Missing is NaN among numbers and None among categories.

Not here: files (:mod:`embens.estimators.files`), and what becomes of the columns
(:mod:`embens.estimators.preprocessing`).
"""

import math
from collections.abc import Sequence
from typing import Any, Self

import narwhals.stable.v2 as nw
import numpy as np
import pandas
import torch
from narwhals.dependencies import is_into_dataframe
from sklearn.utils import column_or_1d
from sklearn.utils.validation import _check_sample_weight, check_array, validate_data
from torch import Tensor

from embens.checks import closest

PARTS = ("month", "day", "weekday", "hour")
"""What is read from a date beside its seconds; months from 1, days from 1, Monday is 0."""
DENSE = 2**28  # numbers that a sparse matrix may become


class Table:
    """Columns of a data frame, which is narwhals' view of it, to read by number.

    ``first`` is the number of its first row where it is a part of something larger; ``folder`` is
    for what memory can't hold of it.
    """

    def __init__(self, frame: Any, first: int = 0, folder: str | None = None):
        self.frame, self.rows, self.first, self.folder = frame, len(frame), first, folder
        self.columns = list(frame.columns)  # a frame makes this list anew each time
        self.names = [str(name) for name in self.columns]

    def column(self, column: int) -> Any:
        return self.frame.get_column(self.columns[column])

    def is_categorical(self, column: int) -> bool:
        """Return whether the type of a column makes it categorical."""
        dtype = self.column(column).dtype
        if dtype in (nw.Object, nw.Binary, nw.Unknown):
            return any(isinstance(v, (str, bytes, bool)) for v in self.values(column))
        return dtype in (nw.String, nw.Categorical, nw.Enum, nw.Boolean)

    def parts(self, column: int) -> tuple[str, ...]:
        """Return what numbers a column has: itself (""), and the parts of a date."""
        return ("", *PARTS) if self.column(column).dtype in (nw.Datetime, nw.Date) else ("",)

    def numbers(self, column: int, part: str = "") -> np.ndarray:
        """Return a column as float64, NaN where a value is missing; infinite is an error."""
        series, name = self.column(column), self.names[column]
        if series.dtype in (nw.Datetime, nw.Date, nw.Duration, nw.Time):
            raw = np.asarray(series.to_numpy())
            if raw.dtype.kind not in "mM":
                raise TypeError(f"column {name!r}: can't read {series.dtype} as time")
            if part:
                name = part.replace("weekday", "day_of_week")
                return np.asarray(getattr(pandas.DatetimeIndex(raw), name), dtype="float64")
            seconds = raw.astype(raw.dtype.kind + "8[us]").astype("int64") / 1e6
            return np.where(np.isnat(raw), math.nan, seconds)
        try:
            if not (series.dtype.is_numeric() or series.dtype == nw.Boolean):
                raise ValueError
            found = np.asarray(series.cast(nw.Float64()).to_numpy(), dtype="float64")
        except ValueError:  # also Arrow's, of whole numbers beyond 2**53
            found = np.array([self._number(*cell, name) for cell in enumerate(series.to_list())])
        if len(rows := np.flatnonzero(np.isinf(found))):
            raise ValueError(
                f"Input X contains infinity or a value too large for dtype('float64'), in "
                f"{place(rows, name, self.first)}. Replace it, or make it NaN, which counts as "
                "missing."
            )
        return found

    def _number(self, row: int, value: Any, name: str) -> float:
        try:
            return math.nan if is_missing(value) else float(value)
        except (TypeError, ValueError) as error:
            raise type(error)(
                f"{place([row], name, self.first)}: {error}. By its type, or as it was "
                "fitted, this is a column of numbers; if it is not, see categorical_features."
            ) from None

    def check(self) -> Self:
        """Raise where a column that is not categorical can't be read as numbers."""
        for column in range(len(self.names)):
            if not self.is_categorical(column):
                self.numbers(column)
        return self

    def values(self, column: int) -> list[Any]:
        """Return a column as Python values, None or NaN where one is missing."""
        return self.column(column).to_list()

    def take(self, rows: Any) -> Self:
        return type(self)(self.frame[rows], folder=self.folder)


def place(rows: Any, column: str | None = None, first: int = 0) -> str:
    """Return words for the first of some rows, as users count them from 0, and its column."""
    more = f" (and {len(rows) - 1} more)" if len(rows) > 1 else ""
    return f"row {first + int(rows[0])}{more}" + (f" of column {column!r}" if column else "")


def from_frame(x: Any, first: int = 0) -> Table:
    """Return a data frame as a table."""
    return Table(nw.from_native(x, eager_only=True), first)


def from_array(array: np.ndarray, names: Sequence[str] | None = None) -> Table:
    """Return a two-dimensional array of numbers, text or objects as a table."""
    if array.dtype in ("float16", "longdouble"):  # not known to data frames
        array = array.astype("float64")
    names = names or [f"column {j}" for j in range(array.shape[1])]
    return from_frame(pandas.DataFrame(array, columns=list(names)))


def is_missing(value: Any) -> bool:
    """Return whether a value is None, NaN, NaT or pandas' NA."""
    return pandas.isna(value) is True


def label(value: Any) -> str:
    """Return a category as text; 1, 1.0 and "1" are the same, as a round trip by CSV makes them.

    Example:
        >>> label(1.0), label(True), label("a")
        ('1', 'True', 'a')
    """
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)


def read_table(estimator: Any, X: Any, *, reset: bool) -> Table:
    """Return ``X`` as a table; remember its columns, or compare them with those remembered."""
    if type(X).__name__ == "LazyFrame":
        raise TypeError("X: expected an array or a data frame; got a LazyFrame. Pass X.collect().")
    if is_into_dataframe(X):
        validate_data(estimator, X, skip_check_array=True, reset=reset)
        table = from_frame(X)
        if not all(shape := (table.rows, len(table.names))):
            raise ValueError(
                f"Found array with {shape[0]} sample(s) and {shape[1]} feature(s) ({shape=}) while "
                "a minimum of 1 is required."
            )
        return table.check()
    X = validate_data(
        estimator, X, accept_sparse=True, dtype=None, ensure_all_finite=False, reset=reset
    )
    if hasattr(X, "toarray"):
        if math.prod(X.shape) > DENSE:
            raise ValueError(
                f"X: a sparse matrix of shape {X.shape} would be {math.prod(X.shape):.2g} numbers, "
                f"and at most {DENSE:.2g} are made of one; choose columns, or fewer rows"
            )
        X = X.toarray()
    if X.dtype.kind == "O" and not any(isinstance(v, (str, bytes)) for v in X.flat):
        X = check_array(X, dtype="float64", ensure_all_finite=False)
    names = [str(name) for name in getattr(estimator, "feature_names_in_", [])]
    return from_array(X, names).check()


def read_target(y: Any) -> np.ndarray:
    """Return a target as an array; one that is missing or infinite is an error that names its row.

    A table of one column is a vector.
    """
    if type(y).__module__.startswith("pyarrow") and not is_into_dataframe(y):
        y = np.array(y.to_pylist())
    y = nw.from_native(y, allow_series=True, pass_through=True)
    names = list(y.columns) if hasattr(y, "columns") else [getattr(y, "name", None)]
    y = np.asarray(y.to_numpy() if hasattr(y, "to_numpy") else y)
    wrong, what = pandas.isna(y), "NaN: the target is missing"
    if not wrong.any() and y.dtype.kind in "fO":
        wrong, what = (y == math.inf) | (y == -math.inf), "infinity"
    if wrong.any():
        cells = np.argwhere(wrong)
        where = place(cells[:, 0], names[cells[0, 1] if y.ndim == 2 and len(names) > 1 else 0])
        raise ValueError(f"Input y contains {what} in {where}. Leave such rows out.")
    return column_or_1d(y, warn=True) if y.ndim == 2 and y.shape[1] == 1 else y


def read_weights(sample_weight: Any, rows: int) -> Tensor:
    """Return the weights of rows, float64; all are 1 if none are given."""
    weights = _check_sample_weight(
        sample_weight, np.empty((rows, 1)), dtype=np.float64, ensure_non_negative=True
    )
    if not np.any(weights):
        raise ValueError("sample_weight: all weights are zero; at least one must be positive")
    return torch.tensor(weights)


def choose_categorical(table: Table, chosen: Any) -> list[int]:
    """Return the numbers of the categorical columns, as the option of that name chooses them."""
    if isinstance(chosen, str):
        if chosen != "auto":
            raise ValueError(
                "categorical_features: expected 'auto', a list of names or numbers of columns, or "
                f"a mask; got {chosen!r}. For one column write [{chosen!r}]."
            )
        return [j for j in range(len(table.names)) if table.is_categorical(j)]
    numbers = {name: j for j, name in enumerate(table.names)}
    given = [] if chosen is None else list(chosen)
    if unknown := [n for n in given if isinstance(n, str) and n not in numbers]:
        hint = closest(unknown[0], table.names)
        raise ValueError(f"categorical_features: no column {unknown[0]!r}{hint}")
    index = np.array([numbers[v] if isinstance(v, str) else v for v in given])
    try:
        return np.unique(np.arange(len(numbers))[index]).tolist() if given else []
    except IndexError as error:
        raise ValueError(f"categorical_features: {error}") from None
