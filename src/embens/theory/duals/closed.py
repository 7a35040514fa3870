r"""Duals with closed forms: activations linear on each half-line; erf, sine, cosine and GELU.

*Half-lines* (ReLU, leaky ReLU, absolute value), where modulations come out: :class:`Homogeneous`.

*The others* have one at fixed modulations, in the moments :math:`Q_i = v_i^2 q_i` and
:math:`C = v_1 v_2 c` of :math:`y_i = v_i z_i`. A law with a few values is summed over, and a normal
law over nodes chosen for the singularities of these functions at imaginary :math:`v`, of size
:math:`1 / \sqrt{q}`: accurate at any variance. Between two members there are two modulations to
sum over, so for variances of ordinary size, and for other laws, tables of :mod:`smooth` serve.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from itertools import product
from typing import final

import torch
from torch import Tensor

from embens.laws import Discrete, Law
from embens.theory.duals.expectations import Dual, is_differentiated, roots, tells_apart
from embens.theory.duals.smooth import Nodes, Smooth, is_normal, round_out
from embens.theory.duals.tables import span

_FEW = 8  # values of a modulation that are summed over one by one
_WIDE = 4.0  # E v² q beyond which tables of normal laws take longer than sums


@final
@dataclass(frozen=True)
class Homogeneous(Dual):
    r"""Dual of an activation with one slope on each side of 0.

    With slopes :math:`a` right and :math:`b` left and :math:`\cos\theta = c / \sqrt{q_1 q_2}`,

    .. math::
        G = \tfrac{1}{2}(a^2 + b^2) - \tfrac{1}{2\pi}(a - b)^2\, \theta, \qquad
        F = G\, c + \tfrac{1}{2\pi}(a - b)^2 \sqrt{q_1 q_2} \sin\theta

    without modulations. Within a member these are multiplied by :math:`E v^2`, and
    :math:`H = P(v \ne 0)\, F` without that factor. Between members half-lines of equal and of
    opposite sign have the weights :math:`s, d` of ``pair_half_moment``, and the latter see
    :math:`-c`: :math:`F = s F(c) + d F(-c)`, :math:`G = s G(c) - d G(-c)`, of the same form again.

    Angles below the square root of the rounding error are taken to be 0 (or π), so that equal and
    collinear inputs give exact results. ``at_zero`` is what torch takes for the derivative at 0,
    which :math:`H` sees where :math:`v = 0`.
    """

    right: float = 1.0
    left: float = 0.0
    at_zero: float = 0.0

    def same(
        self, q1: Tensor, q2: Tensor, c: Tensor, law: Law | None, *, with_h: bool = True
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        second = 1.0 if law is None else law.second_moment
        f, g = _expectations(q1, q2, c, second * self._level, second * self._bend)
        if not with_h:
            return f, g, None
        mass = 1.0 if law is None else law.half_moment(0, 1) + law.half_moment(0, -1)
        h = f * (mass / second if second > 0 else 0.0)
        if self.at_zero and mass < 1:
            h = h + (1 - mass) * self.at_zero**2 * c
        return f, g, h

    def cross(self, q1: Tensor, q2: Tensor, c: Tensor, law: Law | None) -> tuple[Tensor, Tensor]:
        if law is None or not tells_apart(law):
            return self.same(q1, q2, c, law, with_h=False)[:2]
        alike = law.pair_half_moment(1, 1) + law.pair_half_moment(-1, -1)
        opposed = 2 * law.pair_half_moment(1, -1)
        level = alike * self._level + opposed * (math.pi * self._bend - self._level)
        return _expectations(q1, q2, c, level, (alike + opposed) * self._bend)

    def joint(
        self, q1: Tensor, q2: Tensor, c: Tensor, law: Law | None, members: int
    ) -> tuple[Tensor, Tensor]:
        return self.cross(q1, q2, c, law)

    @property
    def _level(self) -> float:
        return (self.right**2 + self.left**2) / 2

    @property
    def _bend(self) -> float:
        return (self.right - self.left) ** 2 / (2 * math.pi)


def _expectations(
    q1: Tensor, q2: Tensor, c: Tensor, level: float, bend: float
) -> tuple[Tensor, Tensor]:
    c = c.expand(torch.broadcast_shapes(q1.shape, q2.shape, c.shape))
    if bend == 0:
        return level * c, torch.full_like(c, level, memory_format=torch.contiguous_format)
    angle = _angle if is_differentiated(q1, q2, c) else _angle_in_place
    (root1, inverse1), (root2, inverse2) = roots(q1), roots(q2)
    theta, sine = angle(c, inverse1, inverse2)
    if angle is _angle:
        g = level - bend * theta
        return g * c + sine * (bend * root1) * root2, g
    g = theta.mul_(-bend).add_(level)
    return sine.mul_(bend * root1).mul_(root2).addcmul_(g, c), g


def _angle_in_place(c: Tensor, inverse1: Tensor, inverse2: Tensor) -> tuple[Tensor, Tensor]:
    """Return the angle and its sine, with few passes over memory."""
    cosine = (c * inverse1).mul_(inverse2)
    sine = (1 - cosine).mul_(1 + cosine)
    sine = torch.threshold_(sine, _flat(c), 0.0).sqrt_()
    return torch.atan2(sine, cosine, out=cosine), sine


def _angle(c: Tensor, inverse1: Tensor, inverse2: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same, with derivatives, which are 0 where the angle is 0 or π.

    There :math:`F` has first derivatives nevertheless, since they do not need those of the angle;
    its second derivatives are infinite, and count as 0.
    """
    cosine = c * inverse1 * inverse2
    square = (1 - cosine) * (1 + cosine)
    flat = square <= _flat(c)
    sine = torch.where(flat, 1.0, square).sqrt()
    end = math.pi * (cosine < 0).to(c.dtype)
    return torch.where(flat, end, torch.atan2(sine, cosine)), torch.where(flat, 0.0, sine)


def _flat(c: Tensor) -> float:
    """Return the square of a sine that is nothing but rounding."""
    return 8 * torch.finfo(c.dtype).eps


class Closed(Smooth):
    """Dual with a closed form for fixed modulations."""

    @abstractmethod
    def fixed(self, q1: Tensor, q2: Tensor, c: Tensor, *, with_h: bool) -> tuple[Tensor, ...]:
        r"""Return :math:`E[φφ]`, :math:`g = E[φ'φ']` and, on demand, :math:`E[y_1 y_2 φ'φ']`.

        Where no shorter form is at hand, integration by parts makes the last one :math:`C g +
        (Q_1 Q_2 + C^2)\, \partial_C g + 2 C\, (Q_1 \partial_{Q_1} + Q_2 \partial_{Q_2})\, g`.
        """

    def same(
        self, q1: Tensor, q2: Tensor, c: Tensor, law: Law | None, *, with_h: bool = True
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        if not (law is None or isinstance(law, Discrete) or is_normal(law)):
            return super().same(q1, q2, c, law, with_h=with_h)
        nodes = _nodes(span(q1, q2)[1], law)
        sums = [torch.zeros((), dtype=c.dtype, device=c.device)] * (3 if with_h else 2)
        for v, weight in zip(nodes.size.tolist(), nodes.both.tolist(), strict=True):
            f, g, *h = self.fixed(v**2 * q1, v**2 * q2, v**2 * c, with_h=with_h)
            terms = [f, v**2 * g, *(x / v**2 if v else c * g for x in h)]
            sums = [total + weight * term for total, term in zip(sums, terms, strict=True)]
        return sums[0], sums[1], sums[2] if with_h else None

    def cross(self, q1: Tensor, q2: Tensor, c: Tensor, law: Law | None) -> tuple[Tensor, Tensor]:
        if not tells_apart(law):
            return self.same(q1, q2, c, law, with_h=False)[:2]
        q_max = span(q1, q2)[1]
        if not self._is_summed(q_max, law):
            return super().cross(q1, q2, c, law)
        sizes = list(zip(*(x.tolist() for x in _nodes(q_max, law)), strict=True))
        f = g = torch.zeros((), dtype=c.dtype, device=c.device)
        for (v1, plus1, minus1), (v2, plus2, minus2) in product(sizes, sizes):
            for sign, weight in (
                (1, plus1 * plus2 + minus1 * minus2),
                (-1, plus1 * minus2 + minus1 * plus2),
            ):
                v12 = sign * v1 * v2
                f12, g12 = self.fixed(v1**2 * q1, v2**2 * q2, v12 * c, with_h=False)
                f, g = f + weight * f12, g + weight * v12 * g12
        return f, g

    def prepare(self, q_min: float, q_max: float, law: Law | None) -> Dual:
        return self if self._is_summed(q_max, law) else super().prepare(q_min, q_max, law)

    def _is_summed(self, q_max: float, law: Law | None) -> bool:
        """Whether two modulations are summed over one by one, rather than read from a table."""
        if is_normal(law):
            return law.second_moment * q_max > _WIDE  # type: ignore[union-attr]
        return law is None or len(law.quadrature()[0]) <= _FEW


def _nodes(q_max: float, law: Law | None) -> Nodes:
    return Nodes.of(law, 61, 0.5 / math.sqrt(round_out(q_max, q_max)[1]))


@final
class Erf(Closed):
    r"""Dual of the error function.

    .. math::
        E[\phi \phi] = \frac{2}{\pi} \arcsin \frac{2 C}{\sqrt{(1 + 2 Q_1)(1 + 2 Q_2)}}
    """

    def __init__(self):
        super().__init__(torch.erf, "erf")

    def fixed(self, q1: Tensor, q2: Tensor, c: Tensor, *, with_h: bool) -> tuple[Tensor, ...]:
        delta = 1 + 2 * (q1 + q2) + 4 * (q1 * q2 - c * c)
        root = delta.sqrt()
        f, g = 2 / math.pi * torch.atan2(2 * c, root), 4 / math.pi / root
        return (f, g, c * g / delta) if with_h else (f, g)


@final
class Wave(Closed):
    r"""Dual of the sine (parity -1) or the cosine (1).

    Their products are half a difference or sum of waves of sum and difference:
    :math:`E[\phi \phi] = e^{-(Q_1 + Q_2) / 2} \sinh C` for the sine, with cosh for the cosine.
    """

    def __init__(self, parity: int):
        super().__init__(*((torch.sin, "sin") if parity < 0 else (torch.cos, "cos")))
        self.parity = parity

    def fixed(self, q1: Tensor, q2: Tensor, c: Tensor, *, with_h: bool) -> tuple[Tensor, ...]:
        mean = (q1 + q2) / 2
        minus, plus = torch.exp(c - mean), torch.exp(-c - mean)  # E cos(y₁ ∓ y₂)
        small = torch.exp(-mean) * torch.sinh(c.clamp(-1, 1))  # where the difference would cancel
        odd, even = torch.where(c.abs() < 1, small, (minus - plus) / 2), (minus + plus) / 2
        f, g = (odd, even) if self.parity < 0 else (even, odd)
        if not with_h:
            return f, g
        rest = (q1 - c) * (q2 - c) * minus + self.parity * (q1 + c) * (q2 + c) * plus
        return f, g, c * g + rest / 2

    def cross(self, q1: Tensor, q2: Tensor, c: Tensor, law: Law | None) -> tuple[Tensor, Tensor]:
        if not is_normal(law):
            return super().cross(q1, q2, c, law)
        assert law is not None
        m2, s2 = law.mean**2, law.variance
        gap = q1 * q2 - c * c
        delta = 1 + s2 * (q1 + q2) + s2**2 * gap
        sides, slopes = [], []  # E exp(-(v₁² q₁ + v₂² q₂ ∓ 2 v₁ v₂ c) / 2), derivatives by ±c
        for x in (c, -c):
            n = q1 + q2 - 2 * x + 2 * s2 * gap
            sides.append(torch.exp(-m2 * n / (2 * delta)) * delta.rsqrt())
            slope = s2**2 * x / delta + m2 * ((1 + 2 * s2 * x) - s2**2 * x * n / delta) / delta
            slopes.append(sides[-1] * slope)
        if self.parity < 0:
            return _difference(sides, 2 * m2 * c / delta) / 2, (slopes[0] + slopes[1]) / 2
        return (sides[0] + sides[1]) / 2, (slopes[0] - slopes[1]) / 2

    def _is_summed(self, q_max: float, law: Law | None) -> bool:
        return is_normal(law) or super()._is_summed(q_max, law)


@final
class Gelu(Closed):
    r"""Dual of :math:`x\, \Phi(x)` with the normal distribution function :math:`\Phi`.

    With :math:`d_i = 1 + Q_i`, :math:`\Delta = d_1 d_2 - C^2`,
    :math:`\kappa = 1 / d_1 + 1 / d_2 - 1` and :math:`N = Q_1 Q_2 + \kappa C^2`,

    .. math::
        2 \pi\, E[\phi \phi] = C\, \left(\tfrac{\pi}{2} + \arcsin \tfrac{C}{\sqrt{d_1 d_2}}\right)
            + N / \sqrt{\Delta}
    """

    def __init__(self):
        super().__init__(torch.nn.functional.gelu, "GELU")

    def fixed(self, q1: Tensor, q2: Tensor, c: Tensor, *, with_h: bool) -> tuple[Tensor, ...]:
        d1, d2, gap = 1 + q1, 1 + q2, q1 * q2 - c * c
        delta = 1 + q1 + q2 + gap
        i1 = delta.rsqrt()
        i2, i3 = i1 / delta, i1 / delta**2  # powers -3/2 and -5/2
        kappa = 1 / d1 + 1 / d2 - 1
        n = gap + (kappa + 1) * c * c
        angle = math.pi / 2 + torch.atan2(c, delta.sqrt())
        f = (c * angle + n * i1) / (2 * math.pi)
        g = (angle + (1 + 2 * kappa) * c * i1 + n * c * i2) / (2 * math.pi)
        if not with_h:
            return f, g
        by_c = i1 + ((1 + 2 * kappa) * d1 * d2 + n + 2 * kappa * c * c) * i2 + 3 * n * c * c * i3
        by_q = [
            c * i1 * (-1 / (2 * d) - 2 / d**2)
            + c * i2 * (other - 1 - c * c / d**2 - (1 + 2 * kappa) * other / 2)
            - 1.5 * n * c * other * i3
            for d, other in ((d1, d2), (d2, d1))
        ]
        rest = (q1 * q2 + c * c) * by_c + 2 * c * (q1 * by_q[0] + q2 * by_q[1])
        return f, g, c * g + rest / (2 * math.pi)


def _difference(values: list[Tensor], ratio: Tensor) -> Tensor:
    """Return the difference of two positive numbers without cancellation, by their log-ratio."""
    first = -values[0] * torch.expm1((-ratio).clamp(max=0))
    return torch.where(ratio >= 0, first, values[1] * torch.expm1(ratio.clamp(max=0)))
