"""Scale, bin edges and scores of a numeric column.

A value that many rows share is an edge. The other edges are quantiles of the remaining rows, or the
thresholds of a small decision tree. Each edge has a *score*: the normal quantile of the column
there, or the standardised value. scikit-learn's ``KBinsDiscretizer`` and ``QuantileTransformer``
have no such edges at ties, and the latter takes no sample weights.
"""

import math
from typing import Any

import numpy as np
from scipy.special import ndtri


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
