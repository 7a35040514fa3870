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
averaged separately. There the sign of :math:`v` matters: changing it turns :math:`c_n` into
:math:`(-1)^n c_n`.

For each value of :math:`v` the number of terms is doubled until the series at :math:`\rho = 1` and
the largest variance, the hardest case, agree with direct integration. A result with a relative
error above ``ACCURACY`` gives a warning, above ``WORST`` an error.

Kernels have too many entries to sum these series for each of them. A prepared dual therefore
interpolates the sums; see :mod:`embens.theory.interpolation`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from embens.checks import warn
from embens.laws import Law
from embens.theory.expectations import Dual, differs_between_members
from embens.theory.hermite import grid, sum_over_nodes, sum_series, times_g, weighted_hermite
from embens.theory.interpolation import (
    ROUNDING,
    CorrelationAxis,
    RootAxis,
    Table,
    roots_and_correlation,
)
from embens.theory.law_nodes import LawNodes, law_nodes
from embens.theory.resolution import Evaluation, Resolution
from embens.theory.series import (
    Series,
    correlation_error,
    interpolation_error,
    root_error,
    tabulate,
)

ACCURACY = 1e-8
"""Relative error above which a warning is given."""
WORST = 1e-4
"""Relative error above which no result is returned."""

_TERMS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_ROOT_COUNTS = (8, 12, 16, 24, 32, 48, 64, 96)
_CORRELATION_COUNTS = (33, 65, 129, 257, 513, 1025)
_NEGLIGIBLE = 1e-15  # relative error of a node that gets fewer terms than others
_MAX_TABLES = 32  # of one activation


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


class Smooth(Dual):
    """Dual of a smooth elementwise function.

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
        del self._tables[_MAX_TABLES:]
        return table

    def same(
        self,
        q1: Tensor,
        q2: Tensor,
        c: Tensor,
        law: Law | None,
        *,
        with_h: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        if self._table is not None:
            return self._table.same(q1, q2, c, with_h=with_h)
        resolution = self.resolve(largest_variance(q1, q2), law)
        dtype = c.dtype
        (root1, root2), rho = roots_and_correlation(q1, q2, c)
        start = f = g = h = torch.zeros_like(rho)
        root_count = max(root1.numel(), root2.numel())
        for part, terms in resolution.parts(root_count, c.device):
            mean1, slopes1 = self._coefficients(part.sizes, root1, terms)
            mean2, slopes2 = self._coefficients(part.sizes, root2, terms)
            start = start + sum_over_nodes(part.both, mean1[None], mean2[None])[0]
            f_part, g_part = sum_series(part.both * part.sizes**2, slopes1, slopes2, rho)
            f = f + f_part
            g = g + g_part
            if with_h:
                raised1, raised2 = times_g(slopes1), times_g(slopes2)
                h = h + sum_series(part.both, raised1, raised2, rho)[1]
        size = root1 * root2
        f = start + size * f
        if not with_h:
            return f.to(dtype), g.to(dtype), None
        return f.to(dtype), g.to(dtype), (size * h).to(dtype)

    def cross(self, q1: Tensor, q2: Tensor, c: Tensor, law: Law | None) -> tuple[Tensor, Tensor]:
        if self._table is not None:
            return self._table.cross(q1, q2, c)
        resolution = self.resolve(largest_variance(q1, q2), law)
        if resolution.is_constant:
            # One value for all members: the same result as within a member, to the last bit.
            return self.same(q1, q2, c, law, with_h=False)[:2]
        (root1, root2), rho = roots_and_correlation(q1, q2, c)
        mean1, slopes1 = self._averaged_coefficients(resolution, root1)
        mean2, slopes2 = self._averaged_coefficients(resolution, root2)
        one = torch.ones(1, dtype=rho.dtype, device=rho.device)
        f, g = sum_series(one, slopes1[:, None], slopes2[:, None], rho)
        f = mean1 * mean2 + root1 * root2 * f
        return f.to(c.dtype), g.to(c.dtype)

    def _build_table(self, q_max: float, law: Law | None) -> Table:
        """Tabulate the sums for variances from 0 to ``q_max``."""
        resolution = self.resolve(q_max, law)
        root_axis = self._root_axis(math.sqrt(q_max), resolution)
        roots = root_axis.nodes()
        series = [self._series_within(roots, resolution)]
        if differs_between_members(law):
            series.append(self._series_between(roots, resolution))
        floor = series[0].floor()
        # Singularities of the activation are about 1 away from the real axis.
        largest_size = min(7 * resolution.deviation, float(resolution.sizes.max()))
        largest = root_axis.high * largest_size
        correlation_axis = CorrelationAxis(margin=1 / (1 + 4 * largest**2), count=0)
        error = math.inf
        for count in _CORRELATION_COUNTS:
            correlation_axis = replace(correlation_axis, count=count)
            corners = [part.corner() for part in series]
            error = max(correlation_error(part, correlation_axis, floor) for part in corners)
            if error < ROUNDING:
                break
        error = max(error, *(root_error(part, floor) for part in series))
        self._judge(error, q_max, law)
        tabulated = [tabulate(part, correlation_axis.nodes()) for part in series]
        return Table(
            root_axis,
            correlation_axis,
            within=tabulated[0],
            between=tabulated[-1],
        )

    def _root_axis(self, high: float, resolution: Resolution) -> RootAxis:
        """Choose the nodes of roots by direct integration at correlation 1, which is fast."""
        axis = RootAxis(high, resolution.deviation or 1.0, count=0)
        for count in _ROOT_COUNTS:
            axis = replace(axis, count=count)
            moments = torch.zeros(3, count, count, dtype=torch.float64)
            for nodes, terms in resolution.groups:
                moments += self._moments(axis.nodes(), nodes, terms)
            floor = float(moments.abs().max()) / 1000
            if interpolation_error(moments, floor) < ROUNDING:
                break
        return axis

    def _moments(self, roots: Tensor, nodes: LawNodes, terms: int) -> Tensor:
        r"""Integrate :math:`a\, a'`, :math:`v^2 \phi' \phi'` and :math:`g^2 \phi' \phi'` directly.

        Returns:
            The expectations at all pairs of roots and correlation 1, ``(3, root, root)``.
        """
        points, weights = grid(terms)
        sizes = nodes.sizes[:, None, None]
        evaluated = self._evaluate(sizes * roots[:, None] * points)
        means = evaluated.even_values @ weights
        products_of_means = means[:, :, None] * means[:, None]
        g = evaluated.slope_gram(weights)
        h = evaluated.slope_gram(weights * points**2)
        moments = [products_of_means, sizes**2 * g, h]
        return torch.stack([torch.tensordot(nodes.both, moment, 1) for moment in moments])

    def _series_within(self, roots: Tensor, resolution: Resolution) -> Series:
        """Return products of coefficients within a member, averaged over v."""
        count = len(roots)
        means = torch.zeros(count, count, dtype=roots.dtype)
        slopes = torch.zeros(resolution.terms, count, count, dtype=roots.dtype)
        raised = torch.zeros(resolution.terms, count, count, dtype=roots.dtype)
        for part, terms in resolution.parts(count, roots.device):
            mean, slope = self._coefficients(part.sizes, roots, terms)
            weights = part.both[:, None]
            means += (weights * mean).mT @ mean
            slopes[:terms] += (weights * part.sizes[:, None] ** 2 * slope).mT @ slope
            raised_slope = times_g(slope)
            raised[: terms - 1] += (weights * raised_slope).mT @ raised_slope
        return Series(means, slopes, raised)

    def _series_between(self, roots: Tensor, resolution: Resolution) -> Series:
        """Return products of coefficients that were averaged over v, between members."""
        mean, slope = self._averaged_coefficients(resolution, roots)
        return Series(mean[:, None] * mean, slope[:, :, None] * slope[:, None])

    def resolve(self, q_max: float, law: Law | None) -> Resolution:
        """Choose nodes and terms for variances up to ``q_max``.

        Raises:
            ValueError: If no choice has a relative error below ``WORST``.
        """
        root = torch.tensor([math.sqrt(q_max)], dtype=torch.float64, device="cpu")
        width = 0.1 / math.sqrt(q_max)
        with torch.no_grad():
            fine_nodes = law_nodes(law, width, fineness=2)
            exact = self._second_moments(root, fine_nodes).sum(1)
            if not exact.isfinite().all():
                raise ValueError(
                    f"{self.name} is not finite, or grows too fast, for the arguments that a "
                    f"variance of {q_max:.3g} needs with {law}. Scale the inputs or the weights "
                    "down."
                )
            nodes = law_nodes(law, width)
            moments = self._second_moments(root, nodes)
            error = _relative_error(moments.sum(1), exact)
            groups: list[tuple[LawNodes, int]] = []
            for terms in _TERMS:
                missing = (moments - self._second_moments(root, nodes, terms)).abs()
                missing = (missing / exact[:, None].clamp(min=1e-300)).amax(0)
                # Between members an error of c_n is multiplied by c_n of larger v, to first order.
                # So values that get fewer terms than others must be more accurate.
                accurate = missing < _NEGLIGIBLE
                if terms == _TERMS[-1] or float(missing.sum()) < self.target / 2:
                    accurate = torch.ones_like(accurate)
                error = error + float(missing[accurate].sum())
                if accurate.any():
                    groups.append((nodes.select(accurate), terms))
                nodes, moments = nodes.select(~accurate), moments[:, ~accurate]
                if not len(nodes.sizes):
                    break
        self._judge(error, q_max, law)
        return Resolution(tuple(groups))

    def _second_moments(self, root: Tensor, nodes: LawNodes, terms: int = 0) -> Tensor:
        r"""Return :math:`E[v^2 \phi'^2]` and :math:`E[g^2 \phi'^2]` for equal inputs.

        They are integrated directly, or summed from the first ``terms`` coefficients.

        Returns:
            The contribution of each node, ``(2, node)``.
        """
        if terms:
            _, slopes = self._coefficients(nodes.sizes, root, terms)
            squares = slopes.square().sum(0)[:, 0]
            raised_squares = times_g(slopes).square().sum(0)[:, 0]
        else:
            points, weights = grid(4 * _TERMS[-1])
            evaluated = self._evaluate(nodes.sizes[:, None] * root * points)
            total = evaluated.slopes**2 + evaluated.mirrored_slopes**2
            squares = total @ weights
            raised_squares = total @ (weights * points**2)
        g_terms = nodes.both * nodes.sizes**2 * squares
        h_terms = nodes.both * raised_squares
        return torch.stack([g_terms, h_terms])

    def _coefficients(self, sizes: Tensor, root: Tensor, terms: int) -> tuple[Tensor, Tensor]:
        """Return a(x) and c_n(x) at x = size · root, ``(node, *root)`` and ``(n, node, *root)``."""
        points, weights = grid(terms)
        points, weights = points.to(root.device), weights.to(root.device)
        hermite = weighted_hermite(terms).to(root.device)
        x = sizes.reshape(-1, *(1,) * root.dim()) * root
        # The grid has points g >= 0 only: φ'(xg) + φ'(-xg) has the coefficients of even n, and
        # the difference those of odd n.
        evaluated = self._evaluate(x[..., None] * points)
        mean = evaluated.even_values @ weights
        even_slopes = evaluated.slopes + evaluated.mirrored_slopes
        odd_slopes = evaluated.slopes - evaluated.mirrored_slopes
        axes: Any = ([1], [x.dim()])
        even = torch.tensordot(hermite[0::2], even_slopes, axes)
        odd = torch.tensordot(hermite[1::2], odd_slopes, axes)
        return mean, torch.stack([even, odd], dim=1).flatten(0, 1)

    def _averaged_coefficients(self, resolution: Resolution, root: Tensor) -> tuple[Tensor, Tensor]:
        r"""Return the means over v of a and of :math:`v\, c_n`, ``(*root)`` and ``(n, *root)``."""
        mean = torch.zeros_like(root)
        slopes = torch.zeros(resolution.terms, *root.shape, dtype=root.dtype, device=root.device)
        sign = torch.ones(resolution.terms, 1, dtype=root.dtype, device=root.device)
        sign[1::2] = -1
        for part, terms in resolution.parts(root.numel(), root.device):
            part_mean, part_slopes = self._coefficients(part.sizes, root, terms)
            weights = part.sizes * (part.plus - sign[:terms] * part.minus)
            mean = mean + torch.tensordot(part.both, part_mean, 1)
            part_slopes = torch.einsum("nv,nv...->n...", weights, part_slopes)
            slopes = torch.cat([slopes[:terms] + part_slopes, slopes[terms:]])
        return mean, slopes

    def _evaluate(self, x: Tensor) -> Evaluation:
        """Evaluate the activation and its derivative at x and -x."""
        with torch.inference_mode(False):
            arguments = torch.stack([x, -x])
            # `vjp`, unlike `autograd.grad`, can be differentiated again in every way.
            result: Any = torch.func.vjp(self.function, arguments)
            values, pull_back = result
            (slopes,) = pull_back(torch.ones_like(values))
        return Evaluation(values[0] + values[1], slopes[0], slopes[1])

    def _judge(self, error: float, q_max: float, law: Law | None) -> None:
        subject = f"expectations of {self.name} for variances up to {q_max:.3g} with {law}"
        if not error < WORST:
            raise ValueError(
                f"{subject} must have a relative error below {WORST:g}; got {error:.1g}. "
                "Standardise the inputs or use a smaller weight_std; for an activation with a "
                "kink, or a very steep one, register a Dual."
            )
        if error > ACCURACY:
            warn(
                f"{subject} are accurate to {error:.1g} only, not {ACCURACY:g}. If the activation "
                "has a kink or is very steep, register a Dual; if variances are large, scale the "
                "inputs or the weights down.",
                RuntimeWarning,
            )


def _relative_error(values: Tensor, exact: Tensor) -> float:
    return float(((values - exact) / exact.clamp(min=1e-300)).abs().max())
