"""Numeric columns: scale, bin edges and scores.

A value that many rows share is an edge. The other edges are quantiles of the remaining rows. Each
edge has a *score*: its rank in the column as a quantile of the standard normal distribution.
scikit-learn's ``KBinsDiscretizer`` and ``QuantileTransformer`` do the same without edges at ties,
and the latter takes no sample weights.
"""

import math
from collections.abc import Sequence
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
        position: Position in the table.
        name: Name of the column; ``name:part`` for the part of a date.
        part: Part of the date, or "".
        centre: Median.
        scale: Robust standard deviation.
        edges: Bin edges in scaled units, float32, increasing; empty if there is no value.
        scores: Scores at the edges.
        has_missing: Whether some values, but not all, were missing.
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
    table: Table, positions: Sequence[int], arguments: Arguments, weights: np.ndarray
) -> list[NumericColumn]:
    """Learn numeric columns; a date has several.

    Args:
        table: The training rows.
        positions: The positions of the columns in the table.
        arguments: Arguments of the estimator.
        weights: Sample weights ``(row,)``.
    """
    places = [(position, part) for position in positions for part in table.parts(position)]
    if isinstance(arguments.bins, str):
        bins = min(MAX_BINS, max(MIN_BINS, table.rows // ROWS_PER_BIN))
    else:
        bins = int(arguments.bins)
    bins = max(1, min(bins, MAX_INPUTS // max(1, len(places))))
    return [_learn_numeric_column(table, *place, weights, bins) for place in places]


def _learn_numeric_column(
    table: Table, position: int, part: str, weights: np.ndarray, bins: int
) -> NumericColumn:
    name = table.names[position]
    if part:
        name = f"{name}:{part}"
    values = table.numbers(position, part)
    present = ~np.isnan(values)
    if not present.any():
        empty = torch.empty(0)
        return NumericColumn(position, name, part, 0.0, 1.0, empty, empty, has_missing=False)
    values, weights = values[present], weights[present]
    centre, scale = robust_scale(values, weights)
    scaled = ((values - centre) / scale).clip(-MAX_SCALED, MAX_SCALED)
    scaled = scaled.astype("float32").astype("float64")  # rounded as the inputs of the network
    edges = bin_edges(scaled, weights, bins)
    scores = edge_scores(scaled, weights, edges)
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


def bin_edges(values: np.ndarray, weights: np.ndarray, bins: int) -> np.ndarray:
    """Return at most ``bins + 1`` edges, increasing, all of them values of rows.

    Args:
        values: The values of a column, without missing ones.
        weights: Sample weights.
        bins: The number of bins.
    """
    distinct, inverse = np.unique(values, return_inverse=True)
    if len(distinct) <= bins + 1:
        return distinct
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


def edge_scores(values: np.ndarray, weights: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return scores at the edges such that interpolated scores have mean 0 and variance 1.

    Args:
        values: The values of a column, without missing ones.
        weights: Sample weights.
        edges: The bin edges.

    Returns:
        The normal quantile at each edge, shifted and scaled, ``(edge,)``.
    """
    order = np.argsort(values)
    ordered = values[order]
    mass = np.concatenate([[0.0], np.cumsum(weights[order])])
    below = mass[np.searchsorted(ordered, edges, side="left")]
    up_to = mass[np.searchsorted(ordered, edges, side="right")]
    # The middle of the mass at an edge: ties share one level, and no level is 0 or 1.
    scores = ndtri((below + up_to) / (2 * mass[-1]))
    interpolated = np.interp(values, edges, scores)
    mean = np.average(interpolated, weights=weights)
    std = math.sqrt(np.average((interpolated - mean) ** 2, weights=weights))
    if std == 0:
        std = 1.0
    return (scores - mean) / std


def _weighted_quantiles(values: np.ndarray, weights: np.ndarray, levels: Any) -> np.ndarray:
    """Return quantiles that are values of rows; an integer weight equals repeated rows."""
    return np.quantile(values, levels, weights=weights, method="inverted_cdf")
