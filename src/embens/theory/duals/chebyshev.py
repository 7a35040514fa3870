r"""Chebyshev interpolation: a smooth function on an interval from its values at a few nodes.

With nodes :math:`x_j = \cos(\pi j / (n - 1))`, which include both ends, :math:`f \approx
\sum_i f_i\, T_i`, and coefficients and error of a smooth function fall faster than any power of
:math:`n`. Values at nodes and coefficients are a fixed matrix apart. All in torch, since kernels
are differentiated and may be on a GPU.
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


def nodes(count: int) -> Tensor:
    """Return nodes in [-1, 1], from 1 to -1, symmetric to the last bit.

    Example:
        >>> nodes(3).tolist()
        [1.0, 0.0, -1.0]
    """
    half = torch.arange(count - 1, -count, -2, dtype=torch.float64) * (math.pi / 2 / (count - 1))
    return torch.sin(half)


@lru_cache(maxsize=32)
def to_coefficients(count: int) -> Tensor:
    """Return the matrix that takes values at the nodes to coefficients."""
    index = torch.arange(count, dtype=torch.int64)
    phase = ((index[:, None] * index) % (2 * (count - 1))).double()
    matrix = torch.cos(phase * (math.pi / (count - 1))) * (2 / (count - 1))
    matrix[[0, -1]] /= 2
    matrix[:, [0, -1]] /= 2
    return matrix


def basis(x: Tensor, count: int) -> Tensor:
    """Return the polynomials :math:`T_0, T_1, …` at these points, on a new last axis.

    Example:
        >>> basis(torch.tensor([0.5]), 3).tolist()
        [[1.0, 0.5, -0.5]]
    """
    values = [torch.ones_like(x), x]
    for _ in range(count - 2):
        values.append(2 * x * values[-1] - values[-2])
    return torch.stack(values[:count], dim=-1)


def clenshaw(coefficients: Tensor, x: Tensor) -> Tensor:
    """Sum a series at these points, with coefficients that vary from point to point.

    Args:
        coefficients: coefficients on the first axis, points on the others.
        x: points.
    """
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
        """Return the same interval with another number of nodes."""
        return replace(self, count=count)

    def nodes(self) -> Tensor:
        """Return the roots at which values are needed."""
        start, width = self._ends()
        mapped = start + (nodes(self.count) + 1) / 2 * width
        return (torch.expm1(mapped) / self.scale).clamp(self.low, self.high)

    def basis(self, root: Tensor) -> Tensor:
        """Return the polynomials at these roots, on a new last axis."""
        start, width = self._ends()
        return basis(2 * (torch.log1p(self.scale * root) - start) / width - 1, self.count)

    def interpolation(self, root: Tensor) -> Tensor:
        """Return the weights of values at the nodes, on a new last axis."""
        return self.basis(root) @ to_coefficients(self.count)

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
