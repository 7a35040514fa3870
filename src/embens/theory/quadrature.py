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

from embens.laws import Law, Normal, Shifted
from embens.theory.expectations import Dual, roots

ACCURACY = 1e-8
"""Relative error above which a warning is given."""
WORST = 1e-4
"""Relative error above which no result is returned."""

_TERMS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_REACH = 12.0  # exp(-REACH² / 4) is below the rounding error
_LAW_NODES = 121
_HELD_NUMBERS = 2**23  # coefficients in memory at once


@dataclass(frozen=True)
class LawNodes:
    """Quadrature nodes for the size of a modulation, with a weight for either sign.

    Attributes:
        sizes: Values of |v|, ``(node,)``.
        plus: Weights of v = +size, ``(node,)``.
        minus: Weights of v = -size, ``(node,)``.
    """

    sizes: Tensor
    plus: Tensor
    minus: Tensor

    @property
    def both(self) -> Tensor:
        """Weights of either sign, ``(node,)``."""
        return self.plus + self.minus

    def rows(self) -> list[tuple[float, float, float]]:
        """Return size, weight of the positive and weight of the negative sign of each node."""
        columns = self.sizes.tolist(), self.plus.tolist(), self.minus.tolist()
        return list(zip(*columns, strict=True))

    def split(self, size: int) -> list[LawNodes]:
        """Return the nodes in groups of at most ``size``."""
        columns = self.sizes.split(size), self.plus.split(size), self.minus.split(size)
        return [LawNodes(*part) for part in zip(*columns, strict=True)]

    def to(self, device: torch.device) -> LawNodes:
        """Return the nodes on another device."""
        return LawNodes(self.sizes.to(device), self.plus.to(device), self.minus.to(device))


def law_nodes(law: Law | None, width: float, fineness: int = 1) -> LawNodes:
    """Return quadrature nodes for a modulation.

    Args:
        law: Distribution of the modulation; None means the constant 1.
        width: Size of v at which the integrand changes; used for normal laws only.
        fineness: Factor by which the nodes are denser than usual.

    Example:
        >>> nodes = law_nodes(Normal(0.5, 1.0), width=0.3)
        >>> round(float(nodes.both @ nodes.sizes**2), 12)  # E v²
        1.25
    """
    if law is None:
        one = torch.ones(1, dtype=torch.float64, device="cpu")
        return LawNodes(one, one, torch.zeros_like(one))
    if is_normal(law):
        return _normal_nodes(law.mean, law.std, width, fineness)  # type: ignore[attr-defined]
    values, weights = law.quadrature(fineness * _LAW_NODES)
    relevant = weights * (1 + values**4) > 1e-18
    values, weights = values[relevant], weights[relevant]
    sizes, index = torch.unique(values.abs(), return_inverse=True)
    plus = torch.zeros_like(sizes).index_add_(0, index, weights * (values >= 0))
    minus = torch.zeros_like(sizes).index_add_(0, index, weights * (values < 0))
    # Symmetric laws get equal weights to the last bit: odd activations then average to exactly 0.
    both = plus + minus
    symmetric = (plus - minus).abs() <= 1e-14 * both
    plus = torch.where(symmetric, both / 2, plus)
    minus = torch.where(symmetric, both / 2, minus)
    return LawNodes(sizes, plus, minus)


def _normal_nodes(mean: float, std: float, width: float, fineness: int) -> LawNodes:
    r"""Return nodes of a normal law for functions that are singular at :math:`v = \pm i w`.

    With :math:`v = w \sinh t` all singularities on the imaginary axis move to
    :math:`\operatorname{Im} t = \pm \pi / 2`, and the trapezoidal rule in :math:`t` needs few
    nodes.
    """
    width = min(width, std)
    step = 0.14
    if mean:
        step = min(step, 0.45 * std / abs(mean))
    step = step / fineness
    farthest = abs(mean) + 9 * std
    count = math.ceil(math.asinh(farthest / width) / step)
    t = step * (torch.arange(count, dtype=torch.float64, device="cpu") + 0.5)
    sizes = width * torch.sinh(t)
    spacing = step * width * torch.cosh(t)
    plus = spacing * _normal_density(sizes, mean, std)
    minus = spacing * _normal_density(-sizes, mean, std)
    relevant = (plus + minus) * (1 + sizes**4) > 1e-18
    return LawNodes(sizes[relevant], plus[relevant], minus[relevant])


def _normal_density(x: Tensor, mean: float, std: float) -> Tensor:
    return torch.exp(-(((x - mean) / std) ** 2) / 2) / (std * math.sqrt(2 * math.pi))


def is_normal(law: Law | None) -> bool:
    """Return whether a law is normal with a positive variance."""
    return isinstance(law, Normal | Shifted) and law.std > 0


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
        self._resolution: Resolution | None = None

    def prepare(self, q_max: float, law: Law | None) -> Dual:
        prepared = copy.copy(self)
        prepared._resolution = self.resolve(q_max, law)
        return prepared

    def same(
        self, q1: Tensor, q2: Tensor, c: Tensor, law: Law | None, *, with_h: bool = True
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        resolution = self._resolution or self.resolve(largest_variance(q1, q2), law)
        dtype = c.dtype
        (root1, root2), rho = _normalise(q1, q2, c)
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
        resolution = self._resolution or self.resolve(largest_variance(q1, q2), law)
        nodes = resolution.nodes.to(c.device)
        if len(nodes.sizes) == 1 and not (nodes.plus * nodes.minus).any():
            # One value for all members: the same numbers as within a member, to the last bit.
            return self.same(q1, q2, c, law, with_h=False)[:2]
        (root1, root2), rho = _normalise(q1, q2, c)
        mean1, slopes1 = self._averaged_coefficients(nodes, root1, resolution.terms)
        mean2, slopes2 = self._averaged_coefficients(nodes, root2, resolution.terms)
        one = torch.ones(1, dtype=rho.dtype, device=rho.device)
        f, g = _sum_series(one, slopes1[:, None], slopes2[:, None], rho)
        f = mean1 * mean2 + root1 * root2 * f
        return f.to(c.dtype), g.to(c.dtype)

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


def _normalise(q1: Tensor, q2: Tensor, c: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return both roots of the variances and the correlation, in float64."""
    root1, inverse1 = roots(q1.double())
    root2, inverse2 = roots(q2.double())
    rho = c.double() * inverse1 * inverse2
    return (root1, root2), rho.clamp(-1 - 1e-12, 1 + 1e-12)


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
