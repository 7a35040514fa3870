"""Tables: one way to read columns, targets and weights from arrays and data frames.

A table is a two-dimensional array (also a list of lists), or a data frame of pandas, polars or
pyarrow, read through narwhals. A column is *categorical* if its type says so (categories, strings,
truth values) or the user does, else *numeric*; dates count as numbers, in seconds. Missing is NaN
among numbers and None among categories.

Not here: files (:mod:`embens.estimators.files`), and what becomes of the columns
(:mod:`embens.estimators.preprocessing`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embens.checks import closest

if TYPE_CHECKING:
    import numpy as np


class Table:
    """Columns of a data frame, which is narwhals' view of it, to read by number."""

    def __init__(self, frame: Any):
        self.frame, self.rows = frame, len(frame)
        self.names = [str(name) for name in frame.columns]

    def column(self, column: int) -> Any:
        return self.frame.get_column(self.frame.columns[column])

    def is_categorical(self, column: int) -> bool:
        """Return whether the type of a column makes it categorical."""
        import narwhals.stable.v2 as nw

        dtype = self.column(column).dtype
        if dtype in (nw.Object, nw.Binary, nw.Unknown):
            return any(isinstance(v, (str, bytes, bool)) for v in self.values(column))
        return dtype in (nw.String, nw.Categorical, nw.Enum, nw.Boolean)

    def numbers(self, column: int) -> np.ndarray:
        """Return a column as float64, NaN where a value is missing."""
        import narwhals.stable.v2 as nw
        import numpy as np

        series, name = self.column(column), self.names[column]
        if series.dtype in (nw.Datetime, nw.Date, nw.Duration, nw.Time):
            raw = np.asarray(series.to_numpy())
            if raw.dtype.kind not in "mM":
                raise TypeError(f"column {name!r}: can't read {series.dtype} as time")
            seconds = raw.astype(raw.dtype.kind + "8[us]").astype("int64") / 1e6
            return np.where(np.isnat(raw), math.nan, seconds)
        if series.dtype.is_numeric() or series.dtype == nw.Boolean:
            with contextlib.suppress(ValueError):  # Arrow's, of whole numbers beyond 2**53
                return np.asarray(series.cast(nw.Float64()).to_numpy(), dtype="float64")
        values = series.to_list()
        try:
            return np.array([math.nan if is_missing(v) else float(v) for v in values])
        except TypeError:
            wrong = next(v for v in values if not is_missing(v) and not hasattr(v, "__float__"))
            raise TypeError(
                f"{name}: the argument must be a string or a number; got {type(wrong).__name__}"
            ) from None
        except ValueError as error:
            raise ValueError(
                f"{name}: {error}. It had numbers where it was fitted; pass it in "
                "categorical_features if it is not a number."
            ) from None

    def values(self, column: int) -> list[Any]:
        """Return a column as Python values, None or NaN where one is missing."""
        return self.column(column).to_list()

    def take(self, rows: Any) -> Table:
        return Table(self.frame[rows])

    def block(self, columns: Sequence[int]) -> np.ndarray:
        """Return columns as one float64 array; infinite numbers are an error."""
        import numpy as np

        if not columns:
            return np.zeros((self.rows, 0))
        found = np.column_stack([self.numbers(j) for j in columns])
        infinite: Any = np.isinf(found).any(axis=0)
        if infinite.any():
            names = [self.names[j] for j, yes in zip(columns, infinite, strict=True) if yes]
            raise ValueError(
                "Input X contains infinity or a value too large for dtype('float64'), in "
                f"{', '.join(names[:5])}. Replace it, or make it NaN, which counts as missing."
            )
        return found


def from_frame(x: Any) -> Table:
    """Return a data frame as a table."""
    import narwhals.stable.v2 as nw

    return Table(nw.from_native(x, eager_only=True))


def from_array(array: np.ndarray, names: Sequence[str] | None = None) -> Table:
    """Return a two-dimensional array of numbers, text or objects as a table."""
    import pandas

    if array.dtype in ("float16", "longdouble"):  # not known to data frames
        array = array.astype("float64")
    names = names or [f"column {j}" for j in range(array.shape[1])]
    return from_frame(pandas.DataFrame(array, columns=list(names)))


def is_frame(x: Any) -> bool:
    """Return whether something is a data frame."""
    from narwhals.dependencies import is_into_dataframe

    return is_into_dataframe(x)


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
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)


def read_table(estimator: Any, X: Any, *, reset: bool) -> Table:
    """Return ``X`` as a table; remember its columns, or compare them with those remembered."""
    from sklearn.utils import assert_all_finite
    from sklearn.utils.validation import check_array, validate_data

    if type(X).__name__ == "LazyFrame":
        raise TypeError("X: expected an array or a data frame; got a LazyFrame. Pass X.collect().")
    if is_frame(X):
        validate_data(estimator, X, skip_check_array=True, reset=reset)
        table = from_frame(X)
        if not all(shape := (table.rows, len(table.names))):
            raise ValueError(
                f"Found array with {shape[0]} sample(s) and {shape[1]} feature(s) ({shape=}) while "
                "a minimum of 1 is required."
            )
        return table
    X = validate_data(estimator, X, dtype=None, ensure_all_finite=False, reset=reset)
    if X.dtype.kind == "O" and not any(isinstance(v, (str, bytes)) for v in X.flat):
        X = check_array(X, dtype="float64", ensure_all_finite=False)
    if X.dtype.kind == "f":
        assert_all_finite(
            X, allow_nan=True, estimator_name=type(estimator).__name__, input_name="X"
        )
    return from_array(X, [str(name) for name in getattr(estimator, "feature_names_in_", [])])


def read_target(y: Any) -> np.ndarray:
    """Return a target as an array; a missing value is an error, a column of one is a vector."""
    import narwhals.stable.v2 as nw
    import numpy as np
    from sklearn.utils import column_or_1d

    if type(y).__module__.startswith("pyarrow") and not is_frame(y):
        y = np.array(y.to_pylist())
    y = nw.from_native(y, allow_series=True, pass_through=True)
    y = np.asarray(y.to_numpy() if hasattr(y, "to_numpy") else y)
    missing = [is_missing(v) for v in y.flat] if y.dtype.kind == "O" else y != y
    if np.any(missing):
        raise ValueError(
            f"Input y contains NaN: the target of {int(np.sum(missing))} rows is missing. Leave "
            "these rows out."
        )
    return column_or_1d(y, warn=True) if y.ndim == 2 and y.shape[1] == 1 else y


def read_weights(sample_weight: Any, rows: int) -> Tensor:
    """Return the weights of rows, float64; all are 1 if none are given."""
    import numpy as np
    from sklearn.utils.validation import _check_sample_weight

    weights = _check_sample_weight(
        sample_weight, np.empty((rows, 1)), dtype=np.float64, ensure_non_negative=True
    )
    if not np.any(weights):
        raise ValueError("sample_weight: all weights are zero; at least one must be positive")
    return torch.tensor(weights)


def choose_categorical(table: Table, chosen: Any) -> list[int]:
    """Return the numbers of the categorical columns, as the option of that name chooses them."""
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
