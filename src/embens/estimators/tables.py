"""Tables: one way to read columns from arrays and data frames.

A table is numpy's two-dimensional array (also a list of lists), or a data frame of pandas, polars
or pyarrow, read through narwhals, which scikit-learn brings along. A column is *categorical* if its
type says so (categories, strings, truth values) or the user does, else *numeric*; dates count as
numbers, in seconds. Missing is NaN among numbers and None among categories.

Not here: files (:mod:`embens.estimators.files`), and what becomes of the columns
(:mod:`embens.estimators.preprocessing`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from embens.checks import closest

if TYPE_CHECKING:
    import numpy as np


class Table(ABC):
    """Columns to read, by number.

    Attributes:
        rows: how many.
        names: of the columns, as shown in messages.
    """

    rows: int
    names: list[str]

    @abstractmethod
    def is_categorical(self, column: int) -> bool:
        """Return whether the type of a column makes it categorical."""

    @abstractmethod
    def numbers(self, column: int) -> np.ndarray:
        """Return a column as float64, NaN where a value is missing."""

    @abstractmethod
    def values(self, column: int) -> list[Any]:
        """Return a column as Python values, None where one is missing."""

    @abstractmethod
    def take(self, rows: Any) -> Table:
        """Return some rows, by their numbers or a slice."""

    def block(self, columns: Sequence[int]) -> np.ndarray:
        """Return columns as one float64 array; infinite numbers are an error."""
        import numpy as np

        if not columns:
            return np.zeros((self.rows, 0))
        found = np.column_stack([self.numbers(j) for j in columns])
        infinite = [j for k, j in enumerate(columns) if np.isinf(found[:, k]).any()]
        if infinite:
            names = [self.names[j] for j in infinite]
            raise ValueError(
                "Input X contains infinity or a value too large for dtype('float64'), in "
                f"{', '.join(names[:5])}. Replace it, or make it NaN, which counts as missing."
            )
        return found


class ArrayTable(Table):
    """A two-dimensional array of numbers, or of objects."""

    def __init__(self, array: np.ndarray, names: list[str] | None = None):
        self.array = array
        self.rows = len(array)
        self.names = names or [f"column {j}" for j in range(array.shape[1])]

    def is_categorical(self, column: int) -> bool:
        kind = self.array.dtype.kind
        if kind != "O":
            return kind in "bUST"
        return any(isinstance(v, (str, bytes)) for v in self.array[:, column])

    def numbers(self, column: int) -> np.ndarray:
        return _to_numbers(self.array[:, column], self.names[column])

    def values(self, column: int) -> list[Any]:
        return self.array[:, column].tolist()

    def take(self, rows: Any) -> ArrayTable:
        return ArrayTable(self.array[rows], self.names)


class FrameTable(Table):
    """A data frame, held as narwhals' view of it."""

    def __init__(self, frame: Any):
        self.frame = frame
        self.rows = len(frame)
        self.names = [str(name) for name in frame.columns]

    def is_categorical(self, column: int) -> bool:
        import narwhals.stable.v2 as nw

        dtype = self.frame.get_column(self.frame.columns[column]).dtype
        if dtype in (nw.String, nw.Categorical, nw.Enum, nw.Boolean):
            return True
        if dtype == nw.Object:
            return any(isinstance(v, (str, bytes, bool)) for v in self.values(column))
        return False

    def numbers(self, column: int) -> np.ndarray:
        import narwhals.stable.v2 as nw
        import numpy as np

        series = self.frame.get_column(self.frame.columns[column])
        if series.dtype in (nw.Datetime, nw.Date, nw.Duration, nw.Time):
            raw = np.asarray(series.to_numpy())
            if raw.dtype.kind not in "mM":
                raise TypeError(f"column {self.names[column]!r}: can't read {series.dtype} as time")
            seconds = raw.astype(raw.dtype.kind + "8[us]").astype("int64") / 1e6
            return np.where(np.isnat(raw), math.nan, seconds)
        if series.dtype.is_numeric() or series.dtype == nw.Boolean:
            return np.asarray(series.cast(nw.Float64()).to_numpy(), dtype="float64")
        return _to_numbers(np.array(series.to_list(), dtype=object), self.names[column])

    def values(self, column: int) -> list[Any]:
        return self.frame.get_column(self.frame.columns[column]).to_list()

    def take(self, rows: Any) -> FrameTable:
        return FrameTable(self.frame[rows])


def _to_numbers(column: Any, name: str) -> np.ndarray:
    """Return a column of numbers, or of objects that are numbers, as float64."""
    import numpy as np

    if column.dtype.kind == "c":
        raise ValueError(f"Complex data not supported; got it in {name}")
    if column.dtype.kind != "O":
        return column.astype("float64")
    missing = np.array([is_missing(v) for v in column], dtype=bool)
    result = np.full(len(column), math.nan)
    try:
        result[~missing] = [float(v) for v in column[~missing]]
    except TypeError:
        wrong = next(v for v in column[~missing] if not hasattr(type(v), "__float__"))
        raise TypeError(
            f"{name}: the argument must be a string or a number; got {type(wrong).__name__}"
        ) from None
    except ValueError as error:
        raise ValueError(
            f"{name}: {error}. It had numbers where it was fitted; pass it in "
            "categorical_features if it is not a number."
        ) from None
    return result


def is_missing(value: Any) -> bool:
    """Return whether a value is None, NaN, NaT or pandas' NA."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float) and value != value


def label(value: Any) -> str:
    """Return a category as text; 1, 1.0 and "1" are the same, as a round trip by CSV makes them.

    Example:
        >>> label(1.0), label(True), label("a")
        ('1', 'True', 'a')
    """
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return value.decode() if isinstance(value, bytes) else str(value)


def is_frame(x: Any) -> bool:
    """Return whether something is a data frame."""
    from narwhals.dependencies import is_into_dataframe

    return is_into_dataframe(x)


def from_frame(x: Any) -> FrameTable:
    """Return a data frame as a table."""
    import narwhals.stable.v2 as nw

    return FrameTable(nw.from_native(x, eager_only=True))


def choose_categorical(table: Table, chosen: Any) -> list[int]:
    """Return the numbers of the categorical columns.

    Args:
        table: the columns.
        chosen: "auto": by their types; or names, numbers, or one truth value for each column.
    """
    count = len(table.names)
    if isinstance(chosen, str):
        if chosen != "auto":
            raise ValueError(
                "categorical_features: expected 'auto', a list of names or numbers of columns, or "
                f"a mask; got {chosen!r}. For one column write [{chosen!r}]."
            )
        return [j for j in range(count) if table.is_categorical(j)]
    given = [] if chosen is None else list(chosen)
    if given and all(isinstance(v, bool) or type(v).__name__ == "bool" for v in given):
        if len(given) != count:
            raise ValueError(
                f"categorical_features: expected a mask of {count} columns; got one of {len(given)}"
            )
        return [j for j, yes in enumerate(given) if yes]
    found = set()
    for value in given:
        if isinstance(value, str):
            if value not in table.names:
                hint = closest(value, table.names)
                raise ValueError(f"categorical_features: no column {value!r}{hint}")
            found.add(table.names.index(value))
        elif -count <= int(value) < count:
            found.add(int(value) % count)
        else:
            raise ValueError(f"categorical_features: no column {value}; there are {count}")
    return sorted(found)
