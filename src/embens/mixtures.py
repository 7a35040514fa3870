r"""Mixtures of normal distributions: log-likelihood, CRPS and quantiles.

A mixture is given by the means and standard deviations ``(component, …)`` of its equally weighted
components. A standard deviation may be 0; that component is then a point mass.
"""

import math

import torch
from torch import Tensor

from embens.checks import check_number


def negative_log_likelihood(means: Tensor, stds: Tensor, target: Tensor) -> Tensor:
    r"""Return :math:`-\log \frac1M \sum_a N(y; \mu_a, \sigma_a^2)` elementwise.

    Args:
        means: component means ``(component, …)``.
        stds: component standard deviations ``(component, …)``.
        target: observed values ``(…)``.

    Returns:
        The negative log-likelihood ``(…)``, in nats; very large or infinite where all components
        are point masses away from the target.

    Example:
        >>> negative_log_likelihood(torch.zeros(1, 1), torch.ones(1, 1), torch.zeros(1))
        tensor([0.9189])
    """
    stds = stds.clamp(min=torch.finfo(stds.dtype).tiny)
    errors = (target - means) / stds
    log_densities = -errors.square() / 2 - stds.log() - math.log(2 * math.pi) / 2
    return math.log(len(means)) - log_densities.logsumexp(0)


def crps(means: Tensor, stds: Tensor, target: Tensor) -> Tensor:
    r"""Return the continuous ranked probability score elementwise (Grimit et al., 2006).

    .. math::
        E |Y - y| - \tfrac12 E |Y - Y'|

    for independent :math:`Y, Y'` of the mixture. It has the unit of the target; lower is better.

    Args:
        means: component means ``(component, …)``.
        stds: component standard deviations ``(component, …)``.
        target: observed values ``(…)``.

    Returns:
        The score ``(…)``.

    Example:
        >>> crps(torch.zeros(1, 1), torch.zeros(1, 1), torch.tensor([2.0]))  # a point mass
        tensor([2.])
    """
    error = _expected_absolute_value(target - means, stds).mean(0)
    spread = torch.zeros_like(error)
    # One component at a time, to need memory for one component only.
    for mean, std in zip(means, stds, strict=True):
        pair_stds = (stds.square() + std.square()).sqrt()
        spread += _expected_absolute_value(means - mean, pair_stds).mean(0)
    return error - spread / (2 * len(means))


def quantile(means: Tensor, stds: Tensor, q: float) -> Tensor:
    """Return the quantile of a mixture elementwise, by bisection of its distribution function.

    Args:
        means: component means ``(component, …)``.
        stds: component standard deviations ``(component, …)``.
        q: the probability, between 0 and 1.

    Returns:
        The quantile ``(…)``.

    Example:
        >>> quantile(torch.zeros(1, 1), torch.ones(1, 1), 0.975)
        tensor([1.9600])
    """
    q = check_number("q", q, "a number between 0 and 1", lambda q: 0 < q < 1)
    means, stds, dtype = means.double(), stds.double(), means.dtype
    # The quantile of the mixture lies between the quantiles of its components.
    ends = means + stds * torch.special.ndtri(torch.tensor(q, dtype=torch.float64))
    low, high = ends.amin(0), ends.amax(0)
    # Every step halves the interval; 64 steps exhaust float64 relative to the first interval.
    for _ in range(64):
        middle = (low + high) / 2
        is_below = _cdf(means, stds, middle) < q
        low = torch.where(is_below, middle, low)
        high = torch.where(is_below, high, middle)
    return high.to(dtype)


def _cdf(means: Tensor, stds: Tensor, value: Tensor) -> Tensor:
    errors = value - means
    point_mass = (errors >= 0).to(errors.dtype)
    smooth = torch.special.ndtr(errors / stds)
    return torch.where(stds > 0, smooth, point_mass).mean(0)


def _expected_absolute_value(mean: Tensor, std: Tensor) -> Tensor:
    """Return the expectation of the absolute value of a normal variable."""
    ratio = mean / torch.where(std > 0, std, 1.0)
    density = torch.exp(-ratio.square() / 2) / math.sqrt(2 * math.pi)
    smooth = 2 * std * density + mean * (2 * torch.special.ndtr(ratio) - 1)
    return torch.where(std > 0, smooth, mean.abs())
