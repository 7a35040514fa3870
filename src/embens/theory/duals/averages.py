r"""Averages over modulations: from expectations at fixed :math:`v` to a table for a law.

At fixed :math:`v` an activation has three functions of the scales :math:`s_i = |v_i| \sqrt{q_i}`
and of the correlation, free of leading powers, so that small variances keep their accuracy:

.. math::
    F = F_0(s_1, s_2) + s_1 s_2\, \tilde F(s_1, s_2, \rho), \qquad
    G = E[\phi' \phi'], \qquad H = E[g_1 g_2\, \phi' \phi'] .

They are known at the nodes of an axis of scales and interpolated, so that an average over
:math:`v` is one of the weights of the interpolation: of products of weights within a member, where
both scales have the same :math:`v`, and of each factor between members.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from embens.laws import Law
from embens.theory.duals.series import Axis, chebyshev_nodes, to_chebyshev
from embens.theory.duals.tables import Expansion, gather

_DEGREES = (33, 65, 129, 257, 513, 1025)


@dataclass(frozen=True)
class Nodes:
    """Quadrature nodes for |v|, with the weights of either sign."""

    size: Tensor
    plus: Tensor
    minus: Tensor

    @classmethod
    def of(cls, law: Law | None, count: int) -> Nodes:
        """Return those of a law, without the ones that have no weight."""
        one = torch.ones(1, dtype=torch.float64, device="cpu")
        v, weights = (one, one) if law is None else law.quadrature(count)
        kept = weights * (1 + v**4) > 1e-18
        v, weights = v[kept], weights[kept]
        size = torch.where(v.abs() > 1e-12, v.abs(), 0.0)
        size, index = torch.unique(size, return_inverse=True)
        plus, minus = (
            torch.zeros_like(size).index_add_(0, index, weights * side) for side in (v >= 0, v < 0)
        )
        both = plus + minus
        symmetric = (plus - minus).abs() <= 1e-14 * both  # to the last bit, so that 0 is 0
        return cls(size, *(torch.where(symmetric, both / 2, x) for x in (plus, minus)))

    @classmethod
    def of_normal(cls, mean: float, std: float, width: float) -> Nodes:
        r"""Return those of a normal law, for functions singular at :math:`\pm i w` and beyond.

        With :math:`v = w \sinh t` singularities lie at :math:`\operatorname{Im} t = \pm \pi / 2`,
        wherever they were, and the trapezoid rule in :math:`t` needs few nodes.
        """
        width = min(width, std)
        step = min(0.14, 0.45 * std / max(abs(mean), 1e-300))
        far = abs(mean) + 9 * std
        t = step * (torch.arange(math.ceil(math.asinh(far / width) / step)).double() + 0.5)
        size = width * torch.sinh(t)
        density = step * width * torch.cosh(t) / (std * math.sqrt(2 * math.pi))
        plus, minus = (torch.exp(-(((s * size - mean) / std) ** 2) / 2) * density for s in (1, -1))
        kept = (plus + minus) * (1 + size**4) > 1e-18
        return cls(size[kept], plus[kept], minus[kept])

    @property
    def both(self) -> Tensor:
        return self.plus + self.minus

    @property
    def steep(self) -> Tensor:
        return self.both * self.size**2

    @property
    def spread(self) -> float:
        """Root of the second moment."""
        return math.sqrt(float(self.steep.sum()))

    def edge(self, root: float) -> float:
        """Return that of a table up to this root: singularities at |v| r ρ of size 1 and beyond."""
        largest = min(7 * self.spread, float(self.size.max()))
        return 1 / (1 + 4 * (largest * root) ** 2)


class Fixed(ABC):
    """Expectations at fixed modulations, as combinations of a few functions of each scale.

    Those are interpolated on ``axis`` and mixed; ``start`` is :math:`F_0`, ``(rank, rank)``.
    """

    axis: Axis
    mix: Tensor
    start: Tensor

    def basis(self, scales: Tensor) -> Tensor:
        """Return those functions at these scales, on a new last axis of size ``rank``."""
        return self.axis.interpolation(scales) @ self.mix

    @abstractmethod
    def at(self, correlations: tuple[float, ...]) -> Tensor:
        r"""Return :math:`\tilde F, G, H` at some :math:`\rho ≥ 0` and then at their negatives.

        The shape is ``(3, correlation, rank, rank)``.
        """


class Formula(Fixed):
    """Expectations by a closed form, which vanish with a scale, for scales up to ``most``.

    ``function`` takes variances and covariance; it gives :math:`E[φφ], E[φ'φ'], E[y_1 y_2 φ'φ']`.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], most: float):
        self._function = function
        axis = Axis(1e-6, max(most, 1e-3), 2.0)
        others = axis.resize(12).nodes()
        rho = torch.tensor([1.0, 0.9], dtype=torch.float64)[:, None, None]
        self.axis = axis.refine(lambda s: self._values(s, others, rho)[:2].movedim(2, 0).flatten(1))
        self.mix = torch.eye(self.axis.count, dtype=torch.float64)
        self.mix = _few_directions(torch.cat(list(self.at((1.0, 0.9, 0.5, 0.0)).flatten(0, 1)), 1))
        self.start = torch.zeros_like(self.mix.T @ self.mix)

    def _values(self, first: Tensor, second: Tensor, correlation: Tensor) -> Tensor:
        size = first[:, None] * second
        f, g, h = self._function(first[:, None] ** 2, second**2, size * correlation, with_h=True)
        return torch.stack([f / size, g, h / size])

    def at(self, correlations: tuple[float, ...]) -> Tensor:
        rho, nodes = torch.tensor(correlations, dtype=torch.float64), self.axis.nodes()
        values = self._values(nodes, nodes, torch.cat([rho, -rho])[:, None, None])
        return self.mix.T @ values @ self.mix


class Mehler(Fixed):
    r"""Expectations by Hermite coefficients :math:`a_0, b_n, d_n` at the scales of an axis.

    .. math::
        F_0 = a_0 a_0, \quad \tilde F = \sum_n b_n b_n \frac{\rho^{n+1}}{n + 1}, \quad
        G = \sum_n b_n b_n\, \rho^n, \quad H = \sum_n d_n d_n\, \rho^n
    """

    def __init__(self, axis: Axis, a: Tensor, b: Tensor, d: Tensor):
        self.axis = axis
        self.mix = _few_directions(torch.cat([a[:, None], b, d], 1))
        a, self._b, self._d = (self.mix.T @ x for x in (a[:, None], b, d))
        self.start = a @ a.T

    def at(self, correlations: tuple[float, ...]) -> Tensor:
        rank = len(self._b)
        result = self._b.new_empty(3, 2, len(correlations), rank, rank)
        for i, rho in enumerate(correlations):
            count = self._b.shape[1]
            if rho < 1:
                count = min(count, int(-40 / math.log(max(rho, 1e-17))) + 2)
            n = torch.arange(count, dtype=torch.float64)
            power = rho**n
            terms = ((self._b, power * rho / (n + 1), -1), (self._b, power, 1), (self._d, power, 1))
            for values, (x, factor, sign) in zip(result, terms, strict=True):
                even, odd = ((x[:, p:count:2] * factor[p::2]) @ x[:, p:count:2].T for p in (0, 1))
                values[0, i] = even + odd
                values[1, i] = sign * (even - odd)
        return result.flatten(1, 2)


def _few_directions(rows: Tensor) -> Tensor:
    """Return the directions, in columns, of which rows for many scales are combinations."""
    triangle = torch.linalg.qr(rows.T, mode="r").R
    left, values, _ = torch.linalg.svd(triangle.T, full_matrices=False)
    return left[:, values > 1e-15 * values[0]]


class Averages:
    """Averages over a law of expectations at fixed modulations."""

    def __init__(self, fixed: Fixed, nodes: Nodes):
        self.fixed, self.nodes = fixed, nodes
        self._at = cache(fixed.at)

    def within(self, axis: Axis, edge: float) -> tuple[Axis, tuple[Expansion, ...]]:
        r"""Return :math:`F_0, \tilde F, G, H` within a member, on an axis fine enough."""
        flat, steep = self.nodes.both, self.nodes.steep
        end = self._weights(torch.tensor([axis.high], dtype=torch.float64))[0]
        some = (
            self._at((1.0, 0.9))[:, :2] @ end.T * torch.stack([steep, steep, flat])[:, None, None]
        )
        axis = axis.refine(
            lambda roots: torch.einsum("ikj,qrjk->iqr", self._weights(roots), some).flatten(1)
        )
        weights = self._weights(axis.nodes())
        first, second = torch.triu_indices(axis.count, axis.count)
        pairs = [  # how a pair of roots takes its value from pairs of scales
            ((weights[first].mT * weight) @ weights[second]).flatten(1) for weight in (steep, flat)
        ]

        def average(pair: Tensor, values: Tensor) -> Tensor:
            result = values.new_empty(len(values), axis.count, axis.count)
            averaged = values.flatten(1) @ pair.T
            result[:, first, second] = averaged
            result[:, second, first] = averaged
            return result

        def at(variable: list[float]) -> Tensor:
            values = self._at(gather(variable, edge))
            return torch.stack(
                [average(pairs[i], x) for i, x in zip((0, 0, 1), values, strict=True)]
            )

        start = average(pairs[1], self.fixed.start[None])
        return axis, _expansions(axis, start, _expand(at))

    def between(self, axis: Axis, edge: float) -> tuple[Axis, tuple[Expansion, ...]]:
        r"""Return :math:`F_0, \tilde F, G` between members, on an axis fine enough.

        Only the part that is even in the correlation is the same for either sign of
        :math:`v_1 v_2`; :math:`G` has another factor :math:`v_1 v_2`, which is odd.
        """
        plus, minus, size = self.nodes.plus, self.nodes.minus, self.nodes.size
        signed = torch.stack([plus + minus, plus - minus]) * size

        def side(roots: Tensor) -> Tensor:
            return torch.einsum("pk,ikj->pij", signed, self._weights(roots))

        def average(left: Tensor, right: Tensor, correlations: tuple[float, ...]) -> Tensor:
            ahead, behind = self._at(correlations)[:2].chunk(2, dim=1)
            even, odd = (ahead + behind) / 2, (ahead - behind) / 2
            even = left[[0, 1], None] @ even @ right[[0, 1], None].mT
            odd = left[[1, 0], None] @ odd @ right[[1, 0], None].mT
            return torch.cat([even + odd, even - odd], dim=1)

        some = side(axis.resize(6).nodes())
        axis = axis.refine(
            lambda roots: average(side(roots), some, (1.0, 0.9)).movedim(2, 0).flatten(1)
        )
        all_of = side(axis.nodes())
        means = torch.einsum("k,ikj->ij", plus + minus, self._weights(axis.nodes()))
        start = means @ self.fixed.start @ means.T
        others = _expand(lambda x: average(all_of, all_of, gather(x, edge)))
        return axis, _expansions(axis, start[None], others)

    def _weights(self, roots: Tensor) -> Tensor:
        """Return what expectations at |v| r are combinations of, ``(root, v, rank)``."""
        return self.fixed.basis(roots[:, None] * self.nodes.size)


def _expand(function: Callable[[list[float]], Tensor]) -> Tensor:
    """Return Chebyshev coefficients ``(quantity, degree, ...)``, as many as are needed.

    ``function`` gives ``(quantity, x, ...)`` at some x ≥ 0 and then at their negatives.
    """
    known: dict[float, Tensor] = {}
    result, needed = torch.empty(0), 0
    for count in _DEGREES:
        nodes = chebyshev_nodes(count)
        new = [rho for rho in nodes[: count // 2 + 1].tolist() if rho not in known]
        signed = [*new, *(-rho for rho in new)]
        known.update(zip(signed, function(new).unbind(1), strict=True))
        values = torch.stack([known[rho] for rho in nodes.tolist()], dim=1)
        result = torch.einsum("rs,qs...->qr...", to_chebyshev(count), values)
        size = result.abs().flatten(2).amax(2)
        visible = (size > 1e-13 * size.amax(1, keepdim=True)).any(0).nonzero()
        needed = int(visible.max()) + 1 if len(visible) else 0
        if needed < count - 4:
            break
    return result[:, : max(2, needed)]


def _expansions(axis: Axis, start: Tensor, others: Tensor) -> tuple[Expansion, ...]:
    """Return expansions from values at the nodes of both roots."""
    matrix = to_chebyshev(axis.count)
    return (
        Expansion.of(matrix @ start @ matrix.T, cut=1e-16),  # F is small where roots are
        *(Expansion.of(matrix @ values @ matrix.T) for values in others),
    )
