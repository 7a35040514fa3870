r"""Calibration on rows that training did not see.

**Temperature.** Logits divided by one number, or members' standard deviations multiplied by one,
chosen to minimise the mixture's negative log-likelihood. One row is added of which every class is
as likely (as Platt, 1999), or the best temperature of a classifier without errors would be 0; to
the rows of a regressor thirty that are exactly as far off as the model says.

**Conformal intervals.** With scores :math:`r_i = |y_i - \mu_i| / \sigma_i` of :math:`n` rows that
played no part in training, and :math:`Q` the :math:`\lceil (n+1)\,c \rceil`-th smallest of them,
:math:`\mu \pm Q \sigma` holds a new target with a chance of at least :math:`c` (and at most
:math:`c + 1/(n+1)` if scores don't tie), whatever the model, as long as rows are exchangeable
(Vovk et al., 2005; Lei et al., 2018): over rows and calibration sets, not for each :math:`x`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

RANGE = (0.05, 20.0)  # temperatures that are tried
ADDED = 30  # rows that are added where a factor of standard deviations is chosen


def best_scale(loss: Callable[[float], Tensor]) -> float:
    """Return the positive number that minimises a loss; 1 if nothing is better by a hair.

    Example:
        >>> import torch
        >>> round(best_scale(lambda t: torch.tensor(t).log().sub(1.0) ** 2), 3)
        2.718
    """
    from scipy.optimize import minimize_scalar

    found = minimize_scalar(
        lambda x: float(loss(math.exp(x))),
        bounds=[math.log(b) for b in RANGE],
        method="bounded",
        options={"xatol": 1e-4},
    )
    return math.exp(found.x) if found.fun < float(loss(1.0)) else 1.0


def conformal_quantile(scores: Tensor, coverage: float) -> float:
    """Return the factor of the half-width of intervals.

    Example:
        >>> import torch
        >>> conformal_quantile(torch.arange(1.0, 20.0), 0.9)  # the 18th of 19
        18.0
    """
    if not 0 < coverage < 1:
        raise ValueError(f"coverage: expected a number between 0 and 1; got {coverage}")
    rank = math.ceil((len(scores) + 1) * coverage - 1e-9)
    if rank > len(scores):
        raise ValueError(
            f"coverage={coverage} needs at least {least_rows(coverage)} held-out rows; there are "
            f"{len(scores)}. Ask for less, or fit with more rows or a larger validation_fraction."
        )
    return float(scores.sort().values[rank - 1])


def least_rows(coverage: float) -> int:
    """Return how many held-out rows intervals of a coverage need."""
    return math.ceil(coverage / (1 - coverage) - 1e-9)
