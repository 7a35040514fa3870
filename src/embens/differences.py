r"""Results of a comparison: scores, costs, and paired differences with their intervals.

Candidates are compared with the first one, row by row of the test data. Let :math:`d_{si}` be the
difference of a metric at row :math:`i` after the training run with seed :math:`s`, for :math:`S`
seeds and :math:`n` rows. The interval of its mean :math:`\bar d` accounts for both sources of
randomness, test rows and training runs:

.. math::
    \bar d \pm t_\nu \sqrt{V_r + V_s}, \qquad
    V_r = \frac{1}{n} \operatorname{var}_i \bar d_{\cdot i}, \qquad
    V_s = \frac{1}{S} \operatorname{var}_s \bar d_{s \cdot}, \qquad
    \nu = \frac{(V_r + V_s)^2}{V_r^2 / (n - 1) + V_s^2 / (S - 1)} .

With one seed :math:`V_s` is unknown and left out: the interval then holds for these trained
networks, not for another training run.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from embens import checks

if TYPE_CHECKING:
    import pandas

LEVEL = 0.95
"""Probability of the intervals."""
LEAST_NAME_WIDTH = 7  # characters of the first column of a table
COSTS = ("parameters", "training_seconds", "inference_seconds", "epochs", "lr")
DETAILS = ("member_accuracy", "disagreement", "correctness_correlation", "temperature")
"""Scores that the text leaves out."""


@dataclass(frozen=True)
class Difference:
    """Difference of a candidate to the first one in one metric, with its 95 % interval.

    Attributes:
        candidate: Name of the candidate.
        baseline: Name of the first candidate.
        metric: Name of the metric.
        value: Mean over test rows and seeds of the candidate's value minus the baseline's.
        low: Lower end of the interval.
        high: Upper end of the interval.

    Example:
        >>> gain = Difference("batch", "one", "accuracy", 0.25, 0.125, 0.375)
        >>> gain.low > 0
        True
    """

    candidate: str
    baseline: str
    metric: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """The result of :func:`compare`.

    The metrics of a classification are ``accuracy``, ``nll``, ``calibrated_nll`` (after temperature
    scaling) and ``brier``; those of a regression ``squared_error``, and with
    ``criterion=embens.gaussian_nll`` also ``nll`` and ``crps``. Costs are ``parameters``,
    ``training_seconds`` (at the chosen learning rate), ``inference_seconds`` (of the test data) and
    ``epochs``.

    Attributes:
        scores: Quality and cost by candidate, means over seeds. The printed text leaves some out.
        differences: Paired differences to the first candidate.
        seeds: Number of training runs of each candidate.

    Example:
        >>> scores = {"one": {"accuracy": 0.5}, "batch": {"accuracy": 0.75}}
        >>> gain = Difference("batch", "one", "accuracy", 0.25, 0.125, 0.375)
        >>> print(Comparison(scores, [gain], seeds=3))
        quality accuracy
        one          0.5
        batch       0.75
        <BLANKLINE>
        minus one      accuracy
        batch     +0.25 ± 0.12*
        <BLANKLINE>
        ±: 95 % interval over test rows and 3 training runs. *: the interval excludes 0.
        A higher accuracy is better, and lower values of the other metrics.
    """

    scores: dict[str, dict[str, float]]
    differences: list[Difference]
    seeds: int

    def __str__(self) -> str:
        columns = next(iter(self.scores.values()))
        costs = [name for name in columns if name in COSTS]
        quality = [name for name in columns if name not in (*COSTS, *DETAILS)]
        blocks = [self._score_table("quality", quality)]
        if costs:
            blocks.append(self._score_table("cost", costs))
        if self.differences:
            blocks += [self._difference_table(), self._legend()]
        return "\n\n".join(blocks)

    def _score_table(self, heading: str, columns: list[str]) -> str:
        """Return some of the scores as text, with a row per candidate."""
        rows = []
        for name, scores in self.scores.items():
            rows.append([name, *(_number_text(scores[column]) for column in columns)])
        return _text_table([heading, *columns], rows)

    def _difference_table(self) -> str:
        """Return the differences as text, with a row per candidate and a column per metric."""
        metrics = list(dict.fromkeys(difference.metric for difference in self.differences))
        rows: dict[str, list[str]] = {}
        for difference in self.differences:
            cells = rows.setdefault(difference.candidate, [difference.candidate])
            half_width = (difference.high - difference.low) / 2
            is_clear = difference.low > 0 or difference.high < 0
            star = "*" if is_clear else " "
            cells.append(f"{difference.value:+.3g} ± {half_width:.2g}{star}")
        heading = f"minus {self.differences[0].baseline}"
        return _text_table([heading, *metrics], list(rows.values()))

    def _legend(self) -> str:
        """Return what the signs in the table of differences mean."""
        if self.seeds > 1:
            source = f"over test rows and {self.seeds} training runs"
        else:
            source = "over test rows; one training run each, another run may differ more"
        lines = [f"±: 95 % interval {source}. *: the interval excludes 0."]
        if "accuracy" in next(iter(self.scores.values())):
            lines.append("A higher accuracy is better, and lower values of the other metrics.")
        else:
            lines.append("Lower values are better.")
        return "\n".join(lines)

    def to_pandas(self, table: Literal["scores", "differences"] = "scores") -> pandas.DataFrame:
        """Return one of the two tables as a data frame.

        Args:
            table: "scores" (one row per candidate) or "differences" (one row per candidate and
                metric).

        Returns:
            The table; its columns are the metrics and costs, or the fields of
            :class:`Difference`.

        Raises:
            ValueError: If there is no such table.

        Example:
            >>> result = Comparison({"one": {"accuracy": 0.5}}, [], seeds=1)
            >>> result.to_pandas().loc["one", "accuracy"].item()
            0.5
        """
        import pandas

        checks.check_choice("table", table, ("scores", "differences"))
        if table == "scores":
            return pandas.DataFrame.from_dict(self.scores, orient="index")
        return pandas.DataFrame([asdict(difference) for difference in self.differences])


def _number_text(value: float) -> str:
    """Return a score with four digits, and a large number as a whole one."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _text_table(header: list[str], rows: list[list[str]]) -> str:
    """Return aligned text; the first column is left-aligned."""
    lines = [header, *rows]
    widths = []
    for column in range(len(header)):
        widths.append(max(len(line[column]) for line in lines))
    name_width = max(LEAST_NAME_WIDTH, widths[0])
    texts = []
    for line in lines:
        name, *values = line
        cells = [name.ljust(name_width)]
        for value, width in zip(values, widths[1:], strict=True):
            cells.append(value.rjust(width))
        texts.append(" ".join(cells).rstrip())
    return "\n".join(texts)


def paired_differences(row_values: dict[str, dict[str, Tensor]]) -> list[Difference]:
    """Return the differences of all candidates to the first one.

    Args:
        row_values: Values ``(seed, row)`` by candidate and metric.

    Returns:
        One difference for each other candidate and metric.

    Example:
        >>> import torch
        >>> values = {"one": {"accuracy": torch.zeros(1, 4)}, "two": {"accuracy": torch.ones(1, 4)}}
        >>> [(gain.candidate, gain.value) for gain in paired_differences(values)]
        [('two', 1.0)]
    """
    baseline, *candidates = row_values
    differences = []
    for candidate in candidates:
        for metric, values in row_values[candidate].items():
            paired = values - row_values[baseline][metric]
            low, high = paired_interval(paired)
            mean = float(paired.mean())
            differences.append(Difference(candidate, baseline, metric, mean, low, high))
    return differences


def paired_interval(differences: Tensor, level: float = LEVEL) -> tuple[float, float]:
    """Return the confidence interval of a mean difference over rows and training runs.

    Args:
        differences: Differences ``(seed, row)``.
        level: Probability of the interval.

    Returns:
        Its lower and upper end, by the formula of this module.

    Raises:
        ValueError: If there are fewer than two rows.

    Example:
        >>> import torch
        >>> low, high = paired_interval(torch.tensor([[0.0, 1.0, 0.0, 1.0]]))
        >>> round(low, 2), round(high, 2)
        (-0.42, 1.42)
    """
    from scipy import stats

    differences = differences.double()
    seeds, rows = differences.shape
    if rows < 2:
        raise ValueError(f"an interval needs at least two test rows, got {rows}.")
    mean = float(differences.mean())
    row_variance = float(differences.mean(0).var()) / rows
    seed_variance = 0.0
    if seeds > 1:
        seed_variance = float(differences.mean(1).var()) / seeds
    variance = row_variance + seed_variance
    if variance == 0:
        return mean, mean
    denominator = row_variance**2 / (rows - 1)
    if seeds > 1:
        denominator += seed_variance**2 / (seeds - 1)
    degrees_of_freedom = variance**2 / denominator
    factor = float(stats.t.ppf((1 + level) / 2, degrees_of_freedom))
    half_width = factor * math.sqrt(variance)
    return mean - half_width, mean + half_width
