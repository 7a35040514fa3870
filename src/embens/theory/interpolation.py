r"""Chebyshev interpolation of expectations in the variances and the correlation.

The series of :mod:`embens.theory.quadrature` are exact but slow: a kernel has many entries, and
each of them sums hundreds of terms at up to a hundred values of the modulation. The sums depend on
three variables only, the roots :math:`r_1, r_2` of the variances and the correlation :math:`\rho`.
A :class:`Table` interpolates them by Chebyshev polynomials in three variables,

.. math::
    s = \log(1 + \kappa r_i), \qquad
    t = \operatorname{artanh}(\rho / (1 + \epsilon)) / \operatorname{artanh}(1 / (1 + \epsilon)) .

Rows of a kernel share :math:`r_1` and columns share :math:`r_2`, so the sums over polynomials in
the roots are matrix products. Each entry then sums one series in :math:`t`. The second map moves
the singularities beyond :math:`|\rho| = 1 + \epsilon` far from the interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from embens.theory.expectations import roots

ROUNDING = 1e-13
"""Relative size of the last Chebyshev coefficients at which a series is long enough."""

_MAX_ENTRIES = 2**20  # coefficients in memory at once


def chebyshev_nodes(count: int) -> Tensor:
    """Return the extrema of the Chebyshev polynomial of degree ``count - 1``, from 1 to -1.

    Example:
        >>> chebyshev_nodes(3)
        tensor([ 1.,  0., -1.], dtype=torch.float64)
    """
    index = torch.arange(count - 1, -count, -2, dtype=torch.float64, device="cpu")
    return torch.sin(index * (math.pi / 2 / (count - 1)))  # symmetric to the last bit


@lru_cache(maxsize=32)
@torch.inference_mode(False)
def chebyshev_transform(count: int) -> Tensor:
    """Return the matrix from values at the nodes to Chebyshev coefficients."""
    index = torch.arange(count, dtype=torch.int64, device="cpu")
    phase = (index[:, None] * index) % (2 * (count - 1))
    matrix = torch.cos(phase.double() * (math.pi / (count - 1))) * (2 / (count - 1))
    matrix[[0, -1]] /= 2
    matrix[:, [0, -1]] /= 2
    return matrix


def remainder(coefficients: Tensor, floor: float = 0.0) -> float:
    """Return the size of the last coefficients relative to the largest one.

    Args:
        coefficients: Chebyshev coefficients, ``(degree, …)``.
        floor: Size that counts as the largest one if all are smaller, such as those of a function
            that is zero up to rounding errors.
    """
    sizes = coefficients.abs().reshape(len(coefficients), -1).amax(1)
    largest = max(float(sizes.max()), floor)
    if largest == 0:
        return 0.0
    return float(sizes[-3:].max()) / largest


@dataclass(frozen=True)
class RootAxis:
    r"""The interval of roots of variances, from 0 to ``high``, with :math:`s = \log(1 + κ r)`.

    Attributes:
        high: Largest root.
        scale: The factor κ.
        count: Number of nodes.
    """

    high: float
    scale: float
    count: int

    def nodes(self) -> Tensor:
        """Return the roots at the nodes, from ``high`` to 0."""
        unit = (chebyshev_nodes(self.count) + 1) / 2
        s = unit * math.log1p(self.scale * self.high)
        return (torch.expm1(s) / self.scale).clamp(0, self.high)

    def polynomials(self, root: Tensor) -> Tensor:
        """Return the Chebyshev polynomials at some roots, on a new last axis."""
        x = 2 * torch.log1p(self.scale * root) / math.log1p(self.scale * self.high) - 1
        values = [torch.ones_like(x), x]
        for _ in range(self.count - 2):
            values.append(2 * x * values[-1] - values[-2])
        return torch.stack(values, dim=-1)


@dataclass(frozen=True)
class CorrelationAxis:
    """The interval of correlations, from -1 to 1.

    Attributes:
        margin: Distance ε between the interval and the nearest singularity.
        count: Number of nodes.
    """

    margin: float
    count: int

    def nodes(self) -> Tensor:
        """Return the correlations at the nodes, from 1 to -1."""
        t = chebyshev_nodes(self.count)
        rho = (1 + self.margin) * torch.tanh(t * math.atanh(1 / (1 + self.margin)))
        return rho.clamp(-1, 1)

    def to_unit(self, rho: Tensor) -> Tensor:
        """Return the variable t of some correlations."""
        return torch.atanh(rho / (1 + self.margin)) / math.atanh(1 / (1 + self.margin))


@dataclass(frozen=True)
class Sums:
    r"""Chebyshev coefficients ``(degree, count, count)`` of the sums of one kind of pairs.

    The expectations are :math:`F = f_0 + r_1 r_2 f`, :math:`G = g` and :math:`H = r_1 r_2 h`.
    This form keeps the relative accuracy where variances are small.
    """

    f_start: Tensor
    f: Tensor
    g: Tensor
    h: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Table:
    """Expectations of one activation for one law and a range of variances.

    Attributes:
        root_axis: Axis of both roots of variances.
        correlation_axis: Axis of the correlation.
        within: Sums within a member.
        between: Sums between members.
    """

    root_axis: RootAxis
    correlation_axis: CorrelationAxis
    within: Sums
    between: Sums

    def same(
        self,
        q1: Tensor,
        q2: Tensor,
        c: Tensor,
        *,
        with_h: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute F, G and H within a member; see :meth:`embens.theory.Dual.same`."""
        return self._evaluate(self.within, q1, q2, c, with_h=with_h)

    def cross(self, q1: Tensor, q2: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """Compute F and G between members; see :meth:`embens.theory.Dual.cross`."""
        return self._evaluate(self.between, q1, q2, c, with_h=False)[:2]

    def _evaluate(
        self,
        sums: Sums,
        q1: Tensor,
        q2: Tensor,
        c: Tensor,
        *,
        with_h: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        (root1, root2), rho = roots_and_correlation(q1, q2, c)
        t = self.correlation_axis.to_unit(rho)
        first = self.root_axis.polynomials(root1)
        second = self.root_axis.polynomials(root2)
        size = root1 * root2
        f_start = evaluate(sums.f_start, first, second, t)
        f = f_start + size * evaluate(sums.f, first, second, t)
        g = evaluate(sums.g, first, second, t)
        if not with_h:
            return f.to(c.dtype), g.to(c.dtype), None
        assert sums.h is not None
        h = size * evaluate(sums.h, first, second, t)
        return f.to(c.dtype), g.to(c.dtype), h.to(c.dtype)


def roots_and_correlation(
    q1: Tensor, q2: Tensor, c: Tensor
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return both roots of the variances and the correlation, in float64."""
    root1, inverse1 = roots(q1.double())
    root2, inverse2 = roots(q2.double())
    rho = c.double() * inverse1 * inverse2
    return (root1, root2), rho.clamp(-1 - 1e-12, 1 + 1e-12)


def expand(values: Tensor) -> Tensor:
    """Return Chebyshev coefficients from values at the nodes, ``(correlation, root, root)``.

    Negligible coefficients of high degree in the correlation are left out.
    """
    if len(values) > 1:
        values = torch.tensordot(chebyshev_transform(len(values)), values, 1)
    matrix = chebyshev_transform(values.shape[-1])
    coefficients = matrix @ values @ matrix.T
    sizes = coefficients.abs().amax((1, 2))
    relevant = (sizes > 1e-15 * sizes.max()).nonzero()
    degree = int(relevant.max()) if len(relevant) else 0
    return coefficients[: degree + 1]


def evaluate(coefficients: Tensor, first: Tensor, second: Tensor, t: Tensor) -> Tensor:
    """Sum a Chebyshev series in three variables.

    Args:
        coefficients: Coefficients ``(degree, count, count)``.
        first: Polynomials of the first root, ``(*axes, count)``.
        second: Polynomials of the second root, ``(*axes, count)``; ``axes`` broadcast with ``t``.
        t: Variable of the correlation.

    Returns:
        The sums, of the shape of ``t``.
    """
    if not coefficients.any():
        return torch.zeros_like(t)
    rows = torch.einsum("dmk,...m->d...k", coefficients.to(t.device), first)
    # Clenshaw's recurrence, from the highest degree down.
    value = next_value = torch.zeros_like(t)
    twice = 2 * t
    for part in reversed(rows.split(max(1, _MAX_ENTRIES // max(1, t.numel())))):
        entries = torch.einsum("d...k,...k->d...", part, second)
        for entry in reversed(entries.unbind()):
            previous = value
            value = torch.addcmul(entry - next_value, twice, value)
            next_value = previous
    return value - t * next_value
