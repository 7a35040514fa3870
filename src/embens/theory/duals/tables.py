r"""Tables: expectations of a smooth activation for one law and a range of variances.

A table holds Chebyshev coefficients in three variables: in each root of a variance, mapped by
:math:`\log(1 + \kappa r)`, and in the correlation. Rows of a kernel share one root and columns the
other, so those two sums are matrix products, and each entry then sums a series in its correlation.
All of it is differentiable, forward and backward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from embens.laws import Law
from embens.theory.duals.expectations import Dual, roots
from embens.theory.duals.series import Axis, clenshaw

_NUMBERS = 2**19  # coefficients held at once


@dataclass(frozen=True, eq=False)
class Expansion:
    """Function of two roots and a correlation, by the coefficients that matter.

    The last axis of ``table``, ``(degree, m, rank)``, goes with what ``mix``, ``(m, rank)``, makes
    of the polynomials in the second root.
    """

    table: Tensor
    mix: Tensor

    @classmethod
    def of(cls, coefficients: Tensor, cut: float = 1e-13) -> Expansion:
        """Return the expansion with coefficients ``(degree, m, m)``, up to a relative error."""
        least = cut * coefficients.abs().max()
        rest = coefficients.abs().amax((1, 2)).flip(0).cumsum(0).flip(0)
        kept = coefficients[: max(1, int((rest > least).sum()))]
        _, values, mix = torch.linalg.svd(kept.flatten(0, 1), full_matrices=False)
        mix = mix[: max(1, int((values > least).sum()))].T
        return cls(kept @ mix, mix)

    def __call__(self, basis1: Tensor, basis2: Tensor, correlation: Tensor) -> Tensor:
        """Sum at all entries of a kernel, from the polynomials at its roots."""
        table, mix = (x.to(correlation.device) for x in (self.table, self.mix))
        if not (table.any() and correlation.numel()):
            return torch.zeros_like(correlation)
        missing = (None,) * (correlation.dim() + 1)
        left, right = (x[(*missing[x.dim() :], ..., slice(len(mix)))] for x in (basis1, basis2))
        return _sum(table, left, right @ mix, correlation)


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
    half = torch.einsum("dmr,...m->d...r", table, left)
    return clenshaw(torch.einsum("d...r,...r->d...", half, right), correlation)


@dataclass(frozen=True, eq=False)
class Tabulated(Dual):
    r"""Dual for one law and a range of variances; for others it asks the one it was made from."""

    source: Dual
    law: Law | None
    axis: Axis  # roots of variances
    within: tuple[Expansion, ...]  # F₀, F̃, G, H̃ in one member
    between: tuple[Expansion, ...]  # F₀, F̃, G between members
    edge: float  # how far beyond ±1 the correlation is smooth

    def same(
        self, q1: Tensor, q2: Tensor, c: Tensor, law: Law | None, *, with_h: bool = True
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        if not (self.within and self._covers(*span(q1, q2), law)):
            return self.source.same(q1, q2, c, law, with_h=with_h)
        f, g, *h = self._evaluate(self.within if with_h else self.within[:3], q1, q2, c)
        return f, g, h[0] if h else None

    def cross(self, q1: Tensor, q2: Tensor, c: Tensor, law: Law | None) -> tuple[Tensor, Tensor]:
        if not self._covers(*span(q1, q2), law):
            return self.source.cross(q1, q2, c, law)
        f, g = self._evaluate(self.between, q1, q2, c)
        return f, g

    def prepare(self, q_min: float, q_max: float, law: Law | None) -> Dual:
        return self if self._covers(q_min, q_max, law) else self.source.prepare(q_min, q_max, law)

    def _covers(self, q_min: float, q_max: float, law: Law | None) -> bool:
        slack = 1e-9  # a little outside, polynomials are as good
        low = self.axis.low if self.axis.low > 2e-6 * self.axis.high else 0.0
        inside = low**2 * (1 - slack) <= q_min <= q_max <= self.axis.high**2 * (1 + slack)
        return inside and (law is self.law or law == self.law)

    def _evaluate(
        self, expansions: tuple[Expansion, ...], q1: Tensor, q2: Tensor, c: Tensor
    ) -> list[Tensor]:
        dtype, (q1, q2, c) = c.dtype, (x.double() for x in (q1, q2, c))
        (root1, inverse1), (root2, inverse2) = roots(q1), roots(q2)
        correlation = (c * inverse1 * inverse2).clamp(-1 - 1e-12, 1 + 1e-12)
        correlation = spread(correlation, self.edge)
        basis = self.axis.basis(root1), self.axis.basis(root2)
        start, f, g, *h = (expansion(*basis, correlation) for expansion in expansions)
        size = root1 * root2
        return [x.to(dtype) for x in (start + size * f, g, *(size * x for x in h))]


def spread(correlation: Tensor, edge: float) -> Tensor:
    r"""Return a variable in [-1, 1] that has room for what happens near :math:`\rho = \pm 1`.

    What is singular on a line beyond :math:`1 + \epsilon` is smooth in
    :math:`\operatorname{artanh}(\rho / (1 + \epsilon))`, in a strip as wide as for all others.
    """
    return torch.atanh(correlation / (1 + edge)) / math.atanh(1 / (1 + edge))


def gather(variable: list[float], edge: float) -> tuple[float, ...]:
    """Return the correlations for which :func:`spread` gives these numbers."""
    mapped = torch.tensor(variable, dtype=torch.float64) * math.atanh(1 / (1 + edge))
    return tuple(((1 + edge) * torch.tanh(mapped)).clamp(-1, 1).tolist())


def span(q1: Tensor, q2: Tensor) -> tuple[float, float]:
    """Return the smallest and the largest of some variances."""
    if not (q1.numel() and q2.numel()):
        return 1.0, 1.0
    ends = [float(end) for q in (q1.detach(), q2.detach()) for end in torch.aminmax(q)]
    return min(ends), max(ends)
