r"""Decisions based on uncertainty: temperatures, conformal sets, rejection and flags.

All of them are calibrated on held-out rows that were not used in training.

**Temperature scaling** (Guo et al., 2017) divides all logits by one number, the one that minimises
the negative log-likelihood of the mixture of members. As in Platt (1999), the likelihood is
regularised: one row on which all classes are equally likely is added. Without it the optimal
temperature of a classifier without errors would be 0.

**Conformal quantiles** (Vovk et al., 2005). Let :math:`Q` be the :math:`\lceil (n+1)\,c \rceil`-th
smallest of :math:`n` held-out scores. If rows are exchangeable, the score of a new row is at most
:math:`Q` with probability at least :math:`c`, and at most :math:`c + 1/(n+1)` without ties. The
probability is over rows and calibration sets; it does not hold for each :math:`x`. The score
:math:`1 - \bar p_y` gives sets of classes (Sadinle et al., 2019); the distance of a value to a
prediction interval gives intervals (Romano et al., 2019); an uncertainty gives flags for rows that
differ from the held-out rows.

**Risk and coverage** (Geifman and El-Yaniv, 2017): the mean loss of the rows that are kept if the
least certain rows are rejected, as a function of the fraction that is kept.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embens import metrics
from embens.files import check_output, write_atomically
from embens.logits import log_mean_probability
from embens.mixtures import best_scale

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

File = str | os.PathLike[str]


def best_temperature(outputs: Tensor, target: Tensor) -> float:
    """Return the temperature that minimises the regularised negative log-likelihood.

    Args:
        outputs: Logits ``(member, batch, class)`` of held-out rows.
        target: Class indices ``(batch,)``.

    Returns:
        The number by which logits should be divided.

    Example:
        >>> outputs = 4.0 * torch.eye(2).repeat(1, 50, 1)  # confident, and wrong on one row in ten
        >>> target = torch.tensor([0, 1] * 50)
        >>> target[:10] = 1 - target[:10]
        >>> best_temperature(outputs, target) > 1
        True
    """
    outputs = outputs.double()
    rows = outputs.shape[1]

    def loss(temperature: float) -> Tensor:
        scaled = outputs / temperature
        # The mean over rows and classes is the loss of one row with uniform class probabilities.
        return rows * metrics.nll(scaled, target) - log_mean_probability(scaled).mean()

    return best_scale(loss)


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


@contextmanager
def picture(path: File, **labels: Any) -> Iterator[Any]:
    """Create axes to draw on, and save the figure at the end.

    Args:
        path: File to write.
        **labels: Properties of the axes, such as ``xlabel`` and ``title``.

    Yields:
        The axes of matplotlib.

    Raises:
        OSError: If no file can be written there, for example because it is a folder.
    """
    from matplotlib.figure import Figure

    path = Path(path)
    if not path.suffix:
        path = path.with_name(f"{path.name}.png")
    check_output(path)
    figure = Figure(figsize=(4.5, 3.4), layout="constrained")
    axes = figure.subplots()
    yield axes
    axes.set(**labels)
    handles, _ = axes.get_legend_handles_labels()
    if handles and axes.get_legend() is None:
        axes.legend()
    content = io.BytesIO()
    figure.savefig(content, dpi=100, format=path.suffix[1:])
    write_atomically(path, content.getvalue())


@dataclass(frozen=True)
class RiskCoverage:
    """Risk-coverage curve.

    Attributes:
        coverage: Fraction of rows that is kept ``(batch,)``, increasing to 1.
        risk: Mean loss of the kept rows ``(batch,)``.

    Example:
        >>> curve = risk_coverage(torch.tensor([0.0, 1.0]), torch.tensor([0.1, 0.7]))
        >>> curve.coverage.tolist(), curve.area
        ([0.5, 1.0], 0.25)
    """

    coverage: Float[Tensor, " batch"]
    risk: Float[Tensor, " batch"]

    @property
    def area(self) -> float:
        """Area under the curve (AURC); lower is better."""
        return float(self.risk.mean())

    def plot(self, path: File) -> None:
        """Plot the curve and, for comparison, the risk of random rejection.

        Args:
            path: File to write.

        Example:
            >>> import os, tempfile
            >>> path = os.path.join(tempfile.mkdtemp(), "curve.png")
            >>> risk_coverage(torch.tensor([0.0, 1.0]), torch.tensor([0.1, 0.7])).plot(path)
            >>> os.path.getsize(path) > 0
            True
        """
        coverage, risk = self.coverage.tolist(), self.risk.tolist()
        with picture(path, xlabel="fraction of rows kept", ylabel="mean loss") as axes:
            axes.plot(coverage, risk, label=f"least certain rejected, area {self.area:.3f}")
            axes.axhline(risk[-1], color="grey", ls="--", label="random rejection")


def risk_coverage(losses: Float[Tensor, " batch"], scores: Float[Tensor, " batch"]) -> RiskCoverage:
    """Return the mean loss of the most certain rows, for every number of rows.

    Args:
        losses: Loss of each row ``(batch,)``.
        scores: Uncertainty of each row ``(batch,)``; rows that tie are kept in random order, and
            the result is the expectation.

    Returns:
        The curve.

    Example:
        >>> risk_coverage(torch.tensor([0.0, 1.0]), torch.tensor([0.1, 0.7])).risk.tolist()
        [0.0, 0.5]
    """
    losses = losses.double()
    # In the expectation over random orders, each row of a tie has the mean loss of the tie.
    _, group = scores.unique(return_inverse=True)
    groups = int(group.max()) + 1
    loss_sums = losses.new_zeros(groups).index_add_(0, group, losses)
    counts = losses.new_zeros(groups).index_add_(0, group, torch.ones_like(losses))
    mean_losses = (loss_sums / counts)[group]
    kept_rows = torch.arange(1, len(losses) + 1).to(losses)
    risk = mean_losses[scores.argsort()].cumsum(0) / kept_rows
    return RiskCoverage(kept_rows / len(losses), risk)


@dataclass(frozen=True)
class Flags:
    """Rows that are less certain than held-out rows.

    Attributes:
        scores: Uncertainty of the rows ``(batch,)``.
        held_out: Uncertainty of held-out rows ``(row,)``.
        rate: Largest rate of false alarms.

    Example:
        >>> flags = Flags(torch.tensor([0.1, 5.0]), held_out=torch.linspace(0, 1, 19), rate=0.1)
        >>> flags.flagged
        tensor([False,  True])
    """

    scores: Float[Tensor, " batch"]
    held_out: Float[Tensor, " row"]
    rate: float

    @property
    def threshold(self) -> float:
        """Uncertainty above which a row is flagged."""
        return conformal_quantile(self.held_out, 1 - self.rate)

    @property
    def flagged(self) -> Bool[Tensor, " batch"]:
        """Boolean mask of the flagged rows."""
        return self.scores > self.threshold

    def plot(self, path: File) -> None:
        """Plot histograms of the uncertainty of both sets of rows, and the threshold.

        Args:
            path: File to write.

        Example:
            >>> import os, tempfile
            >>> path = os.path.join(tempfile.mkdtemp(), "flags.png")
            >>> Flags(torch.tensor([0.1, 5.0]), torch.linspace(0, 1, 19), rate=0.1).plot(path)
            >>> os.path.getsize(path) > 0
            True
        """
        new_label = f"new rows, {self.flagged.float().mean():.0%} flagged"
        threshold_label = f"{self.rate:.0%} false alarms"
        with picture(path, xlabel="uncertainty", ylabel="density") as axes:
            axes.hist(self.held_out.tolist(), bins=30, density=True, alpha=0.5, label="held out")
            axes.hist(self.scores.tolist(), bins=30, density=True, alpha=0.5, label=new_label)
            axes.axvline(self.threshold, color="k", ls="--", label=threshold_label)


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


def plot_reliability(diagrams: dict[str, metrics.Reliability], path: File) -> None:
    """Plot accuracy against confidence, with the number of samples at each confidence as bars.

    Args:
        diagrams: Reliability diagrams by their labels; all have bins of the same width.
        path: File to write.
    """
    labels = {"xlabel": "confidence", "ylabel": "accuracy", "xlim": (0, 1), "ylim": (0, 1)}
    with picture(path, **labels) as axes:
        count_axes = axes.twinx()
        count_axes.set_ylabel("samples in a bin (bars)")
        # Curves are drawn above the bars.
        axes.set_zorder(count_axes.get_zorder() + 1)
        axes.patch.set_visible(False)
        axes.plot([0, 1], [0, 1], "k:")
        largest_bin = 1.0
        for position, (label, diagram) in enumerate(diagrams.items()):
            confidence, accuracy = diagram.confidence.tolist(), diagram.accuracy.tolist()
            axes.errorbar(
                confidence,
                accuracy,
                _standard_error(diagram).tolist(),
                label=label,
                fmt="o-",
                color=f"C{position}",
                capsize=2,
                elinewidth=0.8,
            )
            bins = len(confidence)
            width = 0.9 / bins / len(diagrams)  # a tenth of each bin separates it from the next
            left_edges = [k / bins + 0.05 / bins + width * position for k in range(bins)]
            bars = {"align": "edge", "color": f"C{position}", "alpha": 0.25}
            count_axes.bar(left_edges, diagram.samples.tolist(), width, **bars)
            largest_bin = max(largest_bin, float(diagram.samples.max()))
        # Bars stay in the lower half, below most of the curves.
        count_axes.set_ylim(0, 2 * largest_bin)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False)


def _standard_error(diagram: metrics.Reliability) -> Tensor:
    """Return the standard error of the accuracy in each bin.

    One more hit and one more miss are counted, so that bins with few samples have an error.
    """
    rate = (diagram.accuracy * diagram.samples + 1) / (diagram.samples + 2)
    return (rate * (1 - rate) / (diagram.samples + 2)).sqrt()
