r"""One mode of training: linear dynamics where the kernel of the train data is diagonal.

A residual :math:`r_0` on the train data has by time :math:`t` moved the outputs by :math:`-A(t)\,
r_0` with :math:`A(t) = K(X_*, X)\, Q\, g(\Lambda, t)\, Q^\top`, :math:`K(X, X) = Q \Lambda Q^\top`,
where :math:`g` says how far training has come along each eigenvalue: with a loss that is a mean
over :math:`B` samples,

.. math::
    g(\lambda, t) = \frac{1 - e^{-\lambda t / B}}{\lambda}, \qquad
    g(\lambda, n) = \frac{1 - (1 - \eta \lambda / B)^n}{\lambda}

for gradient flow, and for ``n`` steps of gradient descent at a ``rate`` :math:`\eta`.

*Null directions.* Eigenvalues within ``Mode.cutoff`` are 0: what rounding leaves of them,
:math:`n \epsilon \lambda_{\max}`, or ten times the most negative one, which shows how far the
kernel is off. There :math:`g` is its limit, which grows with time; at infinite time they stay as
they were, that is, the inverse is the pseudo-inverse.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float

INDEFINITE = 1e-6
"""A kernel whose least eigenvalue is below minus this times the largest is no kernel."""


@dataclass(frozen=True)
class Mode:
    """Training and prior of one mode, in the eigenbasis of its kernel on the train data."""

    eigenvalues: Float[Tensor, " n"]  # with jitter, null directions set to 0
    basis: Float[Tensor, "n n"]  # the eigenvectors, in columns
    carry: Float[Tensor, "test n"]  # kernel between test data and eigenvectors
    prior_train: Float[Tensor, "n n"]  # covariance at initialisation between eigenvectors
    prior_carry: Float[Tensor, "test n"]  # between test data and eigenvectors
    prior_test: Float[Tensor, "test test"] | None  # between test data, where it was given
    cutoff: float  # what counts as 0
    least: float  # the smallest eigenvalue as it was found
    rate: float | None  # of gradient descent; None: gradient flow

    @classmethod
    def solve(
        cls,
        ntk: tuple[Tensor, Tensor],
        nngp: tuple[Tensor, Tensor, Tensor | None],
        jitter: float,
        rate: float | None = None,
    ) -> Mode:
        """Diagonalise a mode, given its kernels (train with train, test with train, test)."""
        train, carry = ntk
        found, basis = torch.linalg.eigh((train + train.mT) / 2)
        found = found + jitter
        largest, least = found[-1].abs().item(), found[0].item()
        cutoff = len(found) * torch.finfo(found.dtype).eps * largest
        if -INDEFINITE * largest <= least < 0:
            cutoff = max(cutoff, -10 * least)
        null = found.abs() <= cutoff
        carry = carry @ basis
        # Nothing reaches a null direction of a kernel; rounding grows with the test data.
        reach = carry.norm(dim=1).max().item() if len(carry) else 0.0
        slack = cutoff * max(1.0, reach / largest if largest > 0 else 1.0)
        lost = null & (carry.abs().amax(0) <= slack if len(carry) else null)
        return cls(
            eigenvalues=torch.where(null, 0.0, found),
            basis=basis,
            carry=torch.where(lost, 0.0, carry),
            prior_train=basis.mT @ nngp[0] @ basis,
            prior_carry=nngp[1] @ basis,
            prior_test=nngp[2],
            cutoff=cutoff,
            least=least,
            rate=rate,
        )

    @property
    def rank(self) -> int:
        return int((self.eigenvalues != 0).sum())

    @property
    def indefinite(self) -> bool:
        """Whether the kernel is none: some eigenvalue is clearly negative."""
        return self.least < -INDEFINITE * self.eigenvalues.abs().max().item()

    @property
    def largest_stable_rate(self) -> float:
        largest = self.eigenvalues.max().item()
        return 2 * len(self.basis) / largest if largest > 0 else math.inf

    @property
    def converges(self) -> bool:
        stable = self.rate is None or self.rate < self.largest_stable_rate
        return stable and bool((self.eigenvalues >= 0).all())

    def gain(self, t: float) -> Float[Tensor, " n"]:
        """Return how far training has come along each eigenvalue."""
        null, samples = self.eigenvalues == 0, len(self.basis)
        safe = torch.where(null, 1.0, self.eigenvalues)
        if math.isinf(t):
            return torch.where(null, 0.0, 1 / safe)
        if self.rate is None:
            return torch.where(null, t / samples, -torch.expm1(-safe * t / samples) / safe)
        step = self.rate * safe / samples
        small = step.abs() < 0.5
        done = -torch.expm1(t * torch.log1p(-torch.where(small, step, 0.0)))
        done = torch.where(small, done, 1 - (1 - step) ** t)
        return torch.where(null, t * self.rate / samples, done / safe)

    def respond(self, gain: Tensor, residual: Float[Tensor, "*member n k"]) -> Tensor:
        """Return :math:`A r_0`, by which test outputs have moved."""
        return self.carry * gain @ (self.basis.mT @ residual)

    def covariance(self, gain: Float[Tensor, " n"]) -> Float[Tensor, "test test"]:
        r"""Return :math:`V = S^{**} - A S^{X*} - S^{*X} A^\top + A S^{XX} A^\top`, S: the prior."""
        assert self.prior_test is not None
        response = self.carry * gain
        mixed = response @ self.prior_carry.mT
        return self.prior_test - mixed - mixed.mT + response @ self.prior_train @ response.mT

    def variance(self, gain: Float[Tensor, " n"]) -> Float[Tensor, " test"]:
        """Return the diagonal of the covariance; what rounding makes negative is 0."""
        assert self.prior_test is not None
        response = self.carry * gain
        moved = (response @ self.prior_train - 2 * self.prior_carry) * response
        return (self.prior_test.diagonal() + moved.sum(-1)).clamp(min=0)
