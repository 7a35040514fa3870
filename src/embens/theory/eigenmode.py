r"""One mode of training: linear dynamics in the eigenbasis of the kernel on the train data.

By time :math:`t` a residual :math:`r_0` on the train data has moved the outputs by :math:`-A(t)\,
r_0` with :math:`A(t) = K(X_*, X)\, Q\, g(\Lambda, t)\, Q^\top` and :math:`K(X, X) = Q \Lambda
Q^\top`. With a loss that is a mean over :math:`B` samples,

.. math::
    g(\lambda, t) = \frac{1 - e^{-\lambda t / B}}{\lambda}, \qquad
    g(\lambda, n) = \frac{1 - (1 - \eta \lambda / B)^n}{\lambda}

for gradient flow and for :math:`n` steps of gradient descent with rate :math:`\eta`.

*Null directions.* Eigenvalues within ``cutoff`` count as 0. The cut-off is the rounding error
:math:`n \epsilon \lambda_{\max}`, or ten times the most negative eigenvalue, which shows how
inaccurate the kernel is. In null directions :math:`g` is its limit, which grows with time. At
infinite time they keep their initial values, so that the inverse is the pseudo-inverse.
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
"""Relative size of a negative eigenvalue beyond which a matrix is not a kernel."""


@dataclass(frozen=True)
class Mode:
    """Training and prior of one mode, in the eigenbasis of its kernel on the train data.

    Attributes:
        eigenvalues: Eigenvalues with jitter; those of null directions are 0.
        basis: Eigenvectors, in columns.
        test_train: Kernel of the test data with the eigenvectors.
        prior_train: Covariance at initialisation between eigenvectors.
        prior_test_train: Covariance at initialisation of the test data with the eigenvectors.
        prior_test: Covariance at initialisation of the test data, if it was given.
        cutoff: Size up to which eigenvalues count as 0.
        least: Smallest eigenvalue before the cut-off.
        rate: Rate of gradient descent; None means gradient flow.
    """

    eigenvalues: Float[Tensor, " n"]
    basis: Float[Tensor, "n n"]
    test_train: Float[Tensor, "test n"]
    prior_train: Float[Tensor, "n n"]
    prior_test_train: Float[Tensor, "test n"]
    prior_test: Float[Tensor, "test test"] | None
    cutoff: float
    least: float
    rate: float | None

    @classmethod
    def solve(
        cls,
        ntk: tuple[Tensor, Tensor],
        nngp: tuple[Tensor, Tensor, Tensor | None],
        jitter: float,
        rate: float | None = None,
    ) -> Mode:
        """Diagonalise a mode.

        Args:
            ntk: Tangent kernels of train with train and of test with train data.
            nngp: Prior covariances of train with train, test with train and test with test data.
            jitter: Number to add to the eigenvalues.
            rate: Rate of gradient descent; None means gradient flow.
        """
        train, test_train = ntk
        eigenvalues, basis = torch.linalg.eigh((train + train.mT) / 2)
        eigenvalues = eigenvalues + jitter
        largest = eigenvalues[-1].abs().item()
        least = eigenvalues[0].item()
        cutoff = len(eigenvalues) * torch.finfo(eigenvalues.dtype).eps * largest
        if -INDEFINITE * largest <= least < 0:
            cutoff = max(cutoff, -10 * least)
        null = eigenvalues.abs() <= cutoff
        test_train = _without_null_directions(test_train @ basis, null, cutoff, largest)
        return cls(
            eigenvalues=torch.where(null, 0.0, eigenvalues),
            basis=basis,
            test_train=test_train,
            prior_train=basis.mT @ nngp[0] @ basis,
            prior_test_train=nngp[1] @ basis,
            prior_test=nngp[2],
            cutoff=cutoff,
            least=least,
            rate=rate,
        )

    @property
    def rank(self) -> int:
        """Number of eigenvalues that are not 0."""
        return int((self.eigenvalues != 0).sum())

    @property
    def indefinite(self) -> bool:
        """True if an eigenvalue is clearly negative, so that the matrix is not a kernel."""
        return self.least < -INDEFINITE * self.eigenvalues.abs().max().item()

    @property
    def largest_stable_rate(self) -> float:
        r"""Rate :math:`2B / \lambda_{\max}` below which gradient descent converges."""
        largest = self.eigenvalues.max().item()
        if largest <= 0:
            return math.inf
        return 2 * len(self.basis) / largest

    @property
    def converges(self) -> bool:
        """True if outputs have a limit at infinite time."""
        stable = self.rate is None or self.rate < self.largest_stable_rate
        return stable and bool((self.eigenvalues >= 0).all())

    def gain(self, t: float) -> Float[Tensor, " n"]:
        r"""Return :math:`g(\lambda, t)` for each eigenvalue.

        Args:
            t: Time or number of steps, which may be infinite.
        """
        null = self.eigenvalues == 0
        samples = len(self.basis)
        eigenvalues = torch.where(null, 1.0, self.eigenvalues)
        if math.isinf(t):
            return torch.where(null, 0.0, 1 / eigenvalues)
        if self.rate is None:
            progress = -torch.expm1(-eigenvalues * t / samples)
            return torch.where(null, t / samples, progress / eigenvalues)
        step = self.rate * eigenvalues / samples
        # For small steps 1 - (1 - step)^t would cancel.
        small = step.abs() < 0.5
        progress = -torch.expm1(t * torch.log1p(-torch.where(small, step, 0.0)))
        progress = torch.where(small, progress, 1 - (1 - step) ** t)
        return torch.where(null, t * self.rate / samples, progress / eigenvalues)

    def respond(self, gain: Tensor, residual: Float[Tensor, "*member n k"]) -> Tensor:
        """Return :math:`A r_0`, the amount by which test outputs have moved.

        Args:
            gain: Result of :meth:`gain`, ``(n,)``.
            residual: Residuals on the train data, ``(…, n, k)``.

        Returns:
            A tensor ``(…, test, k)``.
        """
        return self.test_train * gain @ (self.basis.mT @ residual)

    def covariance(self, gain: Float[Tensor, " n"]) -> Float[Tensor, "test test"]:
        r"""Return :math:`V = S^{**} - A S^{X*} - S^{*X} A^\top + A S^{XX} A^\top`, S: the prior.

        Args:
            gain: Result of :meth:`gain`, ``(n,)``.
        """
        assert self.prior_test is not None
        response = self.test_train * gain
        mixed = response @ self.prior_test_train.mT
        return self.prior_test - mixed - mixed.mT + response @ self.prior_train @ response.mT

    def variance(self, gain: Float[Tensor, " n"]) -> Float[Tensor, " test"]:
        """Return the diagonal of the covariance; rounding never makes it negative.

        Args:
            gain: Result of :meth:`gain`, ``(n,)``.
        """
        assert self.prior_test is not None
        response = self.test_train * gain
        change = (response @ self.prior_train - 2 * self.prior_test_train) * response
        return (self.prior_test.diagonal() + change.sum(-1)).clamp(min=0)


def _without_null_directions(
    test_train: Tensor, null: Tensor, cutoff: float, largest: float
) -> Tensor:
    """Set the kernel of test data with null directions to 0, up to rounding.

    An exact kernel has zeros there. Rounding grows with the kernel of the test data.
    """
    if not len(test_train):
        return test_train
    reach = test_train.norm(dim=1).max().item()
    relative_reach = reach / largest if largest > 0 else 1.0
    rounding = cutoff * max(1.0, relative_reach)
    unreached = null & (test_train.abs().amax(0) <= rounding)
    return torch.where(unreached, 0.0, test_train)
