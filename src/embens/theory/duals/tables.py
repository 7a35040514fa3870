r"""Tables: expectations of a smooth activation for one law and a range of variances.

A table holds Chebyshev coefficients in three variables: in each root of a variance, mapped by
:math:`\log(1 + \kappa r)`, and in the correlation. Rows of a kernel share one root and columns the
other, so those two sums are matrix products, and each entry then sums a series in its correlation.
All of it is differentiable, forward and backward, and in torch, since kernels may be on a GPU.

Nodes of a Chebyshev series are :math:`x_j = \cos(\pi j / (n - 1))`, which include both ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from embens.theory.duals.expectations import is_differentiated, roots

_NUMBERS = 2**19  # coefficients held at once
_SIZES = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192)  # of axes
_DEGREES = (33, 65, 129, 257, 513, 1025)  # in the correlation
_STEEP = "standardise the inputs, or use a smaller weight_std."


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

    def nodes(self) -> Tensor:
        start, width = self._ends()
        mapped = start + (chebyshev_nodes(self.count) + 1) / 2 * width
        return (torch.expm1(mapped) / self.scale).clamp(self.low, self.high)

    def basis(self, root: Tensor) -> Tensor:
        """Return the polynomials at these roots, on a new last axis."""
        start, width = self._ends()
        return chebyshev_basis(2 * (torch.log1p(self.scale * root) - start) / width - 1, self.count)

    def refine(self, function: Callable[[Tensor], Tensor]) -> Axis:
        """Return the axis with nodes enough to interpolate a function of the roots, of size 1."""
        middle = replace(self, count=16).nodes()
        middle = (middle[1:] + middle[:-1]) / 2
        expected = function(middle)
        axis = self
        for count in _SIZES:
            axis = replace(self, count=count)
            error = axis.basis(middle) @ (to_chebyshev(count) @ function(axis.nodes())) - expected
            if float(error.abs().max()) < 1e-13:
                break
        return axis

    def _ends(self) -> tuple[float, float]:
        start = math.log1p(self.scale * self.low)
        return start, math.log1p(self.scale * self.high) - start


def expand(values: Tensor, cut: float = 1e-13) -> Tensor:
    """Return the coefficients that matter, from values at the nodes of both roots.

    Both are ``(degree, m, m)``; they belong to polynomials in the correlation and in each root.
    """
    matrix = to_chebyshev(values.shape[-1])
    coefficients = matrix @ values @ matrix.T
    rest = coefficients.abs().amax((1, 2)).flip(0).cumsum(0).flip(0)
    return coefficients[: max(1, int((rest > cut * coefficients.abs().max()).sum()))]


def expand_powers(series: Tensor, edge: float, *, integrated: bool = False) -> Tensor:
    r"""Return the same of :math:`\sum_n s_n \rho^n`, given ``(n, m, m)``, or of its integral."""
    n = torch.arange(len(series), dtype=torch.float64)
    first, second = torch.triu_indices(*series.shape[1:])  # the others are the same
    halves = [series[parity::2, first, second] for parity in (0, 1)]
    coefficients = torch.empty(0)
    for count in _DEGREES:
        rho = gather(chebyshev_nodes(count)[: count // 2 + 1], edge)[:, None]
        powers = rho ** (n + 1) / (n + 1) if integrated else rho**n
        even, odd = (powers[:, p::2] @ half for p, half in enumerate(halves))
        ahead, behind = even + odd, (odd - even if integrated else even - odd)
        values = torch.cat([ahead, behind[:-1].flip(0)])
        coefficients = to_chebyshev(count) @ values
        size = coefficients.abs().amax(1)
        if float(size[-4:].max()) <= 1e-13 * float(size.max()):
            break
    else:
        raise ValueError("expectations change too fast with the correlation: " + _STEEP)
    whole = coefficients.new_empty(len(coefficients), *series.shape[1:])
    whole[:, first, second] = coefficients
    whole[:, second, first] = coefficients
    return expand(whole)


def evaluate(coefficients: Tensor, basis1: Tensor, basis2: Tensor, correlation: Tensor) -> Tensor:
    """Sum a series at all entries of a kernel, from the polynomials at its roots."""
    table = coefficients.to(correlation.device)
    if not (table.any() and correlation.numel()):
        return torch.zeros_like(correlation)
    missing = (None,) * (correlation.dim() + 1)
    left, right = (x[(*missing[x.dim() :], ...)] for x in (basis1, basis2))
    return _sum(table, left, right, correlation)


def _sum(table: Tensor, left: Tensor, right: Tensor, correlation: Tensor) -> Tensor:
    """Return the sums over polynomials in both roots and in the correlation, a few at a time."""
    if correlation.numel() * len(table) > _NUMBERS and correlation.numel() > 1:
        axis = next(i for i, size in enumerate(correlation.shape) if size > 1)
        count = correlation.shape[axis]
        each = correlation.numel() // count * len(table)
        chunks = [
            x.split(max(1, _NUMBERS // each), axis) if x.shape[axis] > 1 else [x] * count
            for x in (left, right, correlation)
        ]
        return torch.cat([_sum(table, *part) for part in zip(*chunks, strict=False)], axis)
    half = torch.einsum("dmk,...m->d...k", table, left)
    return clenshaw(torch.einsum("d...k,...k->d...", half, right), correlation)


@dataclass(frozen=True, eq=False)
class Table:
    """Expectations for one law and a range of variances."""

    axis: Axis  # roots of variances
    within: tuple[Tensor, ...]  # F₀, F̃, G, H̃ in one member; see ``smooth``
    between: tuple[Tensor, ...]  # F₀, F̃, G between members
    edge: float  # how far beyond ±1 the correlation is smooth

    def same(
        self, q1: Tensor, q2: Tensor, c: Tensor, *, with_h: bool = True
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        f, g, *h = self._evaluate(self.within if with_h else self.within[:3], q1, q2, c)
        return f, g, h[0] if h else None

    def cross(self, q1: Tensor, q2: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        f, g = self._evaluate(self.between[:3], q1, q2, c)
        return f, g

    def _evaluate(
        self, coefficients: tuple[Tensor, ...], q1: Tensor, q2: Tensor, c: Tensor
    ) -> list[Tensor]:
        dtype, (q1, q2, c) = c.dtype, (x.double() for x in (q1, q2, c))
        (root1, inverse1), (root2, inverse2) = roots(q1), roots(q2)
        correlation = (c * inverse1 * inverse2).clamp(-1 - 1e-12, 1 + 1e-12)
        correlation = spread(correlation, self.edge)
        basis = self.axis.basis(root1), self.axis.basis(root2)
        start, f, g, *h = (evaluate(x, *basis, correlation) for x in coefficients)
        size = root1 * root2
        return [x.to(dtype) for x in (start + size * f, g, *(size * x for x in h))]


def spread(correlation: Tensor, edge: float) -> Tensor:
    r"""Return a variable in [-1, 1] that has room for what happens near :math:`\rho = \pm 1`.

    What is singular on a line beyond :math:`1 + \epsilon` is smooth in
    :math:`\operatorname{artanh}(\rho / (1 + \epsilon))`, in a strip as wide as for all others.
    """
    return torch.atanh(correlation / (1 + edge)) / math.atanh(1 / (1 + edge))


def gather(variable: Tensor, edge: float) -> Tensor:
    """Return the correlations for which :func:`spread` gives these numbers."""
    return ((1 + edge) * torch.tanh(variable * math.atanh(1 / (1 + edge)))).clamp(-1, 1)


def span(q1: Tensor, q2: Tensor) -> tuple[float, float]:
    """Return the smallest and the largest of some variances."""
    if not (q1.numel() and q2.numel()):
        return 1.0, 1.0
    ends = [float(end) for q in (q1.detach(), q2.detach()) for end in torch.aminmax(q)]
    return min(ends), max(ends)
