"""Numeric columns: scale, bin edges and scores.

A value that many rows share is an edge. The other edges are quantiles of the remaining rows, or the
thresholds of a small decision tree. Each edge has a *score*: the normal quantile of the column
there, or the standardised value. scikit-learn's ``KBinsDiscretizer`` and ``QuantileTransformer``
have no such edges at ties, and the latter takes no sample weights.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor

from embens.tabular.defaults import Arguments
from embens.tabular.frames import Table

MAX_INPUTS = 4096  # network inputs of all bins together, and of all categories together
MAX_SCALED = 1e30  # scaled numbers are clipped to what float32 can hold; bins end long before
MIN_BINS = 32
MAX_BINS = 128
ROWS_PER_BIN = 128


@dataclass(frozen=True, eq=False)
class NumericColumn:
    """A numeric column, or one part of a date column.

    Attributes:
        position: position in the table.
        name: name of the column; ``name:part`` for the part of a date.
        part: part of the date, or "".
        centre: median.
        scale: robust standard deviation.
        edges: bin edges in scaled units, float32, increasing; empty if there is no value.
        scores: scores at the edges.
        has_missing: whether some values, but not all, were missing.
    """

    position: int
    name: str
    part: str
    centre: float
    scale: float
    edges: Tensor
    scores: Tensor
    has_missing: bool


def learn_numeric_columns(
    table: Table,
    categorical_positions: list[int],
    arguments: Arguments,
    weights: np.ndarray,
    target: Tensor | None,
) -> list[NumericColumn]:
    """Learn all columns that are not categorical; a date has several.

    Args:
        table: the training rows.
        categorical_positions: positions of the columns to leave out.
        arguments: of the estimator.
        weights: sample weights ``(row,)``.
        target: ``(row, number)``, for ``binning="tree"``.
    """
    excluded = set(categorical_positions)
    places = []
    for position in range(len(table.names)):
        if position not in excluded:
            places += [(position, part) for part in table.parts(position)]
    if isinstance(arguments.bins, str):
        bins = min(MAX_BINS, max(MIN_BINS, table.rows // ROWS_PER_BIN))
    else:
        bins = int(arguments.bins)
    bins = max(1, min(bins, MAX_INPUTS // max(1, len(places))))
    tree_target = None
    if arguments.binning == "tree" and target is not None:
        tree_target = target.numpy()
    return [
        _learn_numeric_column(table, position, part, weights, bins, arguments.scaling, tree_target)
        for position, part in places
    ]


def _learn_numeric_column(
    table: Table,
    position: int,
    part: str,
    weights: np.ndarray,
    bins: int,
    scaling: str,
    tree_target: np.ndarray | None,
) -> NumericColumn:
    name = table.names[position]
    if part:
        name = f"{name}:{part}"
    values = table.numbers(position, part)
    present = ~np.isnan(values)
    if not present.any():
        empty = torch.empty(0)
        return NumericColumn(position, name, part, 0.0, 1.0, empty, empty, has_missing=False)
    if tree_target is not None:
        tree_target = tree_target[present]
    values, weights = values[present], weights[present]
    centre, scale = robust_scale(values, weights)
    scaled = ((values - centre) / scale).clip(-MAX_SCALED, MAX_SCALED)
    scaled = scaled.astype("float32").astype("float64")  # as the network sees them
    edges = bin_edges(scaled, weights, bins, tree_target)
    scores = edge_scores(scaled, weights, edges, scaling)
    return NumericColumn(
        position,
        name,
        part,
        centre,
        scale,
        torch.tensor(edges, dtype=torch.float32),
        torch.tensor(scores, dtype=torch.float32),
        has_missing=not present.all(),
    )


def robust_scale(values: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """Return the median and a standard deviation that outliers do not change."""
    lower, median, upper = _weighted_quantiles(values, weights, [0.25, 0.5, 0.75])
    scale = (upper - lower) / 1.349  # the interquartile range of a standard normal is 1.349
    if scale == 0:
        scale = np.average(np.abs(values - median), weights=weights)
    if not 0 < scale < math.inf:
        scale = 1.0
    return float(median), float(scale)


def bin_edges(
    values: np.ndarray, weights: np.ndarray, bins: int, target: np.ndarray | None = None
) -> np.ndarray:
    """Return at most ``bins + 1`` edges, increasing, all of them values of rows.

    Args:
        values: the values of a column, without missing ones.
        weights: sample weights.
        bins: the number of bins.
        target: ``(row, number)`` for edges from a decision tree; None for quantiles.
    """
    distinct, inverse = np.unique(values, return_inverse=True)
    if len(distinct) <= bins + 1:
        return distinct
    if target is not None:
        return _tree_edges(values, weights, bins, target, distinct)
    # A value with more than one bin's share of the rows is an edge. Quantiles of all rows would
    # repeat it, and the duplicates would leave few bins for the other rows.
    mass = np.bincount(inverse, weights)
    is_tied = mass > mass.sum() / bins
    tied = distinct[is_tied]
    remaining = ~is_tied[inverse]
    edges = list(tied)
    if remaining.any():
        levels = np.linspace(0, 1, max(2, bins + 1 - len(tied)))
        edges += list(_weighted_quantiles(values[remaining], weights[remaining], levels))
    return np.unique(edges)


def _tree_edges(
    values: np.ndarray, weights: np.ndarray, bins: int, target: np.ndarray, distinct: np.ndarray
) -> np.ndarray:
    from sklearn.tree import DecisionTreeRegressor

    tree = DecisionTreeRegressor(
        max_leaf_nodes=bins, min_samples_leaf=max(1, len(values) // (4 * bins)), random_state=0
    )
    tree.fit(values[:, None], target, sample_weight=weights)
    is_split = tree.tree_.feature >= 0
    thresholds = tree.tree_.threshold[is_split]
    below = distinct[np.searchsorted(distinct, thresholds, side="right") - 1]
    return np.unique([distinct[0], *below, distinct[-1]])


def edge_scores(
    values: np.ndarray, weights: np.ndarray, edges: np.ndarray, scaling: str
) -> np.ndarray:
    """Return scores at the edges such that interpolated scores have mean 0 and variance 1."""
    scores = edges
    if scaling == "quantile":
        order = np.argsort(values)
        ordered = values[order]
        mass = np.concatenate([[0.0], np.cumsum(weights[order])])
        below = mass[np.searchsorted(ordered, edges, side="left")]
        up_to = mass[np.searchsorted(ordered, edges, side="right")]
        scores = ndtri((below + up_to) / (2 * mass[-1]))
    interpolated = np.interp(values, edges, scores)
    mean = np.average(interpolated, weights=weights)
    std = math.sqrt(np.average((interpolated - mean) ** 2, weights=weights))
    if std == 0:
        std = 1.0
    return (scores - mean) / std


def _weighted_quantiles(values: np.ndarray, weights: np.ndarray, levels: Any) -> np.ndarray:
    return np.quantile(values, levels, weights=weights, method="inverted_cdf")
