"""Select the numeric columns of a wide table that explain the target.

A network that is trained on a few rows of many columns fits the noise of columns that do not
matter. Extremely randomised trees find the others: a split deep in a tree uses columns that matter
only together with those above it, which a test of one column after another would miss. If nearly
all columns matter a little, the trees find nothing and a linear model of all columns is better. The
errors of both on rows that they were not fitted to decide (ADR 9).
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from embens.tabular.bins import NumericColumn
from embens.tabular.defaults import SELECTED_COLUMNS
from embens.tabular.frames import Table

SELECTION_ROWS = 2000  # rows from which columns are selected
TREES = 50
TREE_DEPTH = 6
TREE_COLUMNS = 0.3  # of all columns, compared at each split
PENALTIES = np.logspace(0, 6, 7)  # of the linear model


def select_columns(
    numeric: Sequence[NumericColumn],
    table: Table,
    weights: Tensor,
    target: Tensor,
    max_columns: Any = "auto",
) -> list[int]:
    """Return the positions of the numeric columns to use, sorted.

    Args:
        numeric: The numeric columns; the parts of a date are selected together.
        table: The training rows.
        weights: Sample weights ``(row,)``.
        target: ``(row, number)``.
        max_columns: How many columns to select; "auto" is 32 if few columns matter, else all.
    """
    # Imported here, because they take long and few tables are wide.
    from sklearn.ensemble import ExtraTreesRegressor
    from sklearn.linear_model import RidgeCV

    rows = np.linspace(0, table.rows - 1, min(table.rows, SELECTION_ROWS)).astype(int)
    values = _bounded_values(numeric, table, rows)
    y = target[rows].squeeze(1).numpy()
    sample_weight = weights[rows].numpy()
    trees: Any = ExtraTreesRegressor(
        TREES,
        max_depth=TREE_DEPTH,
        max_features=TREE_COLUMNS,
        bootstrap=True,
        oob_score=True,
        random_state=0,
    )
    trees.fit(values, y, sample_weight)
    if max_columns == "auto":
        linear: Any = RidgeCV(PENALTIES).fit(values, y, sample_weight)
        linear_error = -linear.best_score_  # leave-one-out
        tree_error = np.square(y - trees.oob_prediction_).mean()
        if linear_error < tree_error:
            return sorted({column.position for column in numeric})
        max_columns = SELECTED_COLUMNS
    importance: dict[int, float] = defaultdict(float)
    for column, value in zip(numeric, trees.feature_importances_, strict=True):
        importance[column.position] += value
    by_importance = sorted(importance, key=lambda position: -importance[position])
    return sorted(by_importance[:max_columns])


def _bounded_values(numeric: Sequence[NumericColumn], table: Table, rows: np.ndarray) -> np.ndarray:
    """Return scaled columns between -2 and 2, ``(row, column)``, with 0 for missing values.

    Trees draw thresholds between the smallest and the largest value, which must not be outliers.
    """
    values = np.empty((len(rows), len(numeric)), dtype="float32")
    for j, column in enumerate(numeric):
        scaled = (table.numbers(column.position, column.part)[rows] - column.centre) / column.scale
        values[:, j] = np.nan_to_num(np.arctan(scaled / 3))
    return values
