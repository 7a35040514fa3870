r"""Uncertainty that is used: decisions from predictions, on rows that training did not see.

**Temperature.** Logits divided by one number, or members' standard deviations multiplied by one,
chosen to minimise the mixture's negative log-likelihood (Guo et al., 2017). One row is added of
which every class is as likely (as Platt, 1999), or the best temperature of a classifier without
errors would be 0; to the rows of a regressor thirty that are exactly as far off as the model says.

**Conformal quantiles.** With scores of :math:`n` rows that played no part in training, and
:math:`Q` the :math:`\lceil (n+1)\,c \rceil`-th smallest of them, the score of a new row is at most
:math:`Q` with a chance of at least :math:`c` (and at most :math:`c + 1/(n+1)` if scores don't tie),
whatever the model, as long as rows are exchangeable (Vovk et al., 2005): over rows and calibration
sets, not for each :math:`x`. From the score :math:`1 - \bar p_y` come sets of classes (Sadinle et
al., 2019), from an uncertainty the flag of what is not like the rest.

**Risk and coverage.** The mean loss of the rows that are kept if the least certain ones are not
answered, by the share that is kept (Geifman and El-Yaniv, 2017).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embens import metrics

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

File = str | os.PathLike[str]
RANGE = (0.05, 20.0)  # temperatures that are tried
ADDED = 30  # rows that are added where a factor of standard deviations is chosen


def best_scale(loss: Callable[[float], Tensor]) -> float:
    """Return the positive number that minimises a loss; 1 if nothing is better by a hair."""
    from scipy.optimize import minimize_scalar

    found = minimize_scalar(
        lambda x: float(loss(math.exp(x))),
        bounds=[math.log(b) for b in RANGE],
        method="bounded",
        options={"xatol": 1e-4},
    )
    return math.exp(found.x) if found.fun < float(loss(1.0)) else 1.0


def best_temperature(outputs: Tensor, target: Tensor) -> float:
    """Return what logits ``(member, row, class)`` should be divided by."""
    outputs, rows = outputs.double(), outputs.shape[1]

    def loss(t: float) -> Tensor:
        log_mean = (outputs / t).log_softmax(-1).logsumexp(0) - math.log(len(outputs))
        return rows * metrics.nll(outputs / t, target) - log_mean.mean()

    return best_scale(loss)


def conformal_quantile(scores: Tensor, coverage: float) -> float:
    """Return what a new row's score is at most, with a chance of at least ``coverage``."""
    if not 0 < coverage < 1:
        raise ValueError(f"coverage: expected a number between 0 and 1; got {coverage}")
    rank = math.ceil((len(scores) + 1) * coverage - 1e-9)
    if rank > len(scores):
        raise ValueError(
            f"coverage={coverage} needs at least {least_rows(coverage)} held-out rows; there are "
            f"{len(scores)}. Ask for less, or hold out more rows (of an estimator: fit with more, "
            "or with a larger validation_fraction)."
        )
    return float(known(scores).sort().values[rank - 1])


def known(scores: Tensor) -> Tensor:
    """Return scores, none of which is NaN: it would be neither large nor small."""
    if scores.isnan().any():
        rows = scores.isnan().nonzero()[:5, 0].tolist()
        raise ValueError(f"the uncertainty, output or target of rows {rows} is NaN; leave them out")
    return scores


def least_rows(coverage: float) -> int:
    """Return how many held-out rows a coverage needs."""
    return math.ceil(coverage / (1 - coverage) - 1e-9)


@contextmanager
def picture(path: File, **labels: Any) -> Iterator[Any]:
    """Draw on the axes that it gives, and write them to a file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5, 3.4), layout="constrained")
    yield (axes := figure.subplots())
    axes.set(**labels)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    figure.savefig(path, dpi=100)


@dataclass(frozen=True)
class RiskCoverage:
    """The mean loss of the rows that are kept (``risk``), by their share (``coverage``)."""

    coverage: Float[Tensor, " batch"]
    risk: Float[Tensor, " batch"]

    @property
    def area(self) -> float:
        """Mean risk over all shares (AURC); the smaller, the better."""
        return float(self.risk.mean())

    def plot(self, path: File) -> None:
        """Draw the curve, and the risk of rows that are kept at random."""
        kept, risk = self.coverage.tolist(), self.risk.tolist()
        labels = {"xlabel": "share of rows that is kept", "ylabel": "mean loss of these"}
        with picture(path, **labels) as axes:
            axes.plot(kept, risk, label=f"least certain left out, area {self.area:.3f}")
            axes.axhline(risk[-1], color="grey", ls="--", label="at random")


def risk_coverage(losses: Float[Tensor, " batch"], scores: Float[Tensor, " batch"]) -> RiskCoverage:
    """Return the risk of keeping the most certain rows; of those that tie, any are kept first."""
    losses, (_, group) = losses.double(), scores.unique(return_inverse=True)
    sums = losses.new_zeros(2, int(group.max()) + 1)  # ties have their mean loss
    sums.index_add_(1, group, torch.stack([losses, torch.ones_like(losses)]))
    kept = torch.arange(1, len(losses) + 1).to(losses)
    expected = (sums[0] / sums[1])[group[scores.argsort()]].cumsum(0) / kept
    return RiskCoverage(kept / len(losses), expected)


@dataclass(frozen=True)
class Flags:
    """Rows that are less certain than held-out ones almost ever are."""

    scores: Float[Tensor, " batch"]  # how uncertain rows are
    held_out: Float[Tensor, " row"]  # and those that are as they should be
    rate: float  # of false alarms, at most

    @property
    def threshold(self) -> float:
        """The uncertainty above which a row is flagged."""
        return conformal_quantile(self.held_out, 1 - self.rate)

    @property
    def flagged(self) -> Bool[Tensor, " batch"]:
        """Which rows are."""
        return self.scores > self.threshold

    def plot(self, path: File) -> None:
        """Draw how uncertain held-out rows and these are, and the threshold."""
        flagged = f"these, {self.flagged.float().mean():.0%} flagged"
        with picture(path, xlabel="uncertainty", ylabel="density") as axes:
            for label, scores in (("held out", self.held_out), (flagged, self.scores)):
                axes.hist(scores.tolist(), bins=30, density=True, alpha=0.5, label=label)
            label = f"{self.rate:.0%} of false alarms"
            axes.axvline(self.threshold, color="k", ls="--", label=label)


@dataclass(frozen=True)
class ConformalSets:
    """Sets of classes that hold the true one with a chance of at least ``coverage``."""

    sets: Bool[Tensor, "batch class"]  # a row may have none, if it is like no other
    coverage: float
    threshold: float  # the probability that a class in a set has at least

    @property
    def sizes(self) -> Tensor:
        """How many classes each row's set has."""
        return self.sets.sum(-1)

    def covered(self, target: Tensor) -> float:
        """Return the share of rows whose class is in their set."""
        if target.shape != self.sets.shape[:1]:
            expected = f"expected a class for each of {len(self.sets)} rows"
            raise ValueError(f"target: {expected}; got shape {tuple(target.shape)}")
        return float(self.sets.gather(1, target[:, None].to(self.sets.device)).double().mean())

    def plot(self, path: File) -> None:
        """Draw how many rows have sets of which size."""
        shares = self.sizes.bincount(minlength=self.sets.shape[1] + 1) / len(self.sets)
        title = f"{self.coverage:.0%} hold the true class"
        labels = {"xlabel": "classes in the set", "ylabel": "share of rows", "title": title}
        with picture(path, **labels) as axes:
            axes.bar(range(len(shares)), shares.tolist())
