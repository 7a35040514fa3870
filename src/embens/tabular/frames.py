"""Read tables from arrays and data frames.

``X`` is a two-dimensional array, a list of lists, a sparse matrix, or an eager data frame of
pandas, polars or pyarrow (read through narwhals). A column is *categorical* if its type says so
(categories, strings, booleans) or if the user lists it in ``categorical_features``. All other
columns are *numeric*. A date is numeric: its time in seconds, plus its calendar parts
(:data:`DATE_PARTS`). A missing value is NaN in a numeric column and None in a categorical column.
"""

import datetime
import math
from collections.abc import Sequence
from typing import Any

import narwhals.stable.v2 as nw
import numpy as np
import pandas
from narwhals.dependencies import is_into_dataframe
from sklearn.utils.validation import check_array, validate_data

DATE_PARTS = {"month": "month", "day": "day", "weekday": "day_of_week", "hour": "hour"}
"""Calendar parts of a date and the pandas attributes that return them."""
MAX_DENSE = 2**28  # entries of a sparse matrix that is converted to a dense one


class Table:
    """Columns of an array or a data frame, accessed by position.

    All plain floats and integers are converted together, which is much faster than one column
    after another. Every other column is read once and kept.

    Args:
        source: A narwhals data frame, or a two-dimensional array of floats or integers.
        names: The column names.

    Attributes:
        rows: The number of rows.
        names: The column names as strings.
    """

    def __init__(self, source: Any, names: Sequence[Any]):
        self.source = source
        self.rows = len(source)
        self.names = [str(name) for name in names]
        positions, self._block = _read_plain_numbers(source)
        self._place_in_block = {position: place for place, position in enumerate(positions)}
        self._series: dict[int, Any] = {}
        self._kinds: dict[int, str] = {}
        self._views: dict[int, dict[str, np.ndarray]] = {}

    def take(self, rows: Any) -> "Table":
        """Return the table of the selected rows (a slice or an array of row numbers)."""
        return Table(self.source[rows], self.names)

    def kind(self, position: int) -> str:
        """Return "number", "category", "date" or "duration", by the type of a column."""
        if position in self._place_in_block:
            return "number"
        if position not in self._kinds:
            self._kinds[position] = _kind_of_series(self._column(position))
        return self._kinds[position]

    def parts(self, position: int) -> tuple[str, ...]:
        """Return the numeric views of a column: ``""`` for its value, and the parts of a date."""
        if self.kind(position) == "date":
            return ("", *DATE_PARTS)
        return ("",)

    def numbers(self, position: int, part: str = "") -> np.ndarray:
        """Return a column as float64 ``(row,)``, with NaN for missing values.

        Args:
            position: The position of the column.
            part: A key of :data:`DATE_PARTS` for dates, or ``""`` for the value itself.

        Raises:
            ValueError: If a value is not a number.
        """
        if position in self._place_in_block:
            return self._block[:, self._place_in_block[position]]
        if position not in self._views:
            name = self.names[position]
            self._views[position] = _read_views(self._column(position), name)
        views = self._views[position]
        return views.get(part, views[""])  # a column without dates in this table has no parts

    def matrix(self, places: Sequence[tuple[int, str]]) -> np.ndarray:
        """Return several columns as float64 ``(row, column)``.

        Args:
            places: Position and part of each column, as in :meth:`numbers`.
        """
        if all(position in self._place_in_block for position, _ in places):
            return self._block[:, [self._place_in_block[position] for position, _ in places]]
        values = np.empty((self.rows, len(places)))
        for j, (position, part) in enumerate(places):
            values[:, j] = self.numbers(position, part)
        return values

    def labels(self, position: int) -> list[str | None]:
        """Return the categories of a column as text, with None for missing values."""
        if isinstance(self.source, np.ndarray):
            values = self.source[:, position].tolist()
        else:
            values = self._column(position).to_list()
        # Convert distinct values only; columns usually have few.
        label_of_value = {value: to_label(value) for value in set(values)}
        return [label_of_value[value] for value in values]

    def check_dates(self, positions: Sequence[int], dates: set[int]) -> None:
        """Raise ValueError if a numeric column has dates now and numbers in fit, or the reverse.

        Args:
            positions: The numeric columns.
            dates: Those of them that had dates in fit. A column without values passes.
        """
        for position in positions:
            has_dates = self.kind(position) == "date"
            was_date = position in dates
            if has_dates == was_date or np.isnan(self.numbers(position)).all():
                continue
            now, before = "numbers", "dates"
            if has_dates:
                now, before = "dates", "numbers"
            raise ValueError(
                f"Column {self.names[position]!r} has {now}, but it had {before} in fit. Convert "
                f"it to {before}."
            )

    def check_numbers(self) -> None:
        """Raise ValueError if a column that is not categorical has an infinite or invalid value."""
        has_infinity = np.isinf(self._block).any()
        for position in range(len(self.names)):
            if position in self._place_in_block and not has_infinity:
                continue
            if self.kind(position) == "category":
                continue
            infinite_rows = np.flatnonzero(np.isinf(self.numbers(position)))
            if len(infinite_rows):
                raise ValueError(
                    "Input X contains infinity or a value too large for dtype('float64') in "
                    f"{describe_rows(infinite_rows, self.names[position])}. Replace it, for "
                    "example by NaN, which is a missing value."
                )

    def _column(self, position: int) -> Any:
        """Return a column of a data frame as a narwhals series; date objects become dates."""
        if position not in self._series:
            series = self.source.get_column(self.source.columns[position])
            if series.dtype in (nw.Object, nw.Unknown):
                series = _convert_dates(series)
            self._series[position] = series
        return self._series[position]


def _read_plain_numbers(source: Any) -> tuple[list[int], np.ndarray]:
    """Return the positions of the columns of floats and integers, and their values as float64.

    Booleans are categories, and extension types have missing values that are not NaN.
    """
    if isinstance(source, np.ndarray):
        return list(range(source.shape[1])), source.astype("float64", copy=False)
    frame = source.to_native()
    if not isinstance(frame, pandas.DataFrame):
        return [], np.empty((len(source), 0))
    positions = []
    for position, dtype in enumerate(frame.dtypes):
        if isinstance(dtype, np.dtype) and dtype.kind in "fiu":
            positions.append(position)
    if len(positions) < frame.shape[1]:
        frame = frame.iloc[:, positions]
    return positions, frame.to_numpy(dtype="float64")


def _convert_dates(series: Any) -> Any:
    """Return a column of date objects or periods as datetimes, and any other column unchanged."""
    times = []
    for value in series.to_list():
        if isinstance(value, pandas.Period):
            value = value.to_timestamp()
        elif not isinstance(value, datetime.date) and not is_missing(value):
            return series
        times.append(value)
    times = pandas.Series(pandas.to_datetime(times, utc=True))
    if times.isna().all():
        return series
    return nw.from_native(times, series_only=True)


def _kind_of_series(series: Any) -> str:
    dtype = series.dtype
    if dtype in (nw.Datetime, nw.Date):
        return "date"
    if dtype in (nw.Duration, nw.Time):
        return "duration"
    if dtype in (nw.String, nw.Categorical, nw.Enum, nw.Boolean):
        return "category"
    is_object = dtype in (nw.Object, nw.Binary, nw.Unknown)
    if is_object and any(isinstance(value, (str, bytes, bool)) for value in series.to_list()):
        return "category"
    return "number"


def _read_views(series: Any, name: str) -> dict[str, np.ndarray]:
    """Return the values of a column as float64, and the parts of a date."""
    if series.dtype in (nw.Datetime, nw.Date, nw.Duration, nw.Time):
        return _read_times(series, name)
    if series.dtype.is_numeric() or series.dtype == nw.Boolean:
        try:
            values = series.cast(nw.Float64()).to_numpy()
            return {"": np.asarray(values, dtype="float64")}
        except ValueError:
            pass  # Arrow integers that float64 cannot represent exactly
    numbers = []
    for row, value in enumerate(series.to_list()):
        numbers.append(_parse_number(value, row, name))
    return {"": np.array(numbers)}


def _read_times(series: Any, name: str) -> dict[str, np.ndarray]:
    """Return times in seconds, and the parts of dates."""
    times = np.asarray(series.to_numpy())
    if times.dtype.kind not in "mM":
        raise TypeError(f"Column {name!r} has type {series.dtype}, which cannot be read as a time.")
    microseconds = times.astype(times.dtype.kind + "8[us]").astype("int64")
    views = {"": np.where(np.isnat(times), math.nan, microseconds / 1e6)}
    if times.dtype.kind == "M":
        index = pandas.DatetimeIndex(times)
        for part, attribute in DATE_PARTS.items():
            views[part] = np.asarray(getattr(index, attribute), dtype="float64")
    return views


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
    frame = nw.from_native(frame, eager_only=True)
    return Table(frame, frame.columns)


def from_array(array: np.ndarray, names: Sequence[str] = ()) -> Table:
    """Return a two-dimensional array of numbers, text or objects as a table."""
    if not len(names):
        names = [f"column {position}" for position in range(array.shape[1])]
    if array.dtype.kind in "fiu":
        return Table(array, names)
    return from_frame(pandas.DataFrame(array, columns=list(names)))


def read_table(estimator: Any, X: Any, *, reset: bool) -> Table:
    """Validate ``X`` as scikit-learn does and return it as a table.

    Args:
        estimator: The estimator, which stores the names and the number of features.
        X: An array or a data frame.
        reset: Store the features (in ``fit``) instead of comparing them with the stored ones.
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


def choose_categorical(table: Table, categorical_features: Any) -> list[int]:
    """Return the positions of the categorical columns, sorted.

    Args:
        table: The table.
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
        return [j for j in range(len(table.names)) if table.kind(j) == "category"]
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
        # numpy resolves positive and negative positions and masks.
        return np.unique(np.arange(len(table.names))[np.array(selection)]).tolist()
    except IndexError as error:
        raise ValueError(f"categorical_features: {error}") from None
