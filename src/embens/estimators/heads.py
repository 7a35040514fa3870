r"""Heads: what the outputs of a network on a table mean, and how well they do.

A head turns targets into a tensor, is the criterion of :func:`embens.fit` for one member, and the
metric for the ensemble: the negative logarithm of the *mixture* of its members,

.. math::
    -\frac1n \sum_i \log \frac1M \sum_a p_a(y_i \mid x_i),

for which, unlike for the mean of the members' own losses, disagreement counts. Weights of rows, if
there are any, ride in the last column of the target and have mean 1.

Not here: what is done with outputs at prediction (:mod:`embens.estimators.mixture`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

LOG_VARIANCES = (-10.0, 10.0)
"""Bounds of a member's log-variance, of a target of variance 1."""


@dataclass(frozen=True)
class Classes:
    """Logits of one or several labels, one after another.

    Args:
        sizes: how many classes each label has.
        weighted: whether the target has a column of weights.
    """

    sizes: tuple[int, ...]
    weighted: bool = False

    @property
    def outputs(self) -> int:
        """How many outputs the network needs."""
        return sum(self.sizes)

    @property
    def simple(self) -> bool:
        """Whether the target is a vector of classes."""
        return len(self.sizes) == 1 and not self.weighted

    def pack(self, codes: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the target of classes ``(row, label)``."""
        if self.simple:
            return codes[:, 0]
        columns = codes.to(dtype)
        return columns if weights is None else torch.cat([columns, weights[:, None].to(dtype)], 1)

    def criterion(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the losses by row, of one member or of all at once."""
        if self.simple:
            rows = outputs.shape[:-1]
            flat, wanted = outputs.reshape(-1, self.outputs), target.expand(rows).reshape(-1)
            return F.cross_entropy(flat, wanted, reduction="none").view(rows)
        losses = -torch.stack(self.right(outputs, target)).sum(0)
        return losses * target[..., -1] if self.weighted else losses

    criterion.over_members = True  # type: ignore[attr-defined]

    def right(self, outputs: Tensor, target: Tensor) -> list[Tensor]:
        """Return the log-probabilities of the right classes, ``(…, row)`` for each label."""
        if self.simple:
            target = target[:, None]
        found = []
        for k, logits in enumerate(outputs.split(self.sizes, dim=-1)):
            index = target[:, k].long()
            index = index.expand(logits.shape[:-1]).unsqueeze(-1)
            found.append(logits.log_softmax(-1).gather(-1, index).squeeze(-1))
        return found

    def metric(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the mixture's negative log-probability; outputs ``(member, row, output)``."""
        losses = -torch.stack([_log_mean(r) for r in self.right(outputs, target)]).sum(0)
        if self.weighted:
            return (losses * target[:, -1]).sum() / target[:, -1].sum()
        return losses.mean()

    def any_class(self, outputs: Tensor) -> Tensor:
        """Return what :meth:`metric` would be if every class were as likely as the others."""
        labels = outputs.split(self.sizes, dim=-1)
        return -torch.stack([_log_mean(x.log_softmax(-1)).mean() for x in labels]).sum()


@dataclass(frozen=True)
class Gaussians:
    """Means, then log-variances, of standardised targets.

    Args:
        targets: how many.
        weighted: whether the target has a column of weights.
    """

    targets: int
    weighted: bool = False

    @property
    def outputs(self) -> int:
        """How many outputs the network needs."""
        return 2 * self.targets

    def pack(self, values: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the target of standardised values ``(row, target)``."""
        columns = values.to(dtype)
        return columns if weights is None else torch.cat([columns, weights[:, None].to(dtype)], 1)

    def log_densities(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the members' log-densities ``(…, row, target)``."""
        mean, logarithm = outputs.split(self.targets, dim=-1)
        logarithm = logarithm.clamp(*LOG_VARIANCES)
        deviation = target[..., : self.targets] - mean
        return -0.5 * (math.log(2 * math.pi) + logarithm + deviation**2 * (-logarithm).exp())

    def criterion(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the losses by row, of one member or of all at once."""
        mean, logarithm = outputs.chunk(2, dim=-1)
        logarithm = logarithm.clamp(*LOG_VARIANCES)
        values = target[..., : self.targets] if self.weighted else target
        double = torch.addcmul(logarithm, (values - mean).square(), (-logarithm).exp()).sum(-1)
        losses = torch.add(0.5 * math.log(2 * math.pi) * self.targets, double, alpha=0.5)
        return losses * target[..., -1] if self.weighted else losses

    criterion.over_members = True  # type: ignore[attr-defined]

    def metric(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the mixture's negative log-density; outputs ``(member, row, output)``."""
        losses = -_log_mean(self.log_densities(outputs, target)).sum(-1)
        if self.weighted:
            return (losses * target[:, -1]).sum() / target[:, -1].sum()
        return losses.mean()


def _log_mean(logarithms: Tensor) -> Tensor:
    """Return the logarithm of the mean over members."""
    return logarithms.logsumexp(0) - math.log(len(logarithms))
