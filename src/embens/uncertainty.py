r"""Decisions based on uncertainty: temperatures, rejection and flags.

All of them are calibrated on held-out rows that were not used in training.

**Temperature scaling** (Guo et al., 2017) divides all logits by one number, the one that minimises
the negative log-likelihood of the mixture of members. As in Platt (1999), the likelihood is
regularised: one row on which all classes are equally likely is added. Without it the optimal
temperature of a classifier without errors would be 0.

**Risk and coverage** (Geifman and El-Yaniv, 2017): the mean loss of the rows that are kept if the
least certain rows are rejected, as a function of the fraction that is kept.

Flags mark rows that are less certain than a conformal quantile of held-out rows
(:mod:`embens.conformal`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from embens import metrics
from embens.conformal import conformal_quantile
from embens.logits import log_mean_probability
from embens.mixtures import best_scale
from embens.pictures import File, picture

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


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
