r"""Tables: expectations of a smooth activation for one law and a range of variances.

A table holds Chebyshev coefficients in three variables: in each root of a variance, mapped by
:math:`\log(1 + \kappa r)`, and in the correlation. Rows of a kernel share one root and columns the
other, so those two sums are matrix products, and each entry then sums a series in its correlation.
All of it is differentiable, forward and backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from embens.laws import Law
from embens.theory.duals import chebyshev
from embens.theory.duals.expectations import Dual, roots

_NUMBERS = 2**19  # coefficients held at once


@dataclass(frozen=True)
class Axis:
    """Interval of roots of variances, and interpolation on it."""

    low: float
    high: float
    scale: float
    count: int

    def resize(self, count: int) -> Axis:
        """Return the same interval with another number of nodes."""
        return replace(self, count=count)

    def nodes(self) -> Tensor:
        """Return the roots at which values are needed."""
        start, width = self._ends()
        mapped = start + (chebyshev.nodes(self.count) + 1) / 2 * width
        return (torch.expm1(mapped) / self.scale).clamp(self.low, self.high)

    def basis(self, root: Tensor) -> Tensor:
        """Return the polynomials at these roots, on a new last axis."""
        start, width = self._ends()
        mapped = 2 * (torch.log1p(self.scale * root) - start) / width - 1
        return chebyshev.basis(mapped, self.count)

    def interpolation(self, root: Tensor) -> Tensor:
        """Return the weights of values at the nodes, on a new last axis."""
        return self.basis(root) @ chebyshev.to_coefficients(self.count)

    def _ends(self) -> tuple[float, float]:
        start = math.log1p(self.scale * self.low)
        return start, math.log1p(self.scale * self.high) - start


@dataclass(frozen=True, eq=False)
class Expansion:
    """Function of two roots and a correlation, by the coefficients that matter.

    Attributes:
        table: ``(degree, m, rank)``.
        mix: ``(m, rank)``, what is made of the polynomials in the second root.
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
        layout = _Layout.of(correlation.shape, basis1.shape[:-1], basis2.shape[:-1])
        count = len(mix)  # the basis may go on
        left, right = layout.arrange(basis1[..., :count], basis2[..., :count] @ mix)
        points = correlation.permute(layout.order).reshape(layout.counts)
        parts = [
            torch.cat([_sum(table, left[b, i], right[b], points[b, :, i]) for i in rows], dim=2)
            for b, rows in layout.chunks(len(table))
        ]
        return layout.restore(torch.cat(parts))


@dataclass(frozen=True)
class _Layout:
    """Axes of a kernel: shared by both roots, by none, of the first root, of the second."""

    shape: tuple[int, ...]
    groups: tuple[list[int], ...]

    @classmethod
    def of(cls, shape: torch.Size, shape1: torch.Size, shape2: torch.Size) -> _Layout:
        groups: tuple[list[int], ...] = ([], [], [], [])
        kinds = {(True, True): 0, (False, False): 1, (True, False): 2, (False, True): 3}
        padded = [(1,) * (len(shape) - len(s)) + tuple(s) for s in (shape1, shape2)]
        for axis, (size1, size2) in enumerate(zip(*padded, strict=True)):
            groups[kinds[size1 > 1, size2 > 1]].append(axis)
        return cls(tuple(shape), groups)

    @property
    def order(self) -> list[int]:
        return [axis for group in self.groups for axis in group]

    @property
    def counts(self) -> list[int]:
        return [math.prod(self.shape[axis] for axis in group) for group in self.groups]

    def arrange(self, of_root1: Tensor, of_root2: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(shared, row, polynomial)`` and ``(shared, column, polynomial)``."""
        shared, _, rows, columns = self.counts
        result = []
        for x, count in ((of_root1, rows), (of_root2, columns)):
            x = x[(None,) * (len(self.shape) + 1 - x.dim())]
            x = x.permute(*self.order, len(self.shape))
            result.append(x.reshape(shared, count, x.shape[-1]))
        return result[0], result[1]

    def restore(self, x: Tensor) -> Tensor:
        """Return the kernel with its own axes."""
        order = self.order
        x = x.reshape([self.shape[axis] for axis in order])
        return x.permute(sorted(range(len(order)), key=order.__getitem__))

    def chunks(self, degrees: int) -> Iterator[tuple[slice, list[slice]]]:
        """Yield slices of the shared axis, each with slices of rows, of bounded size."""
        shared, free, rows, columns = self.counts
        row = max(1, columns * max(degrees, free))
        few = max(1, min(rows, _NUMBERS // row))
        some = max(1, _NUMBERS // (row * few))
        within = [slice(i, i + few) for i in range(0, max(rows, 1), few)]
        for start in range(0, max(shared, 1), some):
            yield slice(start, start + some), within


def _sum(table: Tensor, left: Tensor, right: Tensor, correlation: Tensor) -> Tensor:
    """Return ``(shared, free, row, column)``."""
    degrees, terms, rank = table.shape
    shared, rows, columns = len(left), left.shape[1], right.shape[1]
    half = left.reshape(-1, terms) @ table.transpose(0, 1).reshape(terms, -1)
    half = half.reshape(shared, rows, degrees, rank).permute(2, 0, 1, 3)
    if shared == 1:
        series = half.reshape(-1, rank) @ right[0].T
    elif rows == columns == 1:
        series = (half * right.mT[:, None, :, 0]).sum(3)
    else:
        series = half @ right.mT
    series = series.reshape(degrees, shared, 1, rows, columns)
    return chebyshev.clenshaw(series, correlation)


@dataclass(frozen=True, eq=False)
class Table(Dual):
    r"""Dual for one law and a range of variances; for others it asks the one it was made from.

    Attributes:
        source: the dual without tables.
        law: of the modulation.
        axis: roots of variances.
        within: :math:`F_0, \tilde F, G, \tilde H` in one member.
        between: :math:`F_0, \tilde F, G` between members.
        edge: how far beyond ±1 the correlation is smooth; None for far.
    """

    source: Dual
    law: Law | None
    axis: Axis
    within: tuple[Expansion, ...]
    between: tuple[Expansion, ...]
    edge: float | None = None

    def same(
        self, q1: Tensor, q2: Tensor, c: Tensor, law: Law | None, *, with_h: bool = True
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        if not (self.within and self.covers(*span(q1, q2), law)):
            return self.source.same(q1, q2, c, law, with_h=with_h)
        f, g, *h = self._evaluate(self.within if with_h else self.within[:3], q1, q2, c)
        return f, g, h[0] if h else None

    def cross(self, q1: Tensor, q2: Tensor, c: Tensor, law: Law | None) -> tuple[Tensor, Tensor]:
        if not self.covers(*span(q1, q2), law):
            return self.source.cross(q1, q2, c, law)
        f, g = self._evaluate(self.between, q1, q2, c)
        return f, g

    def prepare(self, q_min: float, q_max: float, law: Law | None) -> Dual:
        return self if self.covers(q_min, q_max, law) else self.source.prepare(q_min, q_max, law)

    def covers(self, q_min: float, q_max: float, law: Law | None) -> bool:
        """Whether it can serve this law and these variances."""
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


def spread(correlation: Tensor, edge: float | None) -> Tensor:
    r"""Return a variable in [-1, 1] that has room for what happens near :math:`\rho = \pm 1`.

    What is singular on a line beyond :math:`1 + \epsilon` is smooth in
    :math:`\operatorname{artanh}(\rho / (1 + \epsilon))`, in a strip as wide as for all others.
    """
    if edge is None:
        return correlation
    return torch.atanh(correlation / (1 + edge)) / math.atanh(1 / (1 + edge))


def gather(variable: Tensor, edge: float | None) -> Tensor:
    """Return the correlations for which :func:`spread` gives these numbers."""
    if edge is None:
        return variable
    return ((1 + edge) * torch.tanh(variable * math.atanh(1 / (1 + edge)))).clamp(-1, 1)


def span(q1: Tensor, q2: Tensor) -> tuple[float, float]:
    """Return the smallest and the largest of some variances."""
    if not (q1.numel() and q2.numel()):
        return 1.0, 1.0
    ends = [float(end) for q in (q1.detach(), q2.detach()) for end in torch.aminmax(q)]
    return min(ends), max(ends)
