r"""Preprocessing: what is learnt about the columns of a table before a network sees them.

A table becomes two tensors. Numbers are centred and scaled in float64 and then kept as float32,
NaN included; categories become their numbers. From there :class:`embens.estimators.network.Encode`
goes on batch by batch, with the bins found here.

**Bins.** The edges of a numeric column are its quantiles, so that every bin has about as many rows.
``scores`` are the values of a monotone map at the edges: normal quantiles
(``scaling="quantile"``), or the standardised numbers themselves (``"standard"``).

**Categories.** The most frequent ones are kept, up to a budget; all others, and those that appear
for the first time at prediction, are *rare*, one category. Missing is a category of its own.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embens.estimators.choices import Options
from embens.estimators.tables import Table, choose_categorical, is_missing, label

if TYPE_CHECKING:
    import numpy as np

ENCODED = 4096  # how many inputs of the network all bins, and all categories, may make together
BLOCK = 65_536  # rows that are converted at a time
FAR = 1e30  # scaled numbers go no further, so that float32 holds them; bins end long before


@dataclass
class Preprocessing:
    """What is known about the columns."""

    names: list[str]
    numeric: list[int]  # numbers of the numeric columns
    categorical: list[int]  # and of the others
    centre: Tensor  # of each numeric column, float64
    scale: Tensor
    edges: Tensor  # of the bins, in scaled units, (numeric, bin + 1), padded with NaN
    scores: Tensor  # at the edges
    missing: list[bool]  # whether a numeric column had missing values
    categories: list[list[str]]  # the kept labels of each categorical column
    rare: list[bool]  # whether it had others
    absent: list[bool]  # or missing values
    notes: list[str] = field(default_factory=list)  # what users should know, as sentences

    @property
    def slots(self) -> list[tuple[int, int]]:
        """The inputs that categories make: pairs of categorical column and code."""
        found = []
        for j, kept in enumerate(self.categories):
            others = [len(kept)] * self.rare[j] + [len(kept) + 1] * self.absent[j]
            found += [(j, code) for code in (*range(len(kept)), *others)]
        return found

    def encode(
        self, table: Table, dtype: torch.dtype = torch.float32, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the numbers, scaled, ``(row, numeric)``, and the codes of categories.

        A block after another, so that of a large table there is never a second copy in float64.
        """
        count = table.rows if rows is None else len(rows)
        numbers = torch.empty(count, len(self.numeric), dtype=dtype)
        codes = torch.empty(count, len(self.categorical), dtype=torch.int64)
        for start in range(0, count, BLOCK):
            block = slice(start, start + BLOCK)
            part = table.take(block if rows is None else rows[block].numpy())
            raw = torch.from_numpy(part.block(self.numeric))
            numbers[block] = ((raw - self.centre) / self.scale).clamp(-FAR, FAR).to(dtype)
            for j, column in enumerate(self.categorical):
                codes[block, j] = torch.tensor(self._codes(j, part.values(column)))
        return numbers, codes

    def _codes(self, j: int, values: list[Any]) -> list[int]:
        kept = {name: code for code, name in enumerate(self.categories[j])}
        rare, absent = len(kept), len(kept) + 1
        known = {v: absent if is_missing(v) else kept.get(label(v), rare) for v in set(values)}
        return [known[value] for value in values]


def learn(table: Table, options: Options, weights: Tensor | None = None) -> Preprocessing:
    """Learn about the columns of the training part; fewer bins where there are many columns.

    A row whose weight is a whole number counts like as many equal rows.
    """
    import numpy as np

    chosen = choose_categorical(table, options.categorical_features)
    masses = np.ones(table.rows) if weights is None else weights.numpy()
    numeric = sorted(set(range(len(table.names))) - set(chosen))
    notes: list[str] = []
    bins = max(1, min(int(options.bins), ENCODED // max(1, len(numeric))))
    budget = max(2, min(int(options.max_categories), ENCODED // max(1, len(chosen))))
    if budget < options.max_categories and len(chosen) > 16:
        notes.append(f"{len(chosen)} categorical columns: {budget} categories kept of each")
    centre = torch.zeros(len(numeric), dtype=torch.float64)
    scale = torch.ones_like(centre)
    edges = torch.full((len(numeric), bins + 1), math.nan)
    scores, missing = edges.clone(), []
    for i, column in enumerate(numeric):
        values = table.block([column])[:, 0]
        present = ~np.isnan(values)
        seen, mass = values[present], masses[present]
        missing.append(0 < len(seen) < len(values))
        if len(seen) == 0:
            notes.append(f"{table.names[column]} has no value at all and is ignored")
            continue
        middle, spread = _centre_and_scale(seen, mass)
        scaled = ((seen - middle) / spread).clip(-FAR, FAR)
        found, values_at = _bins(scaled, mass, bins, options.scaling)
        centre[i], scale[i] = middle, spread
        edges[i, : len(found)] = torch.from_numpy(found)
        scores[i, : len(found)] = torch.from_numpy(values_at)
    kept = [_categories(table.values(column), masses, budget) for column in chosen]
    for column, (names, rare, _) in zip(chosen, kept, strict=True):
        if rare > 1:
            notes.append(
                f"{table.names[column]}: {len(names)} categories kept, {rare} rare ones made one"
            )
    categories = [names for names, _, _ in kept]
    rare, absent = [count > 0 for _, count, _ in kept], [yes for _, _, yes in kept]
    return Preprocessing(
        *(table.names, numeric, chosen, centre, scale, edges, scores, missing),
        *(categories, rare, absent, notes),
    )


def _quantiles(values: np.ndarray, weights: np.ndarray, levels: Any) -> np.ndarray:
    import numpy as np

    return np.quantile(values, levels, weights=weights, method="inverted_cdf")


def _centre_and_scale(values: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """Return the median, and a scale that outliers don't move: that of the middle half."""
    import numpy as np

    low, middle, high = _quantiles(values, weights, [0.25, 0.5, 0.75])
    scale = (high - low) / 1.349 or float(np.average(np.abs(values - middle), weights=weights))
    return float(middle), scale if scale > 0 and math.isfinite(scale) else 1.0


def _bins(
    values: np.ndarray, weights: np.ndarray, bins: int, scaling: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return edges at quantiles, without duplicates, and scores there, standardised over rows."""
    import numpy as np
    from scipy.special import ndtri

    values = values.astype("float32").astype("float64")  # so that edges are values of rows
    distinct = np.unique(values)
    edges = distinct
    if len(distinct) > bins + 1:
        edges = np.unique(_quantiles(values, weights, np.linspace(0, 1, bins + 1)))
    if scaling == "standard":
        scores = edges
    else:
        order = np.argsort(values)
        mass = np.concatenate([[0.0], np.cumsum(weights[order])])
        ordered = values[order]
        below, upto = (mass[np.searchsorted(ordered, edges, side=s)] for s in ("left", "right"))
        scores = ndtri((below + upto) / (2 * mass[-1]))
    at = np.interp(values, edges, scores)
    mean = np.average(at, weights=weights)
    return edges, (scores - mean) / (math.sqrt(np.average((at - mean) ** 2, weights=weights)) or 1)


def _categories(
    values: Sequence[Any], weights: np.ndarray, budget: int
) -> tuple[list[str], int, bool]:
    """Return the labels to keep, how many are left out, and whether a value is missing."""
    counts: dict[Any, float] = defaultdict(float)
    for value, weight in zip(values, weights.tolist(), strict=True):
        counts[None if is_missing(value) else label(value)] += weight
    absent = counts.pop(None, None) is not None
    least = min(10.0, float(weights.sum()) / 1000)
    order = sorted(counts, key=lambda name: (-counts[name], name))
    frequent = [name for name in order[:budget] if counts[name] >= least]
    return sorted(frequent), len(counts) - len(frequent), absent
