"""What scikit-learn expects of ``X`` and ``sample_weight``, checked with its own functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embens.estimators.tables import ArrayTable, Table, from_frame, is_frame, is_missing

if TYPE_CHECKING:
    import numpy as np


def read_table(estimator: Any, X: Any, *, reset: bool) -> Table:
    """Return ``X`` as a table; remember its columns, or compare them with those remembered."""
    from sklearn.utils import assert_all_finite
    from sklearn.utils.validation import check_array, validate_data

    if type(X).__name__ == "LazyFrame":
        raise TypeError("X: expected an array or a data frame; got a LazyFrame. Pass X.collect().")
    if is_frame(X):
        validate_data(estimator, X, skip_check_array=True, reset=reset)
        table = from_frame(X)
        if table.rows == 0 or not table.names:
            raise ValueError(
                f"Found array with {table.rows} sample(s) and {len(table.names)} feature(s) "
                f"(shape={(table.rows, len(table.names))}) while a minimum of 1 is required."
            )
        return table
    X = validate_data(estimator, X, dtype=None, ensure_all_finite=False, reset=reset)
    if X.dtype.kind == "f":
        assert_all_finite(
            X, allow_nan=True, estimator_name=type(estimator).__name__, input_name="X"
        )
    elif X.dtype.kind == "O" and not _has_text(X):
        X = check_array(X, dtype="float64", ensure_all_finite=False)
        assert_all_finite(X, allow_nan=True, input_name="X")
    return ArrayTable(X, [str(n) for n in getattr(estimator, "feature_names_in_", [])] or None)


def _has_text(array: np.ndarray) -> bool:
    return any(isinstance(v, (str, bytes)) for v in array.flat)


def read_target(y: Any) -> np.ndarray:
    """Return a target as numpy's array; a missing value is an error."""
    import narwhals.stable.v2 as nw
    import numpy as np

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
    return y


def read_weights(sample_weight: Any, rows: int) -> Tensor | None:
    """Return the weights of rows, float64, if there are any."""
    import numpy as np
    from sklearn.utils.validation import _check_sample_weight

    if sample_weight is None:
        return None
    weights = _check_sample_weight(
        sample_weight, np.empty((rows, 1)), dtype=np.float64, ensure_non_negative=True
    )
    if not np.any(weights):
        raise ValueError("sample_weight: all weights are zero; at least one must be positive")
    return torch.from_numpy(np.array(weights))
