r"""Learn how to encode the columns of a table, and encode tables.

A table becomes two tensors: ``numbers`` (float) and ``codes`` (integer categories). Numeric columns
are centred and scaled in float64 and then stored as float32, with NaN for missing values. The
encoder (:class:`embens.tabular.perceptron.Encoder`) expands them batch by batch with the bins of
:mod:`embens.tabular.bins`.

**Categories.** The most frequent categories are kept, up to a budget. All others, including those
that first appear at prediction, share the category *rare*. Missing is a category.

**Target statistics.** A column with many categories also has numeric inputs: the mean target of the
row's category, shrunk towards the overall mean, and the frequency of the category. The statistics
of a training row never include its target: rows are assigned to folds, and a row uses the
statistics of the other folds. (scikit-learn's ``TargetEncoder`` does the same without sample
weights.)
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embens.tabular.bins import MAX_INPUTS, MAX_SCALED, NumericColumn, learn_numeric_columns
from embens.tabular.defaults import Arguments, is_wide
from embens.tabular.frames import DATE_PARTS, Table, choose_categorical
from embens.tabular.selection import select_columns

MANY_CATEGORIES = 32  # columns with more categories have target statistics
FOLDS = 5  # for target statistics; the folds of cross-fitting are separate
PRIOR_ROWS = 10.0  # weight of the overall mean in the mean target of a category
MAX_STATISTICS = 10  # a target with more columns gives no target statistics
MAX_NAMES = 20  # of columns in a remark
MIN_TEXT_VALUES = 50  # distinct values from which a column can be free text
MIN_PARSED_VALUES = 20  # distinct values from which text can be dates or numbers
DATE = re.compile(r"\d{1,4}([-/.])\d{1,2}\1\d{1,4}([T ].*)?$")
NUMBER = re.compile(r"\s*[-+]?(\d+[.,]?\d*|[.,]\d+)([eE][-+]?\d+)?\s*$")
DATE_NOTE = f"read as seconds and as {', '.join(DATE_PARTS)}, because they are dates"
DURATION_NOTE = "read as seconds, because they are times or durations"
CONVERSIONS = {
    "dates": "convert them with pandas.to_datetime to use them as dates",
    "numbers": "convert them with pandas.to_numeric to use them as numbers",
    "text": "list them in categorical_features to use them",
}
"""What a user can do about a column, by the kind that its text looks like."""


@dataclass(frozen=True, eq=False)
class CategoricalColumn:
    """A categorical column.

    Attributes:
        position: Position in the table.
        name: Name of the column.
        categories: The kept labels, sorted; label ``k`` has code ``k``.
        has_rare: Whether there were other labels; they have code ``len(categories)``.
        has_missing: Whether values were missing; they have code ``len(categories) + 1``.
        labels: All labels, if the column has target statistics, else empty.
        statistics: ``(1 + FOLDS, len(labels) + 2, statistic)``, with rows for unseen and missing
            labels at the end: over all rows, for prediction, then without each fold.
    """

    position: int
    name: str
    categories: list[str]
    has_rare: bool
    has_missing: bool
    labels: list[str]
    statistics: Tensor

    @property
    def used_codes(self) -> list[int]:
        """The codes that have an input of the network; none if the column is constant."""
        codes = list(range(len(self.categories)))
        if self.has_rare:
            codes.append(len(self.categories))
        if self.has_missing:
            codes.append(len(self.categories) + 1)
        if len(codes) == 1:
            return []
        return codes


@dataclass(frozen=True, eq=False)
class Preprocessing:
    """The encoding of a table.

    Attributes:
        names: Names of all columns.
        numeric: The numeric columns; a date contributes several.
        categorical: The categorical columns.
        notes: Remarks for the user about columns that are ignored or read in another way.
    """

    names: list[str]
    numeric: list[NumericColumn]
    categorical: list[CategoricalColumn]
    notes: list[str] = field(default_factory=list)

    @property
    def width(self) -> int:
        """Number of columns of the encoded ``numbers``: numeric columns, then statistics."""
        return len(self.numeric) + sum(c.statistics.shape[-1] for c in self.categorical)

    def encode(
        self, table: Table, dtype: torch.dtype = torch.float32, folds: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Encode a table.

        Args:
            table: The table.
            dtype: Type of the numbers.
            folds: ``(row,)``, the statistics that a row uses: 0 for those of all rows, k + 1 for
                those without fold k. None is 0 for all rows.

        Returns:
            The numbers ``(row, width)`` and the codes ``(row, categorical column)``.
        """
        if folds is None:
            folds = torch.zeros(table.rows, dtype=torch.int64)
        dates = {column.position for column in self.numeric if column.part}
        table.check_dates([column.position for column in self.numeric], dates)
        numbers = torch.empty(table.rows, self.width, dtype=dtype)
        codes = torch.empty(table.rows, len(self.categorical), dtype=torch.int64)
        first = len(self.numeric)
        numbers[:, :first] = torch.from_numpy(self._scale_numbers(table))
        for j, column in enumerate(self.categorical):
            labels = table.labels(column.position)
            codes[:, j] = _to_codes(labels, column.categories)
            count = column.statistics.shape[-1]
            if count:
                rows = _to_codes(labels, column.labels)
                numbers[:, first : first + count] = column.statistics[folds, rows]
                first += count
        return numbers, codes

    def _scale_numbers(self, table: Table) -> np.ndarray:
        """Return the numeric columns, centred and scaled, ``(row, numeric column)``."""
        values = table.matrix([(column.position, column.part) for column in self.numeric])
        centres = [column.centre for column in self.numeric]
        scales = [column.scale for column in self.numeric]
        return ((values - centres) / scales).clip(-MAX_SCALED, MAX_SCALED)

    def input_names(self, embedding: str) -> list[str]:
        """Return the names of the outputs of :class:`~embens.tabular.perceptron.Encoder`."""
        names = [f"{column.name} (score)" for column in self.numeric]
        names += [column.name for column in self.numeric]
        if embedding in ("piecewise", "both"):
            for column in self.numeric:
                edges = (column.edges.double() * column.scale + column.centre).tolist()
                for low, high in pairwise(edges):
                    names.append(f"{column.name} from {low:.12g} to {high:.12g}")
        names += [f"{column.name} is missing" for column in self.numeric if column.has_missing]
        for column in self.categorical:
            count = column.statistics.shape[-1]
            if count:
                names += [f"{column.name} (mean of target {k})" for k in range(count - 1)]
                names.append(f"{column.name} (share)")
        for column in self.categorical:
            labels = [*column.categories, "rare", "missing"]
            names += [f"{column.name} = {labels[code]}" for code in column.used_codes]
        return names


def _to_codes(labels: Sequence[str | None], categories: Sequence[str]) -> Tensor:
    """Return codes: position of the category, then one code for others, then one for missing."""
    codes: dict[str | None, int] = {category: code for code, category in enumerate(categories)}
    # Arrays of numbers and databases have 0 and 1 where data frames have False and True.
    for flag, digit in (("False", "0"), ("True", "1")):
        if flag in codes:
            codes.setdefault(digit, codes[flag])
        elif digit in codes:
            codes.setdefault(flag, codes[digit])
    rare = len(categories)
    codes[None] = rare + 1
    return torch.tensor([codes.get(label, rare) for label in labels])


def learn_columns(
    table: Table,
    arguments: Arguments,
    weights: Tensor | None = None,
    target: Tensor | None = None,
    folds: Tensor | None = None,
) -> Preprocessing:
    """Learn the encoding of a table from training rows.

    A row with an integer weight counts like as many equal rows.

    Args:
        table: The training rows.
        arguments: Arguments of the estimator.
        weights: Sample weights ``(row,)``.
        target: ``(row, number)``, for target statistics and the selection of columns.
        folds: The fold of each row, 0 to ``FOLDS - 1``, for target statistics.
    """
    if weights is None:
        weights = torch.ones(table.rows, dtype=torch.float64)
    categorical_positions = choose_categorical(table, arguments.categorical_features)
    all_positions = set(range(len(table.names)))
    numeric_positions = sorted(all_positions.difference(categorical_positions))
    numeric = learn_numeric_columns(table, numeric_positions, arguments, weights.numpy())
    unselected = []
    if target is not None and is_wide(arguments.max_columns, len(numeric_positions), table.rows):
        selected = select_columns(numeric, table, weights, target, arguments.max_columns)
        unselected = sorted(set(numeric_positions).difference(selected))
        if unselected:
            # Learn them again: fewer columns have more bins each.
            numeric = learn_numeric_columns(table, selected, arguments, weights.numpy())
    texts = []
    is_auto = isinstance(arguments.categorical_features, str)  # the user has listed none
    if is_auto:
        texts = [j for j in categorical_positions if _is_text(table.labels(j))]
    categories = [position for position in categorical_positions if position not in texts]
    budget = max(2, min(int(arguments.max_categories), MAX_INPUTS // max(1, len(categories))))
    categorical = _learn_categorical_columns(table, categories, budget, weights, target, folds)
    notes = _describe_columns(table, numeric, categorical, texts, is_auto=is_auto)
    if unselected:
        names = _join_names([table.names[position] for position in unselected])
        notes.append(
            f"Columns ignored, because only the {len(numeric_positions) - len(unselected)} numeric "
            f"columns that explain the target best are used (max_columns sets how many): {names}."
        )
    cut = []
    for column in categorical:
        if column.has_rare and len(column.categories) == budget:
            cut.append(column.name)
    is_requested = budget == arguments.max_categories != Arguments.max_categories
    if cut and not is_requested:
        notes.append(
            f"Columns of which only the {budget} most frequent categories are kept, the others "
            f"share one: {_join_names(cut)}."
        )
    return Preprocessing(table.names, numeric, categorical, notes)


def _learn_categorical_columns(
    table: Table,
    positions: list[int],
    budget: int,
    weights: Tensor,
    target: Tensor | None,
    folds: Tensor | None,
) -> list[CategoricalColumn]:
    if target is not None and target.shape[1] > MAX_STATISTICS:
        target = None
    columns = []
    for position in positions:
        labels = table.labels(position)
        name = table.names[position]
        columns.append(
            _learn_categorical_column(position, name, labels, budget, weights, target, folds)
        )
    return columns


def _learn_categorical_column(
    position: int,
    name: str,
    labels: list[str | None],
    budget: int,
    weights: Tensor,
    target: Tensor | None,
    folds: Tensor | None,
) -> CategoricalColumn:
    frequency: dict[Any, float] = defaultdict(float)
    for label, weight in zip(labels, weights.tolist(), strict=True):
        frequency[label] += weight
    has_missing = frequency.pop(None, None) is not None
    min_weight = min(10.0, float(weights.sum()) / 1000)
    categories = _most_frequent(frequency, budget, min_weight)
    all_labels: list[str] = []
    statistics = torch.empty(1 + FOLDS, 0, 0)
    if target is not None and folds is not None and len(frequency) > MANY_CATEGORIES:
        all_labels = sorted(frequency)
        codes = _to_codes(labels, all_labels)
        statistics = target_statistics(codes, len(all_labels), target, weights, folds)
    return CategoricalColumn(
        position,
        name,
        categories,
        has_rare=len(frequency) > len(categories),
        has_missing=has_missing,
        labels=all_labels,
        statistics=statistics,
    )


def _most_frequent(frequency: dict, budget: int, min_weight: float) -> list[str]:
    """Return the most frequent labels, in alphabetical order; ties keep the first ones."""
    by_frequency = sorted(frequency, key=lambda label: (-frequency[label], label))
    return sorted(label for label in by_frequency[:budget] if frequency[label] >= min_weight)


def _is_text(labels: Sequence[str | None]) -> bool:
    """Return whether nearly every row has a different value, or most values have many words."""
    present = [label for label in labels if label is not None]
    distinct = len(set(present))
    if distinct < max(MIN_TEXT_VALUES, len(labels) / 2):
        return False
    words = sum(len(label.split()) for label in present) / len(present)
    return distinct > 0.9 * len(present) or words >= 4


def _apparent_kind(labels: Sequence[str | None]) -> str:
    """Return "dates" or "numbers" if text looks like many of them, else "text"."""
    values = {label for label in labels if label is not None}
    if len(values) < MIN_PARSED_VALUES:
        return "text"  # a few dates or numbers are good categories
    if all(DATE.match(value) for value in values):
        return "dates"
    if all(NUMBER.match(value) for value in values):
        return "numbers"
    return "text"


def _describe_columns(
    table: Table,
    numeric: Sequence[NumericColumn],
    categorical: Sequence[CategoricalColumn],
    texts: Sequence[int],
    *,
    is_auto: bool,
) -> list[str]:
    """Return a sentence for each kind of column that is ignored or read in another way."""
    names_by_note: dict[str, list[str]] = defaultdict(list)
    for column in numeric:
        if column.part:
            continue  # the date itself stands for its parts
        if len(column.edges) == 0:
            names_by_note["without a value, ignored"].append(column.name)
        elif len(column.edges) == 1 and not column.has_missing:
            names_by_note["with one value only, ignored"].append(column.name)
        elif table.kind(column.position) == "date":
            names_by_note[DATE_NOTE].append(column.name)
        elif table.kind(column.position) == "duration":
            names_by_note[DURATION_NOTE].append(column.name)
    for column in categorical:
        if not column.categories and not column.has_rare:
            names_by_note["without a value, ignored"].append(column.name)
        elif not column.used_codes:
            names_by_note["with one value only, ignored"].append(column.name)
        elif is_auto:
            kind = _apparent_kind(table.labels(column.position))
            if kind != "text":
                note = f"of text that looks like {kind}, used as categories ({CONVERSIONS[kind]})"
                names_by_note[note].append(column.name)
    for position in texts:
        kind = _apparent_kind(table.labels(position))
        note = f"with a different text in nearly every row, ignored ({CONVERSIONS[kind]})"
        names_by_note[note].append(table.names[position])
    return [f"Columns {note}: {_join_names(names)}." for note, names in names_by_note.items()]


def _join_names(names: Sequence[str]) -> str:
    text = ", ".join(repr(name) for name in names[:MAX_NAMES])
    if len(names) > MAX_NAMES:
        text += f" and {len(names) - MAX_NAMES} more"
    return text


def target_statistics(
    codes: Tensor, labels: int, target: Tensor, weights: Tensor, folds: Tensor
) -> Tensor:
    """Return the shrunk mean targets of each label and the logarithm of its frequency.

    Args:
        codes: The label of each row; ``labels`` for unseen, ``labels + 1`` for missing ones.
        labels: The number of labels.
        target: ``(row, number)``.
        weights: ``(row,)``.
        folds: ``(row,)``.

    Returns:
        ``(1 + FOLDS, labels + 2, number + 1)``: over all rows, then without each fold.
    """
    target = target.double()
    overall_mean = (weights[:, None] * target).sum(0) / weights.sum()
    statistics = []
    for excluded_fold in (None, *range(FOLDS)):
        mass = weights
        if excluded_fold is not None:
            mass = weights * (folds != excluded_fold)
        frequency = torch.zeros(labels + 2, dtype=torch.float64).index_add_(0, codes, mass)
        sums = torch.zeros(labels + 2, target.shape[1], dtype=torch.float64)
        sums.index_add_(0, codes, mass[:, None] * (target - overall_mean))
        means = sums / (frequency[:, None] + PRIOR_ROWS)
        share = ((frequency + 1) / (mass.sum() + labels)).log10()
        statistics.append(torch.cat([means, share[:, None]], 1))
    return torch.stack(statistics).float()
