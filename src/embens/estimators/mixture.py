r"""A mixture of Gaussians, one for each member: density, quantiles, distance to what happened.

For members with means :math:`\mu_a` and standard deviations :math:`\sigma_a`,

.. math::
    F(y) = \frac1M \sum_a \Phi\Big(\frac{y - \mu_a}{\sigma_a}\Big), \qquad
    \mathrm{CRPS}(F, y) = \frac1M \sum_a A(y - \mu_a, \sigma_a^2)
        - \frac1{2M^2} \sum_{ab} A(\mu_a - \mu_b, \sigma_a^2 + \sigma_b^2),

with :math:`A(m, s^2) = m\,(2\Phi(m/s) - 1) + 2 s\,\varphi(m/s)` (Grimit et al., 2006). Tensors are
``(member, …)``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def log_density(mean: Tensor, std: Tensor, y: Tensor) -> Tensor:
    """Return the logarithm of the mixture's density."""
    logarithms = -0.5 * ((y - mean) / std) ** 2 - std.log() - 0.5 * math.log(2 * math.pi)
    return log_mean(logarithms)


def log_mean(logarithms: Tensor) -> Tensor:
    """Return the logarithm of the mean over members."""
    return logarithms.logsumexp(0) - math.log(len(logarithms))


def quantile(mean: Tensor, std: Tensor, level: float) -> Tensor:
    """Return a quantile of the mixture, by bisection between those of its members."""
    if not 0 < level < 1:
        raise ValueError(f"a quantile's level lies between 0 and 1; got {level}")
    own = mean + torch.special.ndtri(torch.tensor(level, dtype=torch.float64)) * std
    low, high = own.amin(0), own.amax(0)
    for _ in range(60):
        middle = (low + high) / 2
        above = torch.special.ndtr((middle - mean) / std).mean(0) >= level
        high = torch.where(above, middle, high)
        low = torch.where(above, low, middle)
    return (low + high) / 2


def crps(mean: Tensor, std: Tensor, y: Tensor) -> Tensor:
    """Return the continuous ranked probability score, in units of ``y``; lower is better.

    Example:
        >>> crps(torch.zeros(1), torch.ones(1), torch.tensor(0.0)).item()  # (√2 − 1) / √π
        0.2336...
    """
    far = _absolute(y - mean, std).mean(0)
    spread = torch.zeros_like(far)
    for a in range(len(mean)):  # one member at a time: memory of M, not of M²
        spread += _absolute(mean[a] - mean, (std[a] ** 2 + std**2).sqrt()).mean(0)
    return far - spread / (2 * len(mean))


def _absolute(mean: Tensor, std: Tensor) -> Tensor:
    ratio = mean / std
    density = (-(ratio**2) / 2).exp() / math.sqrt(2 * math.pi)
    return mean * (2 * torch.special.ndtr(ratio) - 1) + 2 * std * density
