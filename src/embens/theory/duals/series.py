r"""Mehler series of an activation, averaged over modulations: from coefficients to a table.

What is tabulated is free of the leading powers of :math:`r_i = \sqrt{q_i}`, so that small variances
keep their relative accuracy:

.. math::
    F = F_0(r_1, r_2) + r_1 r_2\, \tilde F(r_1, r_2, \rho), \qquad
    G = G(r_1, r_2, \rho), \qquad H = r_1 r_2\, \tilde H(r_1, r_2, \rho)

With the Hermite coefficients :math:`a_n, b_n, d_n` of :mod:`embens.theory.duals.hermite` at
:math:`s = v r`,

.. math::
    F_0 = E[a_0 a_0], \quad \tilde F = \sum_n E[v^2 b_n b_n] \frac{\rho^{n+1}}{n + 1}, \quad
    G = \sum_n E[v^2 b_n b_n]\, \rho^n, \quad \tilde H = \sum_n E[d_n d_n]\, \rho^n,

where the expectation is over :math:`v`: of the product within a member, of each factor between
members. All values of :math:`s` are interpolated from a few.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from embens.laws import Law
from embens.theory.duals import chebyshev
from embens.theory.duals.tables import Axis, Expansion, gather

SIZES = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192)  # of axes
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

    @property
    def both(self) -> Tensor:
        """Weights of the sizes."""
        return self.plus + self.minus

    @property
    def steep(self) -> Tensor:
        """Weights of the sizes, times their squares."""
        return self.both * self.size**2

    def edge(self, root: float) -> float:
        """Return that of a table up to this root: singularities at |v| r ρ of size 1 and beyond."""
        largest = min(7 * math.sqrt(float(self.steep.sum())), float(self.size.max()))
        return 1 / (1 + 4 * (largest * root) ** 2)


def normal_nodes(mean: float, std: float, width: float) -> Nodes:
    r"""Return nodes for a normal law and functions that are singular at :math:`\pm i w` and beyond.

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
    return Nodes(size[kept], plus[kept], minus[kept])


class Series:
    """Hermite coefficients for all scales :math:`|v| r`, and their averages over :math:`v`.

    Args:
        axis: of scales.
        nodes: for v.
        a: :math:`a_0` at the scales of the axis, ``(scale,)``.
        b: :math:`b_n`, ``(scale, n)``.
        d: :math:`d_n`, ``(scale, n)``.
    """

    def __init__(self, axis: Axis, nodes: Nodes, a: Tensor, b: Tensor, d: Tensor):
        self.axis, self.nodes = axis, nodes
        # Coefficients of many scales are combinations of a few.
        triangle = torch.linalg.qr(torch.cat([a[:, None], b, d], 1).T, mode="r").R
        left, values, _ = torch.linalg.svd(triangle.T, full_matrices=False)
        self._mix = left[:, values > 1e-15 * values[0]]
        self._a, self._b, self._d = (self._mix.T @ x for x in (a[:, None], b, d))

    def choose_axis(self, low: float, high: float) -> Axis:
        """Return an axis of roots of variances that is fine enough for averages over v."""
        scale = math.sqrt(float(self.nodes.steep.sum())) or 1.0
        end = self._weights(torch.tensor([high], dtype=torch.float64))[0]
        damped = self._b * 0.9 ** torch.arange(self._b.shape[1], dtype=torch.float64)
        products = torch.stack(
            [
                (x @ (y.T @ end.T)) * weight
                for x, y, weight in (
                    (self._b, self._b, self.nodes.steep),
                    (self._b, damped, self.nodes.steep),
                    (self._d, self._d, self.nodes.both),
                )
            ]
        )

        def averages(roots: Tensor) -> Tensor:
            return torch.einsum("ikj,pjk->ip", self._weights(roots), products)

        return fine_axis(Axis(low, high, scale, 0), averages)

    def within(self, axis: Axis, edge: float) -> tuple[Expansion, ...]:
        r"""Return :math:`F_0, \tilde F, G, \tilde H` within a member."""
        weights = self._weights(axis.nodes())
        first, second = torch.triu_indices(axis.count, axis.count)
        flat, steep = (  # how a pair of roots takes its value from pairs of scales
            ((weights[first].mT * weight) @ weights[second]).flatten(1)
            for weight in (self.nodes.both, self.nodes.steep)
        )

        def average(pairs: Tensor, values: Tensor) -> Tensor:
            result = values.new_empty(len(values), axis.count, axis.count)
            averaged = values.flatten(1) @ pairs.T
            result[:, first, second] = averaged
            result[:, second, first] = averaged
            return result

        def at(variable: list[float]) -> Tensor:
            f, g, h = _sum_powers(_gather(variable, edge), self._b, self._d)
            return torch.stack([average(steep, f), average(steep, g), average(flat, h)])

        start = average(flat, (self._a @ self._a.T)[None])
        return _expansions(axis, start, _expand(at))

    def between(self, axis: Axis, edge: float) -> tuple[Expansion, ...]:
        r"""Return :math:`F_0, \tilde F, G` between members."""
        weights = self._weights(axis.nodes())
        plus, minus, size = self.nodes.plus, self.nodes.minus, self.nodes.size
        a = torch.einsum("k,ikj->ij", plus + minus, weights) @ self._a
        b = a.new_empty(axis.count, self._b.shape[1])
        for parity, signed in ((0, plus - minus), (1, plus + minus)):
            average = torch.einsum("k,ikj->ij", signed * size, weights)
            b[:, parity::2] = average @ self._b[:, parity::2]
        expansion = _expand(lambda x: torch.stack(_sum_powers(_gather(x, edge), b)))
        return _expansions(axis, (a @ a.T)[None], expansion)

    def _weights(self, roots: Tensor) -> Tensor:
        """Return what coefficients at |v| r are combinations of, ``(root, v, rank)``."""
        return self.axis.interpolation(roots[:, None] * self.nodes.size) @ self._mix


def tabulate_between(
    function: Callable[..., tuple[Tensor, ...]], axis: Axis, edge: float, nodes: Nodes
) -> tuple[Axis, tuple[Expansion, ...]]:
    r"""Return expansions between members, from :math:`E[\phi \phi], E[\phi' \phi']` at fixed v.

    Both are interpolated in the scales :math:`|v_i| r_i`, and the weights of the interpolation are
    averaged over :math:`v`. Only the part that is even in :math:`\rho` is the same for either sign
    of :math:`v_1 v_2`.

    Args:
        function: takes variances, covariance, and ``with_h``.
        axis: of roots, with any number of nodes.
        edge: of the table.
        nodes: for v.

    Returns:
        The axis with nodes enough, and expansions.
    """
    most = float(nodes.size.max()) * axis.high
    scales = Axis(1e-6, max(most, 1e-3), 2.0, 0)

    def at(first: Tensor, second: Tensor, correlation: float) -> Tensor:
        s1, s2 = first[:, None], second
        f, g = function(s1**2, s2**2, s1 * s2 * correlation, with_h=False)
        return torch.stack([f / (s1 * s2), g])

    def some(first: Tensor) -> Tensor:
        second = scales.resize(12).nodes()
        return torch.cat([*at(first, second, 1.0), *at(first, second, 0.9)], dim=1)

    scales = fine_axis(scales, some)
    points = scales.nodes()
    signed = torch.stack([nodes.plus + nodes.minus, nodes.plus - nodes.minus]) * nodes.size

    def weights(roots: Tensor) -> Tensor:
        """Return the weights of values at the scales, times |v| or v, ``(2, root, scale)``."""
        each = scales.interpolation(roots[:, None] * nodes.size)
        return torch.einsum("pk,ikj->pij", signed, each)

    def average(left: Tensor, right: Tensor, correlations: list[float]) -> Tensor:
        """Return F̃ and G at some ρ ≥ 0 and then at their negatives."""
        result = left.new_empty(2, 2, len(correlations), left.shape[1], right.shape[1])
        for i, rho in enumerate(correlations):
            ahead, behind = at(points, points, rho), at(points, points, -rho)
            even, odd = (ahead + behind) / 2, (ahead - behind) / 2
            # G has another factor v₁v₂, which is odd.
            parts = [left[[0, 1]] @ even @ right[[0, 1]].mT, left[[1, 0]] @ odd @ right[[1, 0]].mT]
            result[:, 0, i], result[:, 1, i] = parts[0] + parts[1], parts[0] - parts[1]
        return result.flatten(1, 2)

    right = weights(axis.resize(6).nodes())
    axis = fine_axis(
        axis,
        lambda roots: average(weights(roots), right, [1.0, 0.9]).permute(2, 0, 1, 3).flatten(1),
    )
    left = weights(axis.nodes())
    expansion = _expand(lambda x: average(left, left, _gather(x, edge)))
    nothing = torch.zeros(1, axis.count, axis.count, dtype=torch.float64)
    return axis, _expansions(axis, nothing, expansion)


def tabulate_within(
    function: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]], axis: Axis, edge: float
) -> tuple[Axis, tuple[Expansion, ...]]:
    r"""Return an axis and expansions within a member, from a function that gives F, G, H."""

    def at(first: Tensor, second: Tensor, correlation: Tensor) -> Tensor:
        size = first * second
        f, g, h = function(first**2, second**2, size * correlation)
        return torch.stack([f / size, g, h / size])

    def some(roots: Tensor) -> Tensor:
        others = axis.resize(6).nodes()[:, None]
        rho = torch.tensor([1.0, 0.9], dtype=torch.float64)
        return at(roots[:, None, None], others, rho).transpose(0, 1).flatten(1)

    axis = fine_axis(axis, some)
    first, second = torch.triu_indices(axis.count, axis.count)
    roots = axis.nodes()

    def average(variable: list[float]) -> Tensor:
        x = torch.tensor([*variable, *(-x for x in variable)], dtype=torch.float64)
        values = at(roots[first], roots[second], gather(x, edge)[:, None])
        result = values.new_empty(3, len(x), axis.count, axis.count)
        result[:, :, first, second] = values
        result[:, :, second, first] = values
        return result

    nothing = torch.zeros(1, axis.count, axis.count, dtype=torch.float64)
    return axis, _expansions(axis, nothing, _expand(average))


def fine_axis(axis: Axis, function: Callable[[Tensor], Tensor]) -> Axis:
    """Return an axis with nodes enough to interpolate a function of the roots."""
    middle = axis.resize(16).nodes()
    middle = (middle[1:] + middle[:-1]) / 2
    expected = function(middle)
    scale = expected.abs().max().clamp(min=1e-300)
    for count in SIZES:
        axis = axis.resize(count)
        error = axis.interpolation(middle) @ function(axis.nodes()) - expected
        if float((error.abs() / scale).max()) < 1e-13:
            break
    return axis


def _gather(variable: list[float], edge: float) -> list[float]:
    return gather(torch.tensor(variable, dtype=torch.float64), edge).tolist()


def _sum_powers(correlations: list[float], b: Tensor, d: Tensor | None = None) -> list[Tensor]:
    """Sum the series of F̃, G, H̃ for pairs of rows, at these ρ ≥ 0 and then at their negatives."""
    quantities = 2 if d is None else 3
    result = [b.new_empty(2, len(correlations), len(b), len(b)) for _ in range(quantities)]
    for i, rho in enumerate(correlations):
        count = b.shape[1]
        if rho < 1:
            count = min(count, int(-40 / math.log(max(rho, 1e-17))) + 2)
        n = torch.arange(count, dtype=torch.float64)
        power = rho**n
        terms = [(b, power * rho / (n + 1), -1), (b, power, 1), (d, power, 1)]
        for values, (x, factor, sign) in zip(result, terms, strict=False):
            assert x is not None
            even, odd = ((x[:, p:count:2] * factor[p::2]) @ x[:, p:count:2].T for p in (0, 1))
            values[0, i] = even + odd
            values[1, i] = sign * (even - odd)
    return [values.flatten(0, 1) for values in result]


def _expand(function: Callable[[list[float]], Tensor]) -> Tensor:
    """Return Chebyshev coefficients, as many as are needed.

    Args:
        function: gives ``(quantity, x, ...)`` at some x ≥ 0 and then at their negatives.

    Returns:
        ``(quantity, degree, ...)``.
    """
    known: dict[float, Tensor] = {}
    result, needed = torch.empty(0), 0
    for count in _DEGREES:
        nodes = chebyshev.nodes(count)
        new = [rho for rho in nodes[: count // 2 + 1].tolist() if rho not in known]
        signed = [*new, *(-rho for rho in new)]
        known.update(zip(signed, function(new).unbind(1), strict=True))
        values = torch.stack([known[rho] for rho in nodes.tolist()], dim=1)
        result = torch.einsum("rs,qs...->qr...", chebyshev.to_coefficients(count), values)
        size = result.abs().flatten(2).amax(2)
        visible = (size > 1e-13 * size.amax(1, keepdim=True)).any(0).nonzero()
        needed = int(visible.max()) + 1 if len(visible) else 0
        if needed < count - 4:
            break
    return result[:, : max(2, needed)]


def _expansions(axis: Axis, start: Tensor, others: Tensor) -> tuple[Expansion, ...]:
    """Return expansions from values at the nodes of both roots."""
    matrix = chebyshev.to_coefficients(axis.count)
    return (
        Expansion.of(matrix @ start @ matrix.T, cut=1e-16),  # F is small where roots are
        *(Expansion.of(matrix @ values @ matrix.T) for values in others),
    )
