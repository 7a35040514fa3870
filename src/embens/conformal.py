r"""Conformal prediction: sets of classes and intervals with a guaranteed coverage.

Let :math:`Q` be the :math:`\lceil (n+1)\,c \rceil`-th smallest of :math:`n` held-out scores (Vovk
et al., 2005). If rows are exchangeable, the score of a new row is at most :math:`Q` with
probability at least :math:`c`, and at most :math:`c + 1/(n+1)` without ties. The probability is
over rows and calibration sets; it does not hold for each :math:`x`. The score
:math:`1 - \bar p_y` gives sets of classes (Sadinle et al., 2019); the distance of a value to a
prediction interval gives intervals (Romano et al., 2019).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from embens.pictures import File, picture

if TYPE_CHECKING:
    from jaxtyping import Bool


def conformal_quantile(scores: Tensor, coverage: float) -> float:
    """Return a bound for the score of a new row that holds with probability ``coverage``.

    Args:
        scores: Scores of held-out rows ``(row,)``.
        coverage: The probability, between 0 and 1.

    Returns:
        The conformal quantile of the scores.

    Raises:
        ValueError: If there are too few rows for this coverage, or a score is NaN.

    Example:
        >>> conformal_quantile(torch.arange(1.0, 100.0), coverage=0.9)  # of 1, …, 99
        90.0
    """
    if not 0 < coverage < 1:
        raise ValueError(f"coverage must be a number between 0 and 1, got {coverage}.")
    # The tolerance keeps a rounded product such as 0.9 * 10 from reaching the next integer.
    rank = math.ceil((len(scores) + 1) * coverage - 1e-9)
    if rank > len(scores):
        raise ValueError(
            f"coverage={coverage} needs at least {least_rows(coverage)} held-out rows, got "
            f"{len(scores)}. Use a smaller coverage, or hold out more rows (for an estimator: fit "
            "with more rows or a larger validation_fraction)."
        )
    return float(check_scores(scores).sort().values[rank - 1])


def least_rows(coverage: float) -> int:
    """Return the number of held-out rows that a coverage needs.

    Args:
        coverage: The probability, between 0 and 1.

    Returns:
        The smallest number of rows for :func:`conformal_quantile`.

    Example:
        >>> least_rows(0.95)
        19
    """
    return math.ceil(coverage / (1 - coverage) - 1e-9)


def check_scores(scores: Tensor) -> Tensor:
    """Check that no score is NaN, since NaN cannot be ordered.

    Args:
        scores: Scores ``(row,)``.

    Returns:
        The scores.

    Raises:
        ValueError: If a score is NaN.
    """
    is_nan = scores.isnan()
    if is_nan.any():
        rows = is_nan.nonzero()[:5, 0].tolist()
        raise ValueError(
            f"scores must not be NaN, got NaN in rows {rows}. Remove rows whose output or target "
            "is NaN."
        )
    return scores


@dataclass(frozen=True)
class ConformalSets:
    """Sets of classes that contain the true class with a given probability.

    Attributes:
        sets: Membership of classes in the sets ``(batch, class)``; a set may be empty.
        coverage: The probability that a set contains the true class.
        threshold: Smallest probability of a class in a set.

    Example:
        >>> sets = ConformalSets(torch.tensor([[True, False], [True, True]]), 0.9, 0.3)
        >>> sets.sizes.tolist(), sets.covered(torch.tensor([1, 1]))
        ([1, 2], 0.5)
    """

    sets: Bool[Tensor, "batch class"]
    coverage: float
    threshold: float

    @property
    def sizes(self) -> Tensor:
        """Number of classes in each set ``(batch,)``."""
        return self.sets.sum(-1)

    def covered(self, target: Tensor) -> float:
        """Return the fraction of sets that contain the true class.

        Args:
            target: Class indices ``(batch,)``.

        Returns:
            The fraction, from 0 to 1.
        """
        target = torch.as_tensor(target)
        if target.shape != self.sets.shape[:1]:
            raise ValueError(
                f"target must contain one class per row, shape ({len(self.sets)},), got shape "
                f"{tuple(target.shape)}."
            )
        contains = self.sets.gather(1, target[:, None].to(self.sets.device))
        return float(contains.double().mean())

    def plot(self, path: File) -> None:
        """Plot the distribution of the set sizes.

        Args:
            path: File to write.

        Example:
            >>> import os, tempfile
            >>> path = os.path.join(tempfile.mkdtemp(), "sizes.png")
            >>> ConformalSets(torch.tensor([[True, False], [True, True]]), 0.9, 0.3).plot(path)
            >>> os.path.getsize(path) > 0
            True
        """
        classes = self.sets.shape[1]
        shares = self.sizes.bincount(minlength=classes + 1) / len(self.sets)
        title = f"Sets for a coverage of {self.coverage:.0%}"
        labels = {"xlabel": "classes in the set", "ylabel": "fraction of rows", "title": title}
        with picture(path, **labels) as axes:
            axes.bar(range(len(shares)), shares.tolist())


def conformal_sets(
    probabilities: Tensor, held_out: Tensor, target: Tensor, coverage: float
) -> ConformalSets:
    """Return the classes that are at least as probable as the conformal threshold.

    Args:
        probabilities: Class probabilities ``(batch, class)``.
        held_out: Class probabilities of held-out rows ``(row, class)``.
        target: Classes of the held-out rows ``(row,)``.
        coverage: The probability that a set contains the true class.

    Returns:
        The sets.

    Example:
        >>> held_out = torch.tensor([0.9, 0.1]).expand(20, 2)
        >>> target = torch.zeros(20, dtype=torch.int64)
        >>> conformal_sets(torch.tensor([[1.0, 0.0]]), held_out, target, coverage=0.9).sets
        tensor([[ True, False]])
    """
    true_class = held_out.gather(1, target[:, None]).squeeze(1)
    # −p orders rows as 1 − p does, without rounding.
    threshold = -conformal_quantile(-true_class, coverage)
    return ConformalSets(probabilities >= threshold, coverage, threshold)


@dataclass(frozen=True)
class ConformalIntervals:
    """Intervals that contain the true value with a given probability.

    Attributes:
        low: Lower ends, with the shape of the mean prediction.
        high: Upper ends; below ``low`` where the interval is empty.
        coverage: The probability that an interval contains the true value.
        margin: The number by which both sides of the prediction interval were widened.

    Example:
        >>> intervals = ConformalIntervals(-torch.ones(2), torch.ones(2), 0.9, margin=0.5)
        >>> intervals.covered(torch.tensor([0.0, 3.0]))
        0.5
    """

    low: Tensor
    high: Tensor
    coverage: float
    margin: float

    def covered(self, target: Tensor) -> float:
        """Return the fraction of values inside their intervals.

        Args:
            target: Values with the shape of ``low``, apart from axes of length 1.

        Returns:
            The fraction, from 0 to 1.
        """
        target = torch.as_tensor(target)
        if target.numel() != self.low.numel():
            raise ValueError(
                f"target must have the shape of the intervals, {tuple(self.low.shape)}, got "
                f"{tuple(target.shape)}."
            )
        target = target.reshape(self.low.shape).to(self.low.device)
        is_inside = (self.low <= target) & (target <= self.high)
        return float(is_inside.double().mean())


def conformal_intervals(
    interval: tuple[Tensor, Tensor],
    held_out: tuple[Tensor, Tensor],
    target: Tensor,
    coverage: float,
) -> ConformalIntervals:
    """Widen or narrow prediction intervals by one margin, so that they have the coverage.

    Args:
        interval: Lower and upper ends ``(batch, …)``.
        held_out: Lower and upper ends for held-out rows ``(row, …)``.
        target: Values of the held-out rows.
        coverage: The probability that an interval contains the true value.

    Returns:
        The intervals, with the shape of ``interval``.

    Example:
        >>> zeros = torch.zeros(19)
        >>> conformal_intervals(
        ...     (zeros, zeros), (zeros, zeros), torch.arange(-9.0, 10.0), 0.5
        ... ).margin
        5.0
    """
    low, high = held_out
    values = torch.as_tensor(target).to(low)
    if values.numel() != low.numel():
        raise ValueError(
            f"target must have {low.numel()} values, one for each held-out row, got shape "
            f"{tuple(values.shape)}."
        )
    values = values.reshape(low.shape)
    # The distance to the interval; negative inside.
    scores = torch.maximum(low - values, values - high)
    margin = conformal_quantile(scores.flatten(), coverage)
    low, high = interval
    return ConformalIntervals(low - margin, high + margin, coverage, margin)
