"""Read tables, targets and sample weights from arrays and data frames.

``X`` is a two-dimensional array, a list of lists, a sparse matrix, or an eager data frame of
pandas, polars or pyarrow (read through narwhals). A column is *categorical* if its type says so
(categories, strings, booleans) or if the user lists it in ``categorical_features``. All other
columns are *numeric*. A date is numeric: its time in seconds, plus its calendar parts
(:data:`DATE_PARTS`). A missing value is NaN in a numeric column and None in a categorical column.
"""

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import narwhals.stable.v2 as nw
import numpy as np
import pandas
import torch
from narwhals.dependencies import is_into_dataframe
from sklearn.utils import column_or_1d
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.validation import check_array, validate_data
from torch import Tensor

DATE_PARTS = {"month": "month", "day": "day", "weekday": "day_of_week", "hour": "hour"}
"""Calendar parts of a date and the pandas attributes that return them."""
MAX_DENSE = 2**28  # entries of a sparse matrix that is converted to a dense one


class Table:
    """Columns of a data frame, accessed by position.

    Args:
        frame: a narwhals data frame.

    Attributes:
        rows: the number of rows.
        names: the column names as strings.
        matrix: all columns as float64 ``(row, column)``, if all of them are plain numbers.
    """

    def __init__(self, frame: Any):
        self.frame = frame
        self.rows = len(frame)
        self.columns = list(frame.columns)
        self.names = [str(name) for name in self.columns]
        self.matrix = _to_matrix(frame.to_native())

    def column(self, position: int) -> Any:
        """Return a column as a narwhals series."""
        return self.frame.get_column(self.columns[position])

    def take(self, rows: Any) -> "Table":
        """Return the table of the selected rows (a slice or an array of row numbers)."""
        return Table(self.frame[rows])

    def is_categorical(self, position: int) -> bool:
        """Return whether the type of a column makes it categorical."""
        if self.matrix is not None:
            return False
        series = self.column(position)
        if series.dtype in (nw.Object, nw.Binary, nw.Unknown):
            return any(isinstance(value, (str, bytes, bool)) for value in series.to_list())
        return series.dtype in (nw.String, nw.Categorical, nw.Enum, nw.Boolean)

    def date_parts(self, position: int) -> tuple[str, ...]:
        """Return the numeric views of a column: ``""`` for its value, and the parts of a date."""
        if self.matrix is None and self.column(position).dtype in (nw.Datetime, nw.Date):
            return ("", *DATE_PARTS)
        return ("",)

    def is_duration(self, position: int) -> bool:
        """Return whether a column has times of the day or durations."""
        return self.matrix is None and self.column(position).dtype in (nw.Duration, nw.Time)

    def numbers(self, position: int, part: str = "") -> np.ndarray:
        """Return a column as float64, with NaN for missing values.

        Args:
            position: the position of the column.
            part: a key of :data:`DATE_PARTS`, or ``""`` for the value itself.

        Raises:
            ValueError: if a value is infinite or not a number.
        """
        if self.matrix is not None:
            values = self.matrix[:, position]
            _check_finite(values, self.names[position])
            return values
        series = self.column(position)
        name = self.names[position]
        if series.dtype in (nw.Datetime, nw.Date, nw.Duration, nw.Time):
            return _read_times(series, name, part)
        is_number = series.dtype.is_numeric() or series.dtype == nw.Boolean
        try:
            if not is_number:
                raise ValueError
            values = np.asarray(series.cast(nw.Float64()).to_numpy(), dtype="float64")
        except ValueError:
            # Objects, and Arrow integers that float64 cannot represent exactly.
            values = np.array(
                [_parse_number(value, row, name) for row, value in enumerate(series.to_list())]
            )
        _check_finite(values, name)
        return values

    def labels(self, position: int) -> list[str | None]:
        """Return the categories of a column as text, with None for missing values."""
        values = self.column(position).to_list()
        # Convert distinct values only; columns usually have few.
        label_of_value = {value: to_label(value) for value in set(values)}
        return [label_of_value[value] for value in values]

    def check_numbers(self) -> None:
        """Raise ValueError if a column that is not categorical has a value that is no number."""
        if self.matrix is not None and not np.isinf(self.matrix).any():
            return
        for position in range(len(self.names)):
            if not self.is_categorical(position):
                self.numbers(position)


def _to_matrix(frame: Any) -> np.ndarray | None:
    """Return a pandas frame of plain floats and integers as one array, else None.

    One conversion of the whole frame is much faster than one of each column. Booleans are
    categories, and extension types have missing values that are not NaN.
    """
    if not isinstance(frame, pandas.DataFrame):
        return None
    for dtype in set(frame.dtypes):
        if not isinstance(dtype, np.dtype) or dtype.kind not in "fiu":
            return None
    return frame.to_numpy(dtype="float64")


def _check_finite(values: np.ndarray, name: str) -> None:
    infinite_rows = np.flatnonzero(np.isinf(values))
    if len(infinite_rows):
        raise ValueError(
            f"Input X contains infinity or a value too large for dtype('float64') in "
            f"{describe_rows(infinite_rows, name)}. Replace it, for example by NaN, which is "
            "a missing value."
        )


def _read_times(series: Any, name: str, part: str) -> np.ndarray:
    """Return times in seconds, or one part of each date."""
    times = np.asarray(series.to_numpy())
    if times.dtype.kind not in "mM":
        raise TypeError(f"Column {name!r} has type {series.dtype}, which cannot be read as a time.")
    if part:
        return np.asarray(getattr(pandas.DatetimeIndex(times), DATE_PARTS[part]), dtype="float64")
    microseconds = times.astype(times.dtype.kind + "8[us]").astype("int64")
    return np.where(np.isnat(times), math.nan, microseconds / 1e6)


def _parse_number(value: Any, row: int, name: str) -> float:
    if is_missing(value):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"{describe_rows([row], name)}: {error}. This is a numeric column, by its type or "
            "because it was numeric in fit. List it in categorical_features if it is categorical."
        ) from None


def describe_rows(rows: Sequence[int] | np.ndarray, column: str | None = None) -> str:
    """Name the first row, the number of further rows, and the column.

    Example:
        >>> describe_rows([3, 8], "price")
        "row 3 (and 1 more) of column 'price'"
    """
    text = f"row {int(rows[0])}"
    if len(rows) > 1:
        text += f" (and {len(rows) - 1} more)"
    if column:
        text += f" of column {column!r}"
    return text


def is_missing(value: Any) -> bool:
    """Return whether a value is None, NaN, NaT or ``pandas.NA``."""
    return pandas.isna(value) is True


def to_label(value: Any) -> str | None:
    """Return a category as text, or None if it is missing.

    1, 1.0 and "1" have the same label, because a round trip through CSV turns one into another.

    Example:
        >>> to_label(1.0), to_label(True), to_label("a"), to_label(None)
        ('1', 'True', 'a', None)
    """
    if is_missing(value):
        return None
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    return str(value)


def from_frame(frame: Any) -> Table:
    """Return an eager data frame of any supported library as a table."""
    return Table(nw.from_native(frame, eager_only=True))


def from_array(array: np.ndarray, names: Sequence[str] = ()) -> Table:
    """Return a two-dimensional array of numbers, text or objects as a table."""
    if array.dtype in ("float16", "longdouble"):  # not supported by data frames
        array = array.astype("float64")
    if not names:
        names = [f"column {position}" for position in range(array.shape[1])]
    return from_frame(pandas.DataFrame(array, columns=list(names)))


def read_table(estimator: Any, X: Any, *, reset: bool) -> Table:
    """Validate ``X`` as scikit-learn does and return it as a table.

    Args:
        estimator: the estimator, which stores the names and the number of features.
        X: an array or a data frame.
        reset: store the features (in ``fit``) instead of comparing them with the stored ones.
    """
    if type(X).__name__ == "LazyFrame":
        raise TypeError(
            "X must be an array or an eager data frame, got a LazyFrame. Pass X.collect()."
        )
    if is_into_dataframe(X):
        validate_data(estimator, X, skip_check_array=True, reset=reset)
        table = from_frame(X)
        columns = len(table.names)
        if table.rows == 0 or columns == 0:
            raise ValueError(
                f"Found array with {table.rows} sample(s) and {columns} feature(s) "
                f"(shape=({table.rows}, {columns})) while a minimum of 1 is required."
            )
    else:
        array = validate_data(
            estimator, X, accept_sparse=True, dtype=None, ensure_all_finite=False, reset=reset
        )
        names = [str(name) for name in getattr(estimator, "feature_names_in_", [])]
        table = from_array(_to_dense(array), names)
    # Here and not in the encoder, which sees blocks of rows: messages have the right row numbers.
    table.check_numbers()
    return table


def _to_dense(array: Any) -> np.ndarray:
    """Return a sparse matrix as a dense one, and objects without text as numbers."""
    if hasattr(array, "toarray"):
        entries = math.prod(array.shape)
        if entries > MAX_DENSE:
            raise ValueError(
                f"X is a sparse matrix of shape {array.shape}, which has {entries:.2g} entries; at "
                f"most {MAX_DENSE:.2g} are converted to a dense array. Select columns or rows."
            )
        array = array.toarray()
    if array.dtype.kind == "O" and not any(isinstance(value, (str, bytes)) for value in array.flat):
        array = check_array(array, dtype="float64", ensure_all_finite=False)
    return array


def read_target(y: Any) -> np.ndarray:
    """Return a target as an array, ``(row,)`` or ``(row, target)``.

    A table with one column becomes a vector.

    Raises:
        ValueError: if a value is missing or infinite; the message names its row.
    """
    if type(y).__module__.startswith("pyarrow") and not is_into_dataframe(y):
        y = np.array(y.to_pylist())
    y = nw.from_native(y, allow_series=True, pass_through=True)
    names = [getattr(y, "name", None)]
    if hasattr(y, "columns"):
        names = list(y.columns)
    if hasattr(y, "to_numpy"):
        y = y.to_numpy()
    y = np.asarray(y)
    invalid = pandas.isna(y)
    problem = "NaN: the target is missing"
    if not invalid.any() and y.dtype.kind in "fO":
        invalid = (y == math.inf) | (y == -math.inf)
        problem = "infinity"
    if invalid.any():
        cells = np.argwhere(invalid)
        column = 0
        if y.ndim == 2 and len(names) > 1:
            column = cells[0, 1]
        place = describe_rows(cells[:, 0], names[column])
        raise ValueError(f"Input y contains {problem} in {place}. Remove such rows.")
    if y.ndim == 2 and y.shape[1] == 1:
        return column_or_1d(y, warn=True)
    return y


def split_targets(y: np.ndarray, expected: int) -> list[np.ndarray]:
    """Return the columns of a target.

    Raises:
        ValueError: if their number differs from the first fit.
    """
    columns = [y]
    if y.ndim == 2:
        columns = list(y.T)
    if len(columns) != expected:
        raise ValueError(
            f"y must have {expected} targets, as in the first fit, got {len(columns)}."
        )
    return columns


def read_weights(sample_weight: Any, rows: int) -> Tensor:
    """Return the sample weights as float64 ``(row,)``.

    Args:
        sample_weight: one weight for each row, one number for all rows, or None for 1.
        rows: the number of rows.
    """
    if sample_weight is None:
        return torch.ones(rows, dtype=torch.float64)
    if isinstance(sample_weight, Real):
        sample_weight = np.full(rows, float(sample_weight))
    weights = check_array(
        sample_weight,
        ensure_2d=False,
        dtype="float64",
        ensure_non_negative=True,
        input_name="sample_weight",
    )
    if weights.shape != (rows,):
        raise ValueError(f"sample_weight must have shape ({rows},), got {weights.shape}.")
    if not weights.any():
        raise ValueError("sample_weight must have a positive value, but all weights are zero.")
    return torch.tensor(weights)


def class_weight_factors(class_weight: Any, y: np.ndarray, weights: Tensor) -> Tensor:
    """Return the factors of the sample weights by class, ``(row,)``.

    "balanced" counts only rows whose weight is not 0.
    """
    used = weights.nonzero().squeeze(1)
    factors = torch.ones_like(weights)
    is_valid = True
    if isinstance(class_weight, dict):
        is_valid = all(isinstance(factor, Real) for factor in class_weight.values())
    if is_valid:
        factors[used] = torch.tensor(compute_sample_weight(class_weight, y[used.numpy()]))
        is_valid = bool((factors.isfinite() & (factors >= 0)).all() and factors[used].any())
    if not is_valid:
        raise ValueError(
            "class_weight must have numbers that are not negative, at least one of them "
            f"positive, got {class_weight!r}."
        )
    return factors


def choose_categorical(table: Table, categorical_features: Any) -> list[int]:
    """Return the positions of the categorical columns, sorted.

    Args:
        table: the table.
        categorical_features: "auto" (by type), a sequence of column names or positions, a boolean
            mask, or None for no column.
    """
    if isinstance(categorical_features, str):
        if categorical_features != "auto":
            raise ValueError(
                "categorical_features must be 'auto', a list of column names or positions, or a "
                f"mask, got {categorical_features!r}. For one column pass "
                f"[{categorical_features!r}]."
            )
        return [j for j in range(len(table.names)) if table.is_categorical(j)]
    if categorical_features is None or len(categorical_features) == 0:
        return []
    selection = []
    for item in categorical_features:
        if isinstance(item, str):
            if item not in table.names:
                raise ValueError(
                    f"categorical_features names the column {item!r}, which X does not have. Its "
                    f"columns are {table.names[:20]}."
                )
            item = table.names.index(item)
        selection.append(item)
    try:
        # numpy resolves positions, negative positions and masks alike.
        return np.unique(np.arange(len(table.names))[np.array(selection)]).tolist()
    except IndexError as error:
        raise ValueError(f"categorical_features: {error}") from None
