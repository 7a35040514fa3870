r"""Chebyshev and Hermite series: smooth functions by a few coefficients.

*Chebyshev.* With nodes :math:`x_j = \cos(\pi j / (n - 1))`, which include both ends, :math:`f
\approx \sum_i f_i\, T_i` on [-1, 1]. All in torch, since kernels are differentiated and may be on a
GPU.

*Hermite.* With :math:`a_n(s) = E[\phi(s g)\, h_n(g)]`, :math:`g \sim N(0, 1)`, and orthonormal
:math:`h_n`, Mehler's formula is :math:`E[\phi(s_1 g_1)\, \phi(s_2 g_2)] = \sum_n a_n(s_1)\,
a_n(s_2)\, \rho^n`. The coefficients :math:`b_n` of :math:`\phi'` give :math:`\sqrt{n}\, a_n = s\,
b_{n-1}`. Integrals over :math:`g` are trapezoid sums: better than Gauss–Hermite where an activation
is steep, with its poles near the real axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from embens.theory.duals.expectations import is_differentiated

SIZES = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192)  # of axes
REACH = 12.0  # exp(-REACH² / 4) is below the rounding error
TIERS = (512, 4096, 16384)  # numbers of Hermite coefficients for which grids are made


def chebyshev_nodes(count: int) -> Tensor:
    """Return nodes in [-1, 1], from 1 to -1, symmetric to the last bit."""
    half = torch.arange(count - 1, -count, -2, dtype=torch.float64) * (math.pi / 2 / (count - 1))
    return torch.sin(half)


@lru_cache(maxsize=32)
def to_chebyshev(count: int) -> Tensor:
    """Return the matrix that takes values at the nodes to coefficients."""
    index = torch.arange(count, dtype=torch.int64)
    phase = ((index[:, None] * index) % (2 * (count - 1))).double()
    matrix = torch.cos(phase * (math.pi / (count - 1))) * (2 / (count - 1))
    matrix[[0, -1]] /= 2
    matrix[:, [0, -1]] /= 2
    return matrix


def chebyshev_basis(x: Tensor, count: int) -> Tensor:
    """Return the polynomials :math:`T_0, T_1, …` at these points, on a new last axis."""
    values = [torch.ones_like(x), x]
    for _ in range(count - 2):
        values.append(2 * x * values[-1] - values[-2])
    return torch.stack(values[:count], dim=-1)


def clenshaw(coefficients: Tensor, x: Tensor) -> Tensor:
    """Sum a Chebyshev series, whose coefficients ``(degree, *points)`` vary from point to point."""
    if len(coefficients) == 1:
        return coefficients[0] + torch.zeros_like(x)
    twice, value, ahead = 2 * x, coefficients[-1] + torch.zeros_like(x), torch.zeros_like(x)
    in_place = not is_differentiated(coefficients, x)
    for coefficient in reversed(coefficients[1:-1].unbind()):
        if in_place:
            torch.sub(coefficient, ahead, out=ahead).addcmul_(value, twice)
            value, ahead = ahead, value
        else:
            value, ahead = coefficient - ahead + value * twice, value
    return torch.addcmul(coefficients[0] - ahead, value, x)


@dataclass(frozen=True)
class Axis:
    r"""Interval of roots :math:`r` of variances, mapped by :math:`\log(1 + \kappa r)`."""

    low: float
    high: float
    scale: float
    count: int = 0

    def resize(self, count: int) -> Axis:
        return replace(self, count=count)

    def nodes(self) -> Tensor:
        start, width = self._ends()
        mapped = start + (chebyshev_nodes(self.count) + 1) / 2 * width
        return (torch.expm1(mapped) / self.scale).clamp(self.low, self.high)

    def basis(self, root: Tensor) -> Tensor:
        """Return the polynomials at these roots, on a new last axis."""
        start, width = self._ends()
        return chebyshev_basis(2 * (torch.log1p(self.scale * root) - start) / width - 1, self.count)

    def interpolation(self, root: Tensor) -> Tensor:
        """Return the weights of values at the nodes, on a new last axis."""
        return self.basis(root) @ to_chebyshev(self.count)

    def refine(self, function: Callable[[Tensor], Tensor]) -> Axis:
        """Return the axis with nodes enough to interpolate a function of the roots."""
        middle = self.resize(16).nodes()
        middle = (middle[1:] + middle[:-1]) / 2
        expected = function(middle)
        scale, axis = expected.abs().max().clamp(min=1e-300), self
        for count in SIZES:
            axis = self.resize(count)
            error = axis.interpolation(middle) @ function(axis.nodes()) - expected
            if float((error.abs() / scale).max()) < 1e-13:
                break
        return axis

    def _ends(self) -> tuple[float, float]:
        start = math.log1p(self.scale * self.low)
        return start, math.log1p(self.scale * self.high) - start


def normal_grid(count: int) -> tuple[Tensor, Tensor]:
    """Return points :math:`g ≥ 0` and weights, fine enough for this many Hermite coefficients.

    The weights are those of the normal density, and 0 counts half: it is there for both signs.
    """
    steps = math.ceil(REACH * max(8.0, math.sqrt(count)) / 2.5)
    points = torch.linspace(0, REACH, steps + 1, dtype=torch.float64, device="cpu")
    weights = torch.exp(-(points**2) / 2) * (REACH / steps / math.sqrt(2 * math.pi))
    weights[0] /= 2
    return points, weights


def to_hermite(function: Callable[[Tensor], Tensor], scales: Tensor, count: int) -> Tensor:
    r"""Return :math:`E[f(s g)\, h_n(g)]`, ``(scale, n)``, for a function of each number alone.

    Example:
        >>> cubes = to_hermite(lambda x: x**3, torch.ones(1, dtype=torch.float64), 4)
        >>> [round(x, 12) for x in (cubes[0] ** 2).tolist()]  # g³ = 3 h_1 + √6 h_3
        [0.0, 9.0, 0.0, 6.0]
    """
    functions, points = _hermite(next(tier for tier in TIERS if count <= tier))
    arguments = scales[:, None] * points
    right, left = function(arguments), function(-arguments)
    result = scales.new_empty(len(scales), count)
    result[:, 0::2] = (right + left) @ functions[0:count:2].T
    result[:, 1::2] = (right - left) @ functions[1:count:2].T
    return result


@lru_cache(maxsize=len(TIERS))
def _hermite(count: int) -> tuple[Tensor, Tensor]:
    """Return Hermite polynomials times the weights of the grid, and the grid."""
    points, weights = normal_grid(count)
    result = points.new_empty(count, len(points))
    result[0] = torch.exp(-(points**2) / 4)
    result[1] = points * result[0]
    for n in range(1, count - 1):
        torch.mul(points, result[n], out=result[n + 1])
        result[n + 1].sub_(result[n - 1], alpha=math.sqrt(n)).div_(math.sqrt(n + 1))
    return result.mul_(weights * torch.exp(points**2 / 4)), points
