r"""Duals of smooth activations without a closed form: tanh, softplus, SiLU and others.

Let :math:`g \sim N(0, 1)`, :math:`h_n` the orthonormal Hermite polynomials, :math:`r_i =
\sqrt{q_i}`, :math:`\rho = c / (r_1 r_2)` and, for a fixed modulation :math:`v`, :math:`x_i = |v|
r_i`. The coefficients

.. math::
    a(x) = E[\phi(x g)], \qquad c_n(x) = E[\phi'(x g)\, h_n(g)], \qquad
    d_n = \sqrt{n}\, c_{n-1} + \sqrt{n + 1}\, c_{n+1}

are computed by the trapezoidal rule in :math:`g`. It converges exponentially and beats
Gauss–Hermite by several digits, because the poles of :math:`\phi(v z)` approach the real axis as
:math:`|v|` grows. Mehler's formula :math:`E[h_m(g_1) h_n(g_2)] = \delta_{mn} \rho^n` then gives

.. math::
    F &= a(x_1)\, a(x_2)
        + x_1 x_2 \sum_n c_n(x_1)\, c_n(x_2)\, \frac{\rho^{n+1}}{n + 1}, \\
    G &= v^2 \sum_n c_n(x_1)\, c_n(x_2)\, \rho^n, \qquad
    H = r_1 r_2 \sum_n d_n(x_1)\, d_n(x_2)\, \rho^n .

Within a member these sums are averaged over :math:`v` by quadrature. Between members each factor is
averaged on its own. There the sign of :math:`v` matters: changing it turns :math:`c_n` into
:math:`(-1)^n c_n`.

The number of terms is doubled until the series at :math:`\rho = 1` and the largest variance, the
hardest case, agree with direct integration. A result with a relative error above ``ACCURACY``
gives a warning, above ``WORST`` an error.

Kernels have too many entries to sum these series for each of them. A prepared dual therefore
interpolates the sums; see :mod:`embens.theory.interpolation`.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from embens.laws import Law
from embens.theory.expectations import Dual, differs_between_members
from embens.theory.interpolation import (
    ROUNDING,
    CorrelationAxis,
    RootAxis,
    Sums,
    Table,
    chebyshev_transform,
    expand,
    normalise,
    remainder,
)
from embens.theory.law_nodes import LawNodes, law_nodes

ACCURACY = 1e-8
"""Relative error above which a warning is given."""
WORST = 1e-4
"""Relative error above which no result is returned."""

_TERMS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_REACH = 12.0  # exp(-REACH² / 4) is below the rounding error
_HELD_NUMBERS = 2**23  # coefficients in memory at once
_ROOT_COUNTS = (8, 12, 16, 24, 32, 48, 64, 96)
_CORRELATION_COUNTS = (33, 65, 129, 257, 513, 1025)
_HELD_TABLES = 32  # of one activation


def largest_variance(q1: Tensor, q2: Tensor) -> float:
    """Return the largest of some variances, or 1 if there is none.

    Raises:
        ValueError: If a variance is negative, infinite or NaN.
    """
    if not (q1.numel() and q2.numel()):
        return 1.0
    low1, high1 = q1.detach().aminmax()
    low2, high2 = q2.detach().aminmax()
    low = min(float(low1), float(low2))
    high = max(float(high1), float(high2))
    valid = low >= 0 and math.isfinite(high) and not math.isnan(float(high1 + high2))
    if not valid:
        raise ValueError(
            f"variances must be finite and >= 0; got values from {low:.6g} to {high:.6g}. "
            "Look for infinite or missing values among the inputs."
        )
    return high if high > 0 else 1.0


@dataclass(frozen=True)
class Resolution:
    """Nodes of the law and number of Hermite polynomials that reach the accuracy."""

    nodes: LawNodes
    terms: int


@dataclass(frozen=True)
class Series:
    """Products of coefficients at all pairs of some roots.

    Attributes:
        means: Products of a, ``(root, root)``.
        slopes: Products of c_n, ``(n, root, root)``.
        raised: Products of d_n, ``(n, root, root)``; None between members.
    """

    means: Tensor
    slopes: Tensor
    raised: Tensor | None = None

    def sums(self, rho: Tensor) -> list[Tensor]:
        """Return the sums for F, G and H at some correlations, each ``(correlation, root, root)``.

        The sum for F lacks the product of means. H is left out between members.
        """
        n = torch.arange(len(self.slopes), dtype=rho.dtype, device=rho.device)
        powers = rho[:, None] ** n
        integrals = powers * rho[:, None] / (n + 1)
        sums = [torch.tensordot(integrals, self.slopes, 1), torch.tensordot(powers, self.slopes, 1)]
        if self.raised is not None:
            sums.append(torch.tensordot(powers[:, : len(self.raised)], self.raised, 1))
        return sums

    def corner(self) -> Series:
        """Return the products at the first root alone."""
        raised = None if self.raised is None else self.raised[:, :1, :1]
        return Series(self.means[:1, :1], self.slopes[:, :1, :1], raised)


class Smooth(Dual):
    """Dual of a smooth function that acts on each number separately.

    Args:
        function: The activation, differentiable by torch.
        name: Name of the activation in messages.

    Example:
        >>> one = torch.ones(1, dtype=torch.float64)
        >>> f, g, _ = Smooth(torch.erf, "erf").same(one, one, one / 2, None)
        >>> f.item(), g.item()  # 2/π arcsin 1/3, 4/π/√8
        (0.2163468959..., 0.4501581580...)
    """

    target = 1e-9  # relative error at which the series is long enough

    def __init__(self, function: Callable[[Tensor], Tensor], name: str):
        self.function = function
        self.name = name
        self._table: Table | None = None
        # Copies of this dual share the list. Laws need not be hashable.
        self._tables: list[tuple[float, Law | None, Table]] = []

    def prepare(self, q_max: float, law: Law | None) -> Dual:
        prepared = copy.copy(self)
        prepared._table = self._find_table(q_max, law)
        return prepared

    def _find_table(self, q_max: float, law: Law | None) -> Table:
        """Return a table for variances up to ``q_max``, one that was built before if possible."""
        # Layers with similar variances share a table, because the largest one is rounded up.
        q_max = 2.0 ** (math.ceil(2 * math.log2(q_max)) / 2)
        for table_q_max, table_law, table in self._tables:
            if table_q_max == q_max and table_law == law:
                return table
        with torch.inference_mode(False), torch.no_grad():
            table = self._build_table(q_max, law)
        self._tables.insert(0, (q_max, law, table))
        del self._tables[_HELD_TABLES:]
        return table

    def same(
        self, q1: Tensor, q2: Tensor, c: Tensor, law: Law | None, *, with_h: bool = True
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        if self._table is not None:
            return self._table.same(q1, q2, c, with_h=with_h)
        resolution = self.resolve(largest_variance(q1, q2), law)
        dtype = c.dtype
        (root1, root2), rho = normalise(q1, q2, c)
        start = f = g = h = torch.zeros_like(rho)
        nodes = resolution.nodes.to(c.device)
        chunk = _HELD_NUMBERS // (resolution.terms * max(root1.numel(), root2.numel(), 1))
        for part in nodes.split(max(1, chunk)):
            mean1, slopes1 = self._coefficients(part.sizes, root1, resolution.terms)
            mean2, slopes2 = self._coefficients(part.sizes, root2, resolution.terms)
            start = start + _sum_over_nodes(part.both, mean1[None], mean2[None])[0]
            f_part, g_part = _sum_series(part.both * part.sizes**2, slopes1, slopes2, rho)
            f = f + f_part
            g = g + g_part
            if with_h:
                raised1, raised2 = _times_g(slopes1), _times_g(slopes2)
                h = h + _sum_series(part.both, raised1, raised2, rho)[1]
        size = root1 * root2
        f = start + size * f
        return f.to(dtype), g.to(dtype), (size * h).to(dtype) if with_h else None

    def cross(self, q1: Tensor, q2: Tensor, c: Tensor, law: Law | None) -> tuple[Tensor, Tensor]:
        if self._table is not None:
            return self._table.cross(q1, q2, c)
        resolution = self.resolve(largest_variance(q1, q2), law)
        nodes = resolution.nodes.to(c.device)
        if len(nodes.sizes) == 1 and not (nodes.plus * nodes.minus).any():
            # One value for all members: the same numbers as within a member, to the last bit.
            return self.same(q1, q2, c, law, with_h=False)[:2]
        (root1, root2), rho = normalise(q1, q2, c)
        mean1, slopes1 = self._averaged_coefficients(nodes, root1, resolution.terms)
        mean2, slopes2 = self._averaged_coefficients(nodes, root2, resolution.terms)
        one = torch.ones(1, dtype=rho.dtype, device=rho.device)
        f, g = _sum_series(one, slopes1[:, None], slopes2[:, None], rho)
        f = mean1 * mean2 + root1 * root2 * f
        return f.to(c.dtype), g.to(c.dtype)

    def _build_table(self, q_max: float, law: Law | None) -> Table:
        """Tabulate the sums for variances from 0 to ``q_max``."""
        resolution = self.resolve(q_max, law)
        nodes = resolution.nodes
        high = math.sqrt(q_max)
        deviation = math.sqrt(float(nodes.both @ nodes.sizes**2))
        differs = differs_between_members(law)
        series: list[Series] = []
        for count in _ROOT_COUNTS:
            root_axis = RootAxis(high, deviation or 1.0, count)
            series = [self._series_within(root_axis.nodes(), resolution)]
            if differs:
                series.append(self._series_between(root_axis.nodes(), resolution))
            root_error = max(_root_error(part) for part in series)
            if root_error < ROUNDING:
                break
        # Singularities of the activation are about 1 away from the real axis.
        largest = high * min(7 * deviation, float(nodes.sizes.max()))
        margin = 1 / (1 + 4 * largest**2)
        for count in _CORRELATION_COUNTS:
            axis = CorrelationAxis(margin, count)
            error = max(_correlation_error(part.corner(), axis) for part in series)
            if error < ROUNDING:
                break
        self._judge(max(root_error, error), q_max, law)
        tabulated = [_tabulate(part, axis.nodes()) for part in series]
        return Table(root_axis, axis, within=tabulated[0], between=tabulated[-1])

    def _series_within(self, roots: Tensor, resolution: Resolution) -> Series:
        """Return products of coefficients within a member, averaged over v."""
        terms, count = resolution.terms, len(roots)
        means = torch.zeros(count, count, dtype=roots.dtype)
        slopes = torch.zeros(terms, count, count, dtype=roots.dtype)
        raised = torch.zeros(terms - 1, count, count, dtype=roots.dtype)
        for part in resolution.nodes.split(max(1, _HELD_NUMBERS // (terms * count))):
            mean, slope = self._coefficients(part.sizes, roots, terms)
            weights = part.both[:, None]
            means += (weights * mean).mT @ mean
            slopes += (weights * part.sizes[:, None] ** 2 * slope).mT @ slope
            raised_slope = _times_g(slope)
            raised += (weights * raised_slope).mT @ raised_slope
        return Series(means, slopes, raised)

    def _series_between(self, roots: Tensor, resolution: Resolution) -> Series:
        """Return products of coefficients that were averaged over v, between members."""
        mean, slope = self._averaged_coefficients(resolution.nodes, roots, resolution.terms)
        return Series(mean[:, None] * mean, slope[:, :, None] * slope[:, None])

    def resolve(self, q_max: float, law: Law | None) -> Resolution:
        """Choose nodes and terms for variances up to ``q_max``.

        Raises:
            ValueError: If no choice has a relative error below ``WORST``.
        """
        root = torch.tensor([math.sqrt(q_max)], dtype=torch.float64, device="cpu")
        width = 0.1 / math.sqrt(q_max)
        with torch.no_grad():
            exact = self._second_moments(root, law_nodes(law, width, fineness=2))
            if not exact.isfinite().all():
                raise ValueError(
                    f"{self.name} is not finite, or grows too fast, for the arguments that a "
                    f"variance of {q_max:.3g} needs with {law}. Scale the inputs or the weights "
                    "down."
                )
            nodes = law_nodes(law, width)
            error = math.inf
            terms = 0
            for terms in _TERMS:
                series = self._second_moments(root, nodes, terms)
                error = float(((series - exact) / exact.clamp(min=1e-300)).abs().max())
                if error < self.target:
                    break
        self._judge(error, q_max, law)
        return Resolution(nodes, terms)

    def _second_moments(self, root: Tensor, nodes: LawNodes, terms: int = 0) -> Tensor:
        r"""Return :math:`E[v^2 \phi'^2]` and :math:`E[g^2 \phi'^2]` for equal inputs.

        They are integrated directly, or summed from the first ``terms`` coefficients.
        """
        if terms:
            _, slopes = self._coefficients(nodes.sizes, root, terms)
            squares = slopes.square().sum(0)[:, 0]
            raised_squares = _times_g(slopes).square().sum(0)[:, 0]
        else:
            points, weights = _grid(4 * _TERMS[-1])
            _, right, left = self._evaluate(nodes.sizes[:, None] * root * points)
            total = right**2 + left**2
            squares = total @ weights
            raised_squares = total @ (weights * points**2)
        g = nodes.both @ (nodes.sizes**2 * squares)
        h = nodes.both @ raised_squares
        return torch.stack([g, h])

    def _coefficients(self, sizes: Tensor, root: Tensor, terms: int) -> tuple[Tensor, Tensor]:
        """Return a(x) and c_n(x) at x = size · root, ``(node, *root)`` and ``(n, node, *root)``."""
        points, weights = _grid(terms)
        points, weights = points.to(root.device), weights.to(root.device)
        hermite = _weighted_hermite(terms).to(root.device)
        x = sizes.reshape(-1, *(1,) * root.dim()) * root
        # The grid has points g >= 0 only: φ'(xg) + φ'(-xg) has the coefficients of even n, and
        # the difference those of odd n.
        even_values, right, left = self._evaluate(x[..., None] * points)
        mean = even_values @ weights
        even = torch.tensordot(hermite[0::2], right + left, ([1], [x.dim()]))
        odd = torch.tensordot(hermite[1::2], right - left, ([1], [x.dim()]))
        return mean, torch.stack([even, odd], dim=1).flatten(0, 1)

    def _averaged_coefficients(
        self, nodes: LawNodes, root: Tensor, terms: int
    ) -> tuple[Tensor, Tensor]:
        r"""Return the means over v of a and of :math:`v\, c_n`, ``(*root)`` and ``(n, *root)``."""
        mean = torch.zeros_like(root)
        slopes = torch.zeros(terms, *root.shape, dtype=root.dtype, device=root.device)
        sign = torch.ones(terms, 1, dtype=root.dtype, device=root.device)
        sign[1::2] = -1
        chunk = _HELD_NUMBERS // (terms * max(root.numel(), 1))
        for part in nodes.split(max(1, chunk)):
            part_mean, part_slopes = self._coefficients(part.sizes, root, terms)
            weights = part.sizes * (part.plus - sign * part.minus)
            mean = mean + torch.tensordot(part.both, part_mean, 1)
            slopes = slopes + torch.einsum("nv,nv...->n...", weights, part_slopes)
        return mean, slopes

    def _evaluate(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return φ(x) + φ(-x), φ'(x) and φ'(-x)."""
        with torch.inference_mode(False):
            arguments = torch.stack([x, -x])
            # `vjp`, unlike `autograd.grad`, can be differentiated again in every way.
            values, pull_back = torch.func.vjp(self.function, arguments)
            (slopes,) = pull_back(torch.ones_like(values))
        return values[0] + values[1], slopes[0], slopes[1]

    def _judge(self, error: float, q_max: float, law: Law | None) -> None:
        subject = f"expectations of {self.name} for variances up to {q_max:.3g} with {law}"
        if not error < WORST:
            raise ValueError(
                f"{subject} must be accurate to {WORST:g} at least; reached was {error:.1g}. "
                "Standardise the inputs or use a smaller weight_std; for an activation with a "
                "kink, or a very steep one, register a dual of your own."
            )
        if error > ACCURACY:
            warnings.warn(
                f"{subject} are accurate to {error:.1g} only, not {ACCURACY:g}. If the activation "
                "has a kink or is very steep, register a dual of your own; if variances are large, "
                "scale the inputs or the weights down.",
                RuntimeWarning,
                stacklevel=4,
            )


def _sum_over_nodes(weights: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return weighted sums over nodes of products of coefficients, ``(n, …)``.

    Args:
        weights: Weights of the nodes, ``(node,)``.
        first: Coefficients ``(n, node, *axes)`` of the first inputs.
        second: Coefficients ``(n, node, *axes)`` of the second inputs; ``axes`` broadcast. Where
            they are rows and columns, the sum is a matrix product.
    """
    axes = max(first.dim(), second.dim()) - 2
    first = _pad_axes(first, axes)
    second = _pad_axes(second, axes)
    weighted = weights.reshape(-1, *(1,) * axes) * first
    return torch.einsum("nv...,nv...->n...", weighted, second)


def _pad_axes(coefficients: Tensor, axes: int) -> Tensor:
    """Insert axes of size 1 after those of terms and nodes, up to a number of axes."""
    missing = axes - (coefficients.dim() - 2)
    terms, nodes, *sizes = coefficients.shape
    return coefficients.reshape(terms, nodes, *(1,) * missing, *sizes)


def _sum_series(
    weights: Tensor, first: Tensor, second: Tensor, rho: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Return :math:`\sum_n s_n \rho^{n+1} / (n+1)` and :math:`\sum_n s_n \rho^n`.

    Here :math:`s_n` is the product of the n-th coefficients, ``(node, …)``, summed over the nodes.
    Horner's scheme starts at the last term.
    """
    integral = torch.zeros_like(rho)
    total = torch.zeros_like(rho)
    chunk = max(1, _HELD_NUMBERS // max(1, rho.numel()))
    for stop in range(len(first), 0, -chunk):
        start = max(0, stop - chunk)
        products = _sum_over_nodes(weights, first[start:stop], second[start:stop])
        for n in range(stop - 1, start - 1, -1):
            product = products[n - start]
            total = torch.addcmul(product, total, rho)
            integral = torch.addcmul(product / (n + 1), integral, rho)
    return rho * integral, total


def _root_error(series: Series) -> float:
    """Return the error of interpolation in the roots, at correlation 1."""
    one = torch.ones(1, dtype=torch.float64)
    transform = chebyshev_transform(len(series.means))
    values = [series.means, *(part[0] for part in series.sums(one))]
    return max(remainder(transform @ part) for part in values)


def _correlation_error(series: Series, axis: CorrelationAxis) -> float:
    """Return the error of interpolation in the correlation."""
    transform = chebyshev_transform(axis.count)
    return max(remainder(transform @ part.flatten(1)) for part in series.sums(axis.nodes()))


def _tabulate(series: Series, rho: Tensor) -> Sums:
    """Return Chebyshev coefficients of the sums."""
    coefficients = [expand(part) for part in series.sums(rho)]
    return Sums(expand(series.means[None]), *coefficients)


def _times_g(slopes: Tensor) -> Tensor:
    r"""Return the coefficients of :math:`g \phi'(x g)`: d_n from c_n, one term fewer."""
    count = len(slopes) - 1
    n = torch.arange(count, dtype=slopes.dtype, device=slopes.device)
    n = n.reshape(-1, *(1,) * (slopes.dim() - 1))
    above = (n + 1).sqrt() * slopes[1:]
    below = torch.cat([torch.zeros_like(slopes[:1]), n[1:].sqrt() * slopes[: count - 1]])
    return above + below


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def _grid(terms: int) -> tuple[Tensor, Tensor]:
    """Return points g >= 0 and normal weights that resolve this many Hermite polynomials.

    The point 0 stands for both signs and has half a weight. A polynomial of degree n oscillates
    with frequency √n, which sets the step.
    """
    steps = math.ceil(_REACH * max(8.0, math.sqrt(terms)) / 1.25)
    points = torch.linspace(0, _REACH, steps + 1, dtype=torch.float64, device="cpu")
    weights = torch.exp(-(points**2) / 2) * (_REACH / steps / math.sqrt(2 * math.pi))
    weights[0] /= 2
    return points, weights


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def _weighted_hermite(terms: int) -> Tensor:
    """Return orthonormal Hermite polynomials times the weights of the grid, ``(n, point)``."""
    points, weights = _grid(terms)
    values = torch.empty(terms, len(points), dtype=torch.float64, device="cpu")
    # Recurrence for h_n(g) exp(-g²/4), which does not overflow.
    values[0] = torch.exp(-(points**2) / 4)
    values[1] = points * values[0]
    for n in range(1, terms - 1):
        values[n + 1] = (points * values[n] - math.sqrt(n) * values[n - 1]) / math.sqrt(n + 1)
    return values * (weights * torch.exp(points**2 / 4))
