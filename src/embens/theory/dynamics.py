r"""Training in the limit on the squared loss, in closed form for any time.

With the loss :math:`\frac1B \sum_x \frac12 (f_a(x) - y(x))^2` of each member, the ensemble mean
follows :math:`K_m = \Theta_{aa} + (M-1) \Theta_{ab}` towards the targets, and deviations from it
follow :math:`K_d = \Theta_{aa} - \Theta_{ab}` towards 0. With :math:`A, V` of each
:class:`~embens.theory.eigenmode.Mode`,

.. math::
    E f_a = A_m y, \qquad \mathrm{Cov}(f_a, f_b) = V_m + (\delta_{ab} - \tfrac1M) V_d .

Time is in units of the rate: :math:`t = 1` is :math:`1/\eta` steps at a small rate :math:`\eta`.
Expectations are over initialisations. To get train outputs, pass the train data as test data.
Several outputs share one kernel and are independent; variances hold for each of them. For other
losses see :mod:`embens.theory.classification`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from embens.checks import check_number, warn
from embens.optim import Gamma
from embens.theory.eigenmode import Mode
from embens.theory.kernel import Kernels, check_rates
from embens.theory.problem import Problem, check_targets
from embens.theory.trajectory import GradientFlow, PerMode

if TYPE_CHECKING:
    from jaxtyping import Float

SILENT = 1e-10
"""Relative size up to which the kernel of the ensemble mean counts as 0."""


@dataclass(frozen=True)
class FlowSettings:
    """Settings of training in the limit.

    Attributes:
        shared_rate: Rate of shared parameters, relative to the learning rate.
        individual_rate: Rate of individual parameters, relative to the learning rate.
        jitter: Number to add to the diagonal of the train data's kernel in both modes.

    Example:
        >>> FlowSettings(individual_rate=0.0, jitter=1e-3).shared_rate  # frozen modulations
        1.0
    """

    shared_rate: float = 1.0
    individual_rate: float = 1.0
    jitter: float = 0.0


DEFAULT = FlowSettings()


def gradient_flow(
    k_train_train: Kernels,
    k_test_train: Kernels,
    k_test_test: Kernels | None,
    y: Float[Tensor, "n ..."],
    members: int = 8,
    gamma: Gamma = None,
    *,
    settings: FlowSettings = DEFAULT,
) -> GradientFlow:
    r"""Train an infinitely wide ensemble by gradient flow on the squared loss.

    Args:
        k_train_train: Kernels of the train data with themselves.
        k_test_train: Kernels of the test data (rows) with the train data.
        k_test_test: Kernels of the test data with themselves; None allows means only.
        y: Targets, ``(n,)`` or ``(n, k)``.
        members: Number of members :math:`M`.
        gamma: Gradient scale of shared parameters: a number, a function of the number of members,
            or None for :func:`~embens.theory.natural_gamma`.
        settings: Relative rates and jitter.

    Returns:
        The ensemble in training, as a function of time.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If shapes do not fit, or members are not exchangeable.

    Example:
        >>> from embens.theory.kernel import MemberKernel, zero_cross
        >>> one = torch.ones(1, 1, dtype=torch.float64)
        >>> alone = MemberKernel(same=one, cross=zero_cross(one))  # members share nothing
        >>> k = Kernels(nngp=alone, ntk_shared=alone, ntk_individual=MemberKernel(0 * one, 0 * one))
        >>> flow = gradient_flow(k, k, k, torch.tensor([2.0]), members=4, gamma=4.0)
        >>> flow.mean(1.0).item(), flow.variance(0).item(), flow.ensemble_variance(0).item()
        (1.264241..., 1.0, 0.25)
        >>> flow.mean(float("inf")).item(), flow.diversity(float("inf")).item()
        (2.0, 0.0)
    """
    return _solve((k_train_train, k_test_train, k_test_test), y, members, gamma, settings)


def gradient_descent(
    k_train_train: Kernels,
    k_test_train: Kernels,
    k_test_test: Kernels | None,
    y: Float[Tensor, "n ..."],
    members: int = 8,
    gamma: Gamma = None,
    *,
    rate: float,
    settings: FlowSettings = DEFAULT,
) -> GradientFlow:
    """Train an infinitely wide ensemble by gradient descent on the squared loss.

    A rate beyond the largest stable one gives a warning, and outputs diverge.

    Args:
        k_train_train: Kernels of the train data with themselves.
        k_test_train: Kernels of the test data (rows) with the train data.
        k_test_test: Kernels of the test data with themselves; None allows means only.
        y: Targets, ``(n,)`` or ``(n, k)``.
        members: Number of members.
        gamma: Gradient scale of shared parameters, as in :func:`gradient_flow`.
        rate: Learning rate.
        settings: Relative rates and jitter.

    Returns:
        The ensemble in training; times count steps.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If shapes do not fit, or members are not exchangeable.

    Example:
        >>> from embens import networks
        >>> from embens.theory import kernels
        >>> k = kernels(networks.mlp(1, 8, depth=1, weight_std=2**0.5), torch.ones(1, 1))
        >>> flow = gradient_descent(k, k, k, torch.tensor([2.0]), members=1, rate=0.125)
        >>> [round(flow.mean(steps).item(), 6) for steps in (0, 1, 2)]  # 2 (1 - (1 - rate · 4)ⁿ)
        [0.0, 1.0, 1.5]
    """
    check_rates(rate=rate)
    parts = k_train_train, k_test_train, k_test_test
    flow = _solve(parts, y, members, gamma, settings, rate=float(rate))
    stable = flow.largest_stable_rate
    if rate >= min(stable):
        warn(
            f"rate {rate:g} is too large: gradient descent diverges from {stable.mean:.6g} (mean "
            f"of members) and from {stable.deviation:.6g} (deviations). Choose one below both.",
        )
    return flow


def posterior(
    k_train_train: Kernels,
    k_test_train: Kernels,
    k_test_test: Kernels,
    y: Float[Tensor, "n ..."],
    noise: float,
) -> tuple[Tensor, Tensor]:
    r"""Compute the posterior of test outputs, given targets with noise.

    .. math:: K_{*x} (K + \sigma^2)^{-1} y, \qquad K_{**} - K_{*x} (K + \sigma^2)^{-1} K_{x*}

    :math:`K` is a member's prior covariance ``nngp.same``. It is the posterior of networks of which
    only the last layer is trained. Several outputs share one covariance.

    Args:
        k_train_train: Kernels of the train data with themselves.
        k_test_train: Kernels of the test data (rows) with the train data.
        k_test_test: Kernels of the test data with themselves.
        y: Targets, ``(n,)`` or ``(n, k)``.
        noise: Standard deviation :math:`\sigma` of the targets, above 0.

    Returns:
        Mean ``(test,)`` or ``(test, k)``, and covariance ``(test, test)``.

    Example:
        >>> from embens import networks
        >>> from embens.theory import kernels
        >>> k = kernels(networks.mlp(1, 8, depth=1), torch.ones(1, 1))
        >>> mean, covariance = posterior(k, k, k, torch.tensor([2.0]), noise=1e-6)
        >>> round(mean.item(), 6), round(covariance.item(), 6)
        (2.0, 0.0)
    """
    parts = k_train_train, k_test_train, k_test_test
    problem = Problem.of(parts, 1, 1.0, rates={}, caller="posterior")
    train, test_train, test = problem.nngp
    assert test is not None
    y = check_targets(y, train.same)
    noise = check_number("noise", noise, "a number > 0", lambda std: std > 0)
    identity = torch.eye(len(train.same)).to(train.same)
    factor = torch.linalg.cholesky(train.same + noise**2 * identity)
    weights = torch.cholesky_solve(test_train.same.mT, factor).mT
    return torch.tensordot(weights, y, 1), test.same - weights @ test_train.same.mT


def _solve(
    parts: tuple[Kernels, Kernels, Kernels | None],
    y: Tensor,
    members: int,
    gamma: Gamma,
    settings: FlowSettings,
    rate: float | None = None,
) -> GradientFlow:
    """Diagonalise both modes."""
    rates = {
        "shared_rate": settings.shared_rate,
        "individual_rate": settings.individual_rate,
    }
    problem = Problem.of(parts, members, gamma, rates=rates, caller="gradient_flow")
    y = check_targets(y, problem.ntk[0].same)
    jitter = check_number("jitter", settings.jitter, "a number >= 0", lambda x: x >= 0)
    modes = []
    for index, name in enumerate(PerMode._fields):
        train = problem.ntk[0].modes(members)[index]
        test_train = problem.ntk[1].modes(members)[index]
        largest = problem.ntk[0].same.abs().max()
        if name == "mean" and train.abs().max() < SILENT * largest:
            # The kernel is 0 up to rounding.
            train = torch.zeros_like(train)
            test_train = torch.zeros_like(test_train)
            warn(
                "the ensemble mean cannot learn: its tangent kernel vanishes, because cross is "
                "-1/(M - 1) times same. Use a rho above -1/(M - 1), trained modulations, or an "
                "output bias.",
            )
        mode = Mode.solve((train, test_train), _prior(problem, index), jitter, rate)
        if mode.indefinite and (name == "mean" or members > 1):
            warn(
                f"the {name} mode's kernel on the train data is not positive semi-definite: its "
                f"smallest eigenvalue is {mode.least:.3g}, the largest "
                f"{mode.eigenvalues.max().item():.3g}. Its outputs grow without bound; check the "
                "kernels.",
            )
        modes.append(mode)
    return GradientFlow(PerMode(*modes), rate, y, members, problem.gamma, jitter)


def _prior(problem: Problem, index: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the prior covariances of the mean (index 0) or of deviations (1)."""
    # The ensemble mean has 1/M of the covariance that `modes` gives.
    share = 1 / problem.members if index == 0 else 1.0
    train, test_train, test = problem.nngp
    prior_train = share * train.modes(problem.members)[index]
    prior_test_train = share * test_train.modes(problem.members)[index]
    if test is None:
        return prior_train, prior_test_train, None
    return prior_train, prior_test_train, share * test.modes(problem.members)[index]
