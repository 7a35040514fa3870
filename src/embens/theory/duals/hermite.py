r"""Hermite series: an activation in the polynomials that are orthonormal under the normal law.

With :math:`a_n(s) = E[\phi(s g)\, h_n(g)]`, :math:`g \sim N(0, 1)`, and a correlation
:math:`\rho`, Mehler's formula makes two-dimensional expectations a sum:

.. math::
    E[\phi(s_1 g_1)\, \phi(s_2 g_2)] = \sum_n a_n(s_1)\, a_n(s_2)\, \rho^n

The coefficients :math:`b_n` of :math:`\phi'` give the others:
:math:`\sqrt{n}\, a_n = s\, b_{n-1}`, and those of :math:`g\, \phi'(s g)` are
:math:`d_n = \sqrt{n + 1}\, b_{n+1} + \sqrt{n}\, b_{n-1}`.

Integrals over :math:`g` are trapezoid sums. They converge geometrically for analytic functions,
and are better than Gauss–Hermite where an activation is steep, with its poles near the real axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

REACH = 12.0  # exp(-REACH² / 4) is below the rounding error
TIERS = (512, 4096, 16384)  # numbers of coefficients for which grids are made


def grid(count: int) -> tuple[Tensor, Tensor]:
    """Return nodes :math:`g ≥ 0` and their weights, fine enough for this many coefficients.

    The weights are those of the normal density, and 0 counts half: it is there for both signs.
    """
    steps = math.ceil(REACH * max(8.0, math.sqrt(count)) / 2.5)
    points = torch.linspace(0, REACH, steps + 1, dtype=torch.float64, device="cpu")
    weights = torch.exp(-(points**2) / 2) * (REACH / steps / math.sqrt(2 * math.pi))
    weights[0] /= 2
    return points, weights


def coefficients(function: Callable[[Tensor], Tensor], scales: Tensor, count: int) -> Tensor:
    r"""Return :math:`E[f(s g)\, h_n(g)]` for each scale :math:`s` and each :math:`n`.

    Args:
        function: acts on each number alone.
        scales: :math:`s`.
        count: number of coefficients, at most the last of ``TIERS``.

    Returns:
        ``(scale, n)``.

    Example:
        >>> cubes = coefficients(lambda x: x**3, torch.ones(1, dtype=torch.float64), 4)
        >>> [round(x, 12) for x in (cubes[0] ** 2).tolist()]  # g³ = 3 h_1 + √6 h_3
        [0.0, 9.0, 0.0, 6.0]
    """
    functions, points = _functions(next(tier for tier in TIERS if count <= tier))
    arguments = scales[:, None] * points
    right, left = function(arguments), function(-arguments)
    result = scales.new_empty(len(scales), count)
    result[:, 0::2] = (right + left) @ functions[0:count:2].T
    result[:, 1::2] = (right - left) @ functions[1:count:2].T
    return result


@lru_cache(maxsize=len(TIERS))
def _functions(count: int) -> tuple[Tensor, Tensor]:
    """Return Hermite polynomials times the weights of the grid, and the grid."""
    points, weights = grid(count)
    result = points.new_empty(count, len(points))
    result[0] = torch.exp(-(points**2) / 4)
    result[1] = points * result[0]
    for n in range(1, count - 1):
        torch.mul(points, result[n], out=result[n + 1])
        result[n + 1].sub_(result[n - 1], alpha=math.sqrt(n)).div_(math.sqrt(n + 1))
    return result.mul_(weights * torch.exp(points**2 / 4)), points
