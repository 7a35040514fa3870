r"""Preprocessing: what is learnt about the columns of a table before a network sees them.

A table becomes two tensors. Numbers are centred and scaled in float64 and then kept as float32,
NaN included, with statistics behind them; categories become codes. From there
:class:`embens.estimators.network.Encode` goes on batch by batch, with the bins found here.

**Bins.** A value that many rows share is an edge of its own; the other edges of a numeric column
are the quantiles of the other rows, or what a small decision tree asks about the column
(``binning="tree"``). ``scores`` are the values of a monotone map at the edges: normal quantiles
(``scaling="quantile"``), or the standardised numbers themselves (``"standard"``).

**Categories.** The most frequent ones are kept, up to a budget; all others, and those that appear
for the first time at prediction, are *rare*, one category. Missing is a category of its own. A
column of many categories has *statistics* beside: the mean target of each, rare or not, drawn
towards the mean of all, and how often it is there. Rows to train on never see their own target
there: they are dealt out to folds, and each takes the statistics of the other folds.
"""

import contextlib
import math
import os
import secrets
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor

from embens.estimators.choices import Options
from embens.estimators.tables import Table, choose_categorical, is_missing, label

ENCODED = 4096  # how many inputs of the network all bins, and all categories, may make together
BLOCK = 65_536  # rows that are converted at a time
FAR = 1e30  # scaled numbers go no further, so that float32 holds them; bins end long before
BINS = (32, 128)  # of a numeric column, by the number of rows: one for every ROWS
ROWS = 128
MANY = 32  # a column of more categories has statistics
FOLDS = 5  # that rows to train on are dealt out to, for these
ADDED = 10.0  # rows of the mean target that each category is given beside its own
CLASSES = 10  # of more outputs there are no statistics
TEXT = 50  # a column of text with so many values, nearly all of them different, is ignored


@dataclass
class Preprocessing:
    """What is known about the columns."""

    names: list[str]
    numeric: list[int]  # numbers of the numeric columns
    parts: list[str]  # which part of a date each of them is, or ""
    categorical: list[int]  # and of the others
    centre: Tensor  # of each numeric column, float64
    scale: Tensor
    edges: Tensor  # of the bins, in scaled units, (numeric, bin + 1), padded with NaN
    scores: Tensor  # at the edges
    missing: list[bool]  # whether a numeric column had missing values
    categories: list[list[str]]  # the kept labels of each categorical column
    rare: list[bool]  # whether it had others
    absent: list[bool]  # or missing values
    counted: list[int]  # those of the categorical columns that have statistics
    labels: list[list[str]]  # all labels of these
    statistics: list[Tensor]  # (fold, label, number), unseen and missing last; 0: for prediction
    notes: list[str] = field(default_factory=list)  # what users should know, as sentences

    @property
    def slots(self) -> list[tuple[int, int]]:
        """The inputs that categories make: pairs of categorical column and code."""
        found = []
        for j, kept in enumerate(self.categories):
            others = [len(kept)] * self.rare[j] + [len(kept) + 1] * self.absent[j]
            found += [(j, code) for code in (*range(len(kept)), *others)]
        return found

    def inputs(self, embedding: str = "piecewise") -> list[str]:
        """Return the names of what :class:`~embens.estimators.network.Encode` makes."""
        pairs = zip(self.numeric, self.parts, strict=True)
        names = [f"{self.names[j]}:{part}" if part else self.names[j] for j, part in pairs]
        found = [*(f"{name} (score)" for name in names), *names]
        if embedding in ("piecewise", "both"):
            edges = self.edges.double() * self.scale[:, None] + self.centre[:, None]
            for name, row, width in zip(names, edges.tolist(), self.edges.diff(dim=1), strict=True):
                bins = (width > 0).nonzero().squeeze(1).tolist()
                found += [f"{name} from {row[b]:.12g} to {row[b + 1]:.12g}" for b in bins]
        found += [
            f"{name} is missing" for name, yes in zip(names, self.missing, strict=True) if yes
        ]
        columns = [self.names[j] for j in self.categorical]
        for j in self.counted:
            count = self.statistics[0].shape[-1] - 1
            found += [f"{columns[j]} (mean of target {k})" for k in range(count)]
            found.append(f"{columns[j]} (share)")
        labels = [[*kept, "rare", "missing"] for kept in self.categories]
        return found + [f"{columns[j]} = {labels[j][code]}" for j, code in self.slots]

    @property
    def numbers(self) -> int:
        """How many numbers a row has: its numeric columns, then its statistics."""
        return len(self.numeric) + sum(found.shape[-1] for found in self.statistics)

    def encode(
        self,
        table: Table,
        dtype: torch.dtype = torch.float32,
        rows: Tensor | None = None,
        folds: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the numbers, scaled columns and then statistics, and the codes of categories.

        ``rows`` are some rows, ``folds`` those of rows to train on. If the table has a folder, both
        tensors are files there, mapped. A block after another: there is never a second copy of a
        large table.
        """
        count = table.rows if rows is None else len(rows)
        numbers = _empty(count, self.numbers, dtype, table.folder)
        codes = _empty(count, len(self.categorical), torch.int64, table.folder)
        for start in range(0, count, BLOCK):
            block = slice(start, start + BLOCK)
            part = table.take(block)
            if rows is not None:
                mine = rows[block].numpy()
                low, high = int(mine.min()), int(mine.max()) + 1
                part = table.take(slice(low, high)).take(mine - low)
            for j, place in enumerate(zip(self.numeric, self.parts, strict=True)):
                scaled = (part.numbers(*place) - self.centre[j].item()) / self.scale[j].item()
                numbers[block, j] = torch.from_numpy(scaled.clip(-FAR, FAR))
            for j, column in enumerate(self.categorical):
                codes[block, j] = _codes(self.categories[j], part.values(column))
            fold, first = 0 if folds is None else 1 + folds[block], len(self.numeric)
            for j, labels, found in zip(self.counted, self.labels, self.statistics, strict=True):
                values = found[fold, _codes(labels, part.values(self.categorical[j]))]
                numbers[block, first : first + values.shape[1]] = values
                first += values.shape[1]
        return numbers, codes


def _empty(rows: int, columns: int, dtype: torch.dtype, folder: str | None) -> Tensor:
    if folder is None or columns == 0:
        return torch.empty(rows, columns, dtype=dtype)
    path, size = os.path.join(folder, secrets.token_hex(8)), rows * columns
    tensor = torch.from_file(path, shared=True, size=size, dtype=dtype)
    with contextlib.suppress(OSError):  # elsewhere a file that is mapped can't be removed
        os.unlink(path)
    return tensor.view(rows, columns)


def _codes(labels: Sequence[str], values: list[Any]) -> Tensor:
    kept = {name: code for code, name in enumerate(labels)}
    rare, absent = len(kept), len(kept) + 1
    known = {v: absent if is_missing(v) else kept.get(label(v), rare) for v in set(values)}
    return torch.tensor([known[value] for value in values])


def learn(
    table: Table,
    options: Options,
    weights: Tensor | None = None,
    target: Tensor | None = None,
    folds: Tensor | None = None,
) -> Preprocessing:
    """Learn about the columns of the training part; fewer bins where there are many columns.

    A row whose weight is a whole number counts like as many equal rows. With a target, ``(row,
    number)``, columns of many categories have statistics, by the rows' folds.
    """
    chosen = choose_categorical(table, options.categorical_features)
    masses = np.ones(table.rows) if weights is None else weights.numpy()
    numeric = [
        (j, p) for j in range(len(table.names)) if j not in {*chosen} for p in table.parts(j)
    ]
    notes: list[str] = []
    low, high = BINS
    usual = min(high, max(low, table.rows // ROWS))
    bins = usual if isinstance(options.bins, str) else int(options.bins)
    bins = max(1, min(bins, ENCODED // max(1, len(numeric))))
    counts = {j: _count(table.values(j), masses) for j in chosen}
    for j in chosen:
        present = sum(c is not None for c in counts[j])
        auto = isinstance(options.categorical_features, str)
        if auto and _is_text(table, j, present):
            notes.append(f"{table.names[j]} has another text in nearly every row and is ignored")
            del counts[j]
    chosen = list(counts)
    budget = max(2, min(int(options.max_categories), ENCODED // max(1, len(chosen))))
    if budget < options.max_categories and len(chosen) > 16:
        notes.append(f"{len(chosen)} categorical columns: {budget} categories kept of each")
    centre = torch.zeros(len(numeric), dtype=torch.float64)
    scale = torch.ones_like(centre)
    found: list[tuple[np.ndarray, np.ndarray]] = []
    missing = []
    for i, (column, part) in enumerate(numeric):
        values = table.numbers(column, part)
        present = ~np.isnan(values)
        seen, mass = values[present], masses[present]
        missing.append(0 < len(seen) < len(values))
        if len(seen) == 0:
            notes.append(f"{table.names[column]} has no value at all and is ignored")
            found.append((np.zeros(0), np.zeros(0)))
            continue
        lower, middle, upper = _quantiles(seen, mass, [0.25, 0.5, 0.75])
        spread = (upper - lower) / 1.349  # of the middle half, which outliers don't move
        spread = spread or np.average(np.abs(seen - middle), weights=mass)
        spread = spread if 0 < spread < math.inf else 1.0
        scaled = ((seen - middle) / spread).clip(-FAR, FAR).astype("float32").astype("float64")
        given = None if options.binning == "quantile" else target
        edges = _edges(scaled, mass, bins, None if given is None else given.numpy()[present])
        found.append((edges, _scores(scaled, mass, edges, options.scaling)))
        centre[i], scale[i] = float(middle), float(spread)
    edges = torch.full((len(numeric), max([1, *(len(e) for e, _ in found)])), math.nan)
    scores = edges.clone()
    for i, pair in enumerate(found):
        for at, values in zip((edges, scores), pair, strict=True):
            at[i, : len(values)] = torch.from_numpy(values)
    kept, least = [], min(10.0, float(masses.sum()) / 1000)
    for mine in counts.values():  # the most frequent
        names = [name for name in mine if name is not None]
        order = sorted(names, key=lambda name: (-mine[name], name))
        kept.append(sorted(name for name in order[:budget] if mine[name] >= least))
    rare = [bool(counts[j].keys() - {None, *names}) for j, names in zip(chosen, kept, strict=True)]
    counted, labels, statistics = [], [], []
    if target is not None and folds is not None and target.shape[1] <= CLASSES:
        counted = [i for i, j in enumerate(chosen) if len(counts[j].keys() - {None}) > MANY]
        labels = [sorted(n for n in counts[chosen[i]] if n is not None) for i in counted]
        weight = torch.from_numpy(masses)
        statistics = [
            _statistics(_codes(names, table.values(chosen[i])), len(names), target, weight, folds)
            for i, names in zip(counted, labels, strict=True)
        ]
    return Preprocessing(
        *(table.names, [j for j, _ in numeric], [part for _, part in numeric], chosen),
        *(centre, scale, edges, scores, missing, kept, rare),
        *([None in counts[j] for j in chosen], counted, labels, statistics, notes),
    )


def _statistics(
    codes: Tensor, labels: int, target: Tensor, weights: Tensor, folds: Tensor
) -> Tensor:
    """Return the mean targets of labels, unseen and missing, and logarithms of their shares.

    Of all folds together, then without each of them.
    """
    target = target.double()
    mean = (weights[:, None] * target).sum(0) / weights.sum()
    found = []
    for fold in range(-1, FOLDS):
        mass = weights * (folds != fold)
        rows = torch.zeros(labels + 2, dtype=torch.float64).index_add_(0, codes, mass)[:, None]
        sums = torch.zeros(labels + 2, target.shape[1], dtype=torch.float64)
        sums.index_add_(0, codes, mass[:, None] * (target - mean))
        share = ((rows + 1) / (mass.sum() + labels)).log() / math.log(10)
        found.append(torch.cat([sums / (rows + ADDED), share], 1))
    return torch.stack(found).float()


def _is_text(table: Table, column: int, distinct: int) -> bool:
    """Return whether nearly every row has another value, or most have several words."""
    if distinct < max(TEXT, table.rows / 2):
        return False
    values = [v for v in table.values(column) if not is_missing(v)]
    words = sum(len(label(v).split()) for v in values) / len(values)
    return distinct > 0.9 * len(values) or words >= 4


def _quantiles(values: np.ndarray, weights: np.ndarray, levels: Any) -> np.ndarray:
    return np.quantile(values, levels, weights=weights, method="inverted_cdf")


def _edges(
    values: np.ndarray, weights: np.ndarray, bins: int, target: np.ndarray | None
) -> np.ndarray:
    """Return edges that are values of rows: ties, then quantiles or a tree's questions."""
    distinct, place = np.unique(values, return_inverse=True)
    if len(distinct) <= bins + 1:
        return distinct
    if target is not None:
        from sklearn.tree import DecisionTreeRegressor

        leaf = max(1, len(values) // (4 * bins))
        tree = DecisionTreeRegressor(max_leaf_nodes=bins, min_samples_leaf=leaf, random_state=0)
        tree.fit(values[:, None], target, sample_weight=weights)
        asked = tree.tree_.threshold[tree.tree_.feature >= 0]
        below = distinct[np.searchsorted(distinct, asked, side="right") - 1]
        return np.unique([distinct[0], *below, distinct[-1]])
    mass = np.bincount(place, weights)
    tied = mass > mass.sum() / bins
    rest = ~tied[place]
    count = max(2, bins + 1 - tied.sum())
    spread = _quantiles(values[rest], weights[rest], np.linspace(0, 1, count)) if rest.any() else []
    return np.unique([*distinct[tied], *spread])


def _scores(values: np.ndarray, weights: np.ndarray, edges: np.ndarray, scaling: str) -> np.ndarray:
    """Return scores at the edges, standardised over rows."""
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
    return (scores - mean) / (math.sqrt(np.average((at - mean) ** 2, weights=weights)) or 1)


def _count(values: Sequence[Any], weights: np.ndarray) -> dict[str | None, float]:
    """Return the weight of every label, and of None where values are missing."""
    counts: dict[str | None, float] = defaultdict(float)
    for value, weight in zip(values, weights.tolist(), strict=True):
        counts[None if is_missing(value) else label(value)] += weight
    return counts
