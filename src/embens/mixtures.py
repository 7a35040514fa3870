r"""Mixtures of normal distributions: log-likelihood, CRPS, quantiles, and the scale that fits best.

A mixture is given by the means and standard deviations ``(component, …)`` of its equally weighted
components. A standard deviation may be 0; that component is then a point mass.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from embens.checks import check_number

CACHED_VALUES = 2**14  # values that fit into a processor's cache
NEWTON_STEPS = 12  # of a quantile; most need six
SCALES = (0.05, 20.0)  # bounds of the search for a scale


def negative_log_likelihood(means: Tensor, stds: Tensor, target: Tensor) -> Tensor:
    r"""Return :math:`-\log \frac1M \sum_a N(y; \mu_a, \sigma_a^2)` elementwise.

    Args:
        means: Component means ``(component, …)``.
        stds: Component standard deviations ``(component, …)``.
        target: Observed values ``(…)``.

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
        means: Component means ``(component, …)``.
        stds: Component standard deviations ``(component, …)``.
        target: Observed values ``(…)``.

    Returns:
        The score ``(…)``.

    Example:
        >>> crps(torch.zeros(1, 1), torch.zeros(1, 1), torch.tensor([2.0]))  # a point mass
        tensor([2.])
    """
    count = len(means)
    # Blocks of columns stay in the cache. Within a block, one component after the other meets the
    # components behind it, which needs memory for M components instead of M² pairs.
    block = max(1, CACHED_VALUES // count)
    mean_blocks = means.reshape(count, -1).split(block, 1)
    std_blocks = stds.reshape(count, -1).split(block, 1)
    spreads = []
    for block_means, block_stds in zip(mean_blocks, std_blocks, strict=True):
        pair_sum = 2 / math.sqrt(math.pi) * block_stds.sum(0)  # each component with itself
        for a in range(count - 1):
            differences = block_means[a] - block_means[a + 1 :]
            pair_stds = (block_stds[a].square() + block_stds[a + 1 :].square()).sqrt()
            pair_sum = pair_sum + 2 * _expected_absolute_value(differences, pair_stds).sum(0)
        spreads.append(pair_sum / (2 * count**2))
    spread = torch.cat(spreads).reshape(means.shape[1:])
    return _expected_absolute_value(target - means, stds).mean(0) - spread


def quantile(means: Tensor, stds: Tensor, q: float) -> Tensor:
    """Return the quantile of a mixture elementwise, by Newton's method and bisection.

    Args:
        means: Component means ``(component, …)``.
        stds: Component standard deviations ``(component, …)``.
        q: The probability, between 0 and 1.

    Returns:
        The quantile ``(…)``.

    Example:
        >>> quantile(torch.zeros(1, 1), torch.ones(1, 1), 0.975)
        tensor([1.9600])
    """
    q = check_number("q", q, "a number between 0 and 1", lambda q: 0 < q < 1)
    dtype = means.dtype
    means = means.double()
    stds = stds.double()
    # The quantile of the mixture lies between the quantiles of its components.
    ends = means + stds * torch.special.ndtri(torch.tensor(q, dtype=torch.float64))
    low = ends.amin(0)
    high = ends.amax(0)
    low, high = _newton(means, stds, q, low, high)
    # The values that Newton's method has not found, for example point masses, are bisected. Every
    # step halves the interval; 64 steps exhaust float64 relative to the first interval.
    unsolved = (low < high).nonzero(as_tuple=True)
    if len(unsolved[0]):
        means = means[:, *unsolved]
        stds = stds[:, *unsolved]
        unsolved_low = low[unsolved]
        unsolved_high = high[unsolved]
        for _ in range(64):
            middle = (unsolved_low + unsolved_high) / 2
            is_below = _cdf(means, stds, middle) < q
            unsolved_low = torch.where(is_below, middle, unsolved_low)
            unsolved_high = torch.where(is_below, unsolved_high, middle)
        high[unsolved] = unsolved_high
    return high.to(dtype)


def _newton(
    means: Tensor, stds: Tensor, q: float, low: Tensor, high: Tensor
) -> tuple[Tensor, Tensor]:
    """Narrow the brackets of a quantile by Newton's method; they are equal where it converged."""
    value = (low + high) / 2
    for _ in range(NEWTON_STEPS):
        errors = (value - means) / stds
        distribution = torch.where(stds > 0, torch.special.ndtr(errors), means <= value).mean(0)
        is_below = distribution < q
        low = torch.where(is_below, value, low)
        high = torch.where(is_below, high, value)
        density = (torch.exp(-errors.square() / 2) / stds).mean(0) / math.sqrt(2 * math.pi)
        step = (q - distribution) / density
        # A step of 1e-9 of the smallest deviation is the last one: the next would be about 1e-18.
        has_converged = step.abs() < 1e-9 * stds.amin(0)
        value = value + step
        low = torch.where(has_converged, value, low)
        high = torch.where(has_converged, value, high)
        if has_converged.all():
            break
        # A step out of the bracket is replaced by its middle.
        is_inside = (low <= value) & (value <= high)
        value = torch.where(is_inside, value, (low + high) / 2)
    return low, high


def best_scale(loss: Callable[[float], Tensor]) -> float:
    """Return the positive number that minimises a loss, such as a temperature.

    Args:
        loss: A function of the number.

    Returns:
        The minimiser between 0.05 and 20, or 1 if it is not better than 1.

    Example:
        >>> round(best_scale(lambda scale: torch.tensor((scale - 3.0) ** 2)), 2)
        3.0
    """
    from scipy.optimize import minimize_scalar

    result = minimize_scalar(
        lambda log_scale: float(loss(math.exp(log_scale))),
        bounds=(math.log(SCALES[0]), math.log(SCALES[1])),
        method="bounded",
        options={"xatol": 1e-4},
    )
    if result.fun < float(loss(1.0)):
        return math.exp(result.x)
    return 1.0


def _cdf(means: Tensor, stds: Tensor, value: Tensor) -> Tensor:
    """Return the distribution function of a mixture at one value for each element ``(…)``."""
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
