r"""Duals with closed forms: piecewise linear activations, erf, sine, cosine and GELU.

*Piecewise linear activations* (ReLU, leaky ReLU, absolute value, identity) are positively
homogeneous, so modulations enter by their half-line moments only: :class:`Homogeneous`.

*The others* have a closed form for fixed modulations, in the moments :math:`Q_i = v_i^2 q_i` and
:math:`C = v_1 v_2 c` of :math:`y_i = v_i z_i`; see :class:`FixedModulation`. The average over
:math:`v` is a sum for discrete laws. For normal laws it uses nodes that follow the singularities
of these functions at imaginary :math:`v` of size :math:`1 / \sqrt{q}`, so it is accurate for any
variance. Between two members that is a double sum; where variances are moderate, the series of
:mod:`embens.theory.quadrature` is as accurate and faster.
"""

import copy
import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from embens.laws import Discrete, Law
from embens.theory.expectations import Dual, differs_between_members, is_differentiated, roots
from embens.theory.law_nodes import LawNodes, is_normal, law_nodes
from embens.theory.quadrature import Smooth, largest_variance

_FEW_VALUES = 8  # values of a discrete law that are summed over pairs
_LARGE_VARIANCE = 4.0  # E[v²] q beyond which the series between members needs too many terms


@final
@dataclass(frozen=True)
class Homogeneous(Dual):
    r"""Dual of an activation with one slope on each side of 0.

    With slopes :math:`a` right and :math:`b` left of 0 and :math:`\cos\theta = c / \sqrt{q_1 q_2}`,

    .. math::
        G = \tfrac{1}{2}(a^2 + b^2) - \tfrac{1}{2\pi}(a - b)^2\, \theta, \qquad
        F = G\, c + \tfrac{1}{2\pi}(a - b)^2 \sqrt{q_1 q_2} \sin\theta

    without modulations. Within a member both are multiplied by :math:`E v^2`, and :math:`H = P(v
    \ne 0)\, F` without that factor. Between members, half-lines of equal and of opposite sign
    have the weights :math:`s` and :math:`d` given by ``pair_half_moment``, and the latter see
    :math:`-c`: :math:`F = s F(c) + d F(-c)` and :math:`G = s G(c) - d G(-c)`.

    Angles below the square root of the rounding error are replaced by 0 (or π), so that equal and
    collinear inputs give exact results.

    Attributes:
        right: Slope for positive arguments.
        left: Slope for negative arguments.
        at_zero: Derivative that torch uses at 0; H contains it where v = 0.

    Example:
        >>> q = torch.tensor([2.0], dtype=torch.float64)
        >>> f, g, h = Homogeneous().same(q, q, q, None)  # ReLU of one variable
        >>> f.item(), g.item(), h.item()
        (1.0, 0.5, 1.0)
    """

    right: float = 1.0
    left: float = 0.0
    at_zero: float = 0.0

    def same(
        self,
        q1: Tensor,
        q2: Tensor,
        c: Tensor,
        law: Law | None,
        *,
        with_h: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        second_moment = 1.0 if law is None else law.second_moment
        level = second_moment * self._level
        bend = second_moment * self._bend
        f, g = _angle_expectations(q1, q2, c, level, bend)
        if not with_h:
            return f, g, None
        nonzero = 1.0
        if law is not None:
            nonzero = law.half_moment(0, 1) + law.half_moment(0, -1)
        factor = 0.0
        if second_moment > 0:
            factor = nonzero / second_moment
        h = f * factor
        if self.at_zero and nonzero < 1:
            h = h + (1 - nonzero) * self.at_zero**2 * c
        return f, g, h

    def cross(self, q1: Tensor, q2: Tensor, c: Tensor, law: Law | None) -> tuple[Tensor, Tensor]:
        if law is None or not differs_between_members(law):
            f, g, _ = self.same(q1, q2, c, law, with_h=False)
            return f, g
        equal_sign = law.pair_half_moment(1, 1) + law.pair_half_moment(-1, -1)
        opposite_sign = 2 * law.pair_half_moment(1, -1)
        # G(-c) has the angle π - θ, so the sum of both signs is of the same form again.
        mirrored_level = math.pi * self._bend - self._level
        level = equal_sign * self._level + opposite_sign * mirrored_level
        bend = (equal_sign + opposite_sign) * self._bend
        return _angle_expectations(q1, q2, c, level, bend)

    def joint(
        self,
        q1: Tensor,
        q2: Tensor,
        c: Tensor,
        law: Law | None,
        members: int,
    ) -> tuple[Tensor, Tensor]:
        return self.cross(q1, q2, c, law)

    @property
    def _level(self) -> float:
        """Value of G at the angle 0, without modulations."""
        return (self.right**2 + self.left**2) / 2

    @property
    def _bend(self) -> float:
        """Amount by which G falls per unit of the angle, without modulations."""
        return (self.right - self.left) ** 2 / (2 * math.pi)


def _angle_expectations(
    q1: Tensor,
    q2: Tensor,
    c: Tensor,
    level: float,
    bend: float,
) -> tuple[Tensor, Tensor]:
    """Return F and G = level - bend · θ."""
    c = c.expand(torch.broadcast_shapes(q1.shape, q2.shape, c.shape))
    if bend == 0:
        g = torch.full_like(c, level, memory_format=torch.contiguous_format)
        return level * c, g
    root1, inverse1 = roots(q1)
    root2, inverse2 = roots(q2)
    if is_differentiated(q1, q2, c):
        theta, sine = _angle(c, inverse1, inverse2)
        g = level - bend * theta
        f = g * c + sine * (bend * root1) * root2
        return f, g
    # The same in place: kernels are limited by memory traffic.
    theta, sine = _angle_in_place(c, inverse1, inverse2)
    g = theta.mul_(-bend).add_(level)
    f = sine.mul_(bend * root1).mul_(root2).addcmul_(g, c)
    return f, g


def _angle_in_place(c: Tensor, inverse1: Tensor, inverse2: Tensor) -> tuple[Tensor, Tensor]:
    """Return the angle and its sine, with few passes over memory."""
    cosine = (c * inverse1).mul_(inverse2)
    sine = (1 - cosine).mul_(1 + cosine)
    sine = torch.threshold_(sine, _rounding_of_squared_sine(c), 0.0).sqrt_()
    return torch.atan2(sine, cosine, out=cosine), sine


def _angle(c: Tensor, inverse1: Tensor, inverse2: Tensor) -> tuple[Tensor, Tensor]:
    """Return the angle and its sine, with derivatives, which are 0 where the angle is 0 or π.

    F still has correct first derivatives there, since they do not contain those of the angle. Its
    second derivatives are infinite and count as 0.
    """
    cosine = c * inverse1 * inverse2
    squared_sine = (1 - cosine) * (1 + cosine)
    flat = squared_sine <= _rounding_of_squared_sine(c)
    sine = torch.where(flat, 1.0, squared_sine).sqrt()
    end = math.pi * (cosine < 0).to(c.dtype)
    theta = torch.where(flat, end, torch.atan2(sine, cosine))
    return theta, torch.where(flat, 0.0, sine)


def _rounding_of_squared_sine(c: Tensor) -> float:
    """Return the squared sine that rounding alone can produce."""
    return 8 * torch.finfo(c.dtype).eps


class FixedModulation(Smooth):
    """Dual with a closed form for fixed modulations."""

    target = 1e-11
    _q_max: float | None = None

    @abstractmethod
    def fixed(self, q1: Tensor, q2: Tensor, c: Tensor, *, with_h: bool) -> tuple[Tensor, ...]:
        r"""Compute the expectations without modulations.

        Args:
            q1: Variances :math:`Q_1`.
            q2: Variances :math:`Q_2`.
            c: Covariances :math:`C`.
            with_h: Compute the third expectation.

        Returns:
            :math:`E[φφ]`, :math:`g = E[φ'φ']` and, with ``with_h``, :math:`E[y_1 y_2 φ'φ']`. By
            integration by parts the last one is :math:`C g + (Q_1 Q_2 + C^2)\, \partial_C g + 2 C\,
            (Q_1 \partial_{Q_1} + Q_2 \partial_{Q_2})\, g`.
        """

    def same(
        self,
        q1: Tensor,
        q2: Tensor,
        c: Tensor,
        law: Law | None,
        *,
        with_h: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        if not (law is None or isinstance(law, Discrete) or is_normal(law)):
            return super().same(q1, q2, c, law, with_h=with_h)
        nodes = self._nodes(q1, q2, law)
        f = g = h = torch.zeros((), dtype=c.dtype, device=c.device)
        for v, plus, minus in nodes.rows():
            weight = plus + minus
            terms = self.fixed(v**2 * q1, v**2 * q2, v**2 * c, with_h=with_h)
            f = f + weight * terms[0]
            g = g + weight * v**2 * terms[1]
            if with_h:
                # E[y₁ y₂ φ'φ'] / v² tends to c E[φ'φ'] as v vanishes.
                h_term = terms[2] / v**2 if v else c * terms[1]
                h = h + weight * h_term
        return f, g, h if with_h else None

    def cross(self, q1: Tensor, q2: Tensor, c: Tensor, law: Law | None) -> tuple[Tensor, Tensor]:
        if not differs_between_members(law):
            f, g, _ = self.same(q1, q2, c, law, with_h=False)
            return f, g
        if not self._is_double_sum(self._largest(q1, q2), law):
            return super().cross(q1, q2, c, law)
        nodes = self._nodes(q1, q2, law).rows()
        f = g = torch.zeros((), dtype=c.dtype, device=c.device)
        for v1, plus1, minus1 in nodes:
            for v2, plus2, minus2 in nodes:
                equal_sign = plus1 * plus2 + minus1 * minus2
                opposite_sign = plus1 * minus2 + minus1 * plus2
                variances = v1**2 * q1, v2**2 * q2
                f_equal, g_equal = self.fixed(*variances, v1 * v2 * c, with_h=False)
                f_opposite, g_opposite = self.fixed(*variances, -v1 * v2 * c, with_h=False)
                f = f + (equal_sign * f_equal + opposite_sign * f_opposite)
                g = g + v1 * v2 * (equal_sign * g_equal - opposite_sign * g_opposite)
        return f, g

    def prepare(self, q_max: float, law: Law | None) -> Dual:
        prepared: Any = self
        if differs_between_members(law) and not self._is_double_sum(q_max, law):
            prepared = super().prepare(q_max, law)
        prepared = copy.copy(prepared)
        prepared._q_max = q_max
        return prepared

    def _largest(self, q1: Tensor, q2: Tensor) -> float:
        return largest_variance(q1, q2) if self._q_max is None else self._q_max

    def _nodes(self, q1: Tensor, q2: Tensor, law: Law | None) -> LawNodes:
        return law_nodes(law, width=0.5 / math.sqrt(self._largest(q1, q2)))

    def _is_double_sum(self, q_max: float, law: Law | None) -> bool:
        """Return True if expectations between members are sums over pairs of modulations."""
        if law is None:
            return True
        if is_normal(law):
            return law.second_moment * q_max > _LARGE_VARIANCE
        return len(law.quadrature()[0]) <= _FEW_VALUES


@final
class Erf(FixedModulation):
    r"""Dual of the error function.

    .. math::
        E[\phi \phi] = \frac{2}{\pi} \arcsin \frac{2 C}{\sqrt{(1 + 2 Q_1)(1 + 2 Q_2)}}
    """

    def __init__(self):
        super().__init__(torch.erf, "erf")

    def fixed(self, q1: Tensor, q2: Tensor, c: Tensor, *, with_h: bool) -> tuple[Tensor, ...]:
        delta = 1 + 2 * (q1 + q2) + 4 * (q1 * q2 - c * c)
        root = delta.sqrt()
        f = 2 / math.pi * torch.atan2(2 * c, root)
        g = 4 / math.pi / root
        if not with_h:
            return f, g
        return f, g, c * g / delta


@final
class Wave(FixedModulation):
    r"""Dual of the sine (parity -1) or the cosine (parity 1).

    A product of waves is half the sum or difference of the waves of :math:`y_1 \pm y_2`, so
    :math:`E[\phi \phi] = e^{-(Q_1 + Q_2) / 2} \sinh C` for the sine, with cosh for the cosine.
    """

    def __init__(self, parity: int):
        if parity < 0:
            super().__init__(torch.sin, "sin")
        else:
            super().__init__(torch.cos, "cos")
        self.parity = parity

    def fixed(self, q1: Tensor, q2: Tensor, c: Tensor, *, with_h: bool) -> tuple[Tensor, ...]:
        mean = (q1 + q2) / 2
        of_difference = torch.exp(c - mean)  # E cos(y₁ - y₂)
        of_sum = torch.exp(-c - mean)  # E cos(y₁ + y₂)
        # For small C the difference would cancel, and sinh does not overflow.
        small = torch.exp(-mean) * torch.sinh(c.clamp(-1, 1))
        odd = torch.where(c.abs() < 1, small, (of_difference - of_sum) / 2)
        even = (of_difference + of_sum) / 2
        f, g = (odd, even) if self.parity < 0 else (even, odd)
        if not with_h:
            return f, g
        difference_term = (q1 - c) * (q2 - c) * of_difference
        sum_term = self.parity * (q1 + c) * (q2 + c) * of_sum
        return f, g, c * g + (difference_term + sum_term) / 2

    def cross(self, q1: Tensor, q2: Tensor, c: Tensor, law: Law | None) -> tuple[Tensor, Tensor]:
        if not is_normal(law):
            return super().cross(q1, q2, c, law)
        # The exponent is quadratic in (v₁, v₂), so its normal average has a closed form.
        assert law is not None
        squared_mean, variance = law.mean**2, law.variance
        gap = q1 * q2 - c * c
        delta = 1 + variance * (q1 + q2) + variance**2 * gap

        def wave(x: Tensor) -> tuple[Tensor, Tensor]:
            """Return E exp(-(v₁² q₁ + v₂² q₂ - 2 v₁ v₂ x) / 2) and its derivative in x."""
            exponent = q1 + q2 - 2 * x + 2 * variance * gap
            value = torch.exp(-squared_mean * exponent / (2 * delta)) * delta.rsqrt()
            by_mean = (1 + 2 * variance * x - variance**2 * x * exponent / delta) / delta
            slope = value * (variance**2 * x / delta + squared_mean * by_mean)
            return value, slope

        of_difference, slope_of_difference = wave(c)
        of_sum, slope_of_sum = wave(-c)
        if self.parity < 0:
            log_ratio = 2 * squared_mean * c / delta
            f = _difference(of_difference, of_sum, log_ratio) / 2
            return f, (slope_of_difference + slope_of_sum) / 2
        return (of_difference + of_sum) / 2, (slope_of_difference - slope_of_sum) / 2

    def _is_double_sum(self, q_max: float, law: Law | None) -> bool:
        return is_normal(law) or super()._is_double_sum(q_max, law)


@final
class Gelu(FixedModulation):
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
        d1 = 1 + q1
        d2 = 1 + q2
        gap = q1 * q2 - c * c
        delta = 1 + q1 + q2 + gap
        root = delta.rsqrt()
        cubed = root / delta  # Δ^(-3/2)
        kappa = 1 / d1 + 1 / d2 - 1
        n = gap + (kappa + 1) * c * c
        angle = math.pi / 2 + torch.atan2(c, delta.sqrt())
        f = (c * angle + n * root) / (2 * math.pi)
        g = (angle + (1 + 2 * kappa) * c * root + n * c * cubed) / (2 * math.pi)
        if not with_h:
            return f, g
        fifth = cubed / delta  # Δ^(-5/2)
        by_c = root + ((1 + 2 * kappa) * d1 * d2 + n + 2 * kappa * c * c) * cubed
        by_c = by_c + 3 * n * c * c * fifth

        def by_variance(d: Tensor, d_second: Tensor) -> Tensor:
            """Return the derivative of 2π g by the variance of the first argument."""
            bracket = d_second - 1 - c * c / d**2 - (1 + 2 * kappa) * d_second / 2
            slope = c * root * (-1 / (2 * d) - 2 / d**2)
            slope = slope + c * cubed * bracket
            return slope - 1.5 * n * c * d_second * fifth

        by_variances = q1 * by_variance(d1, d2) + q2 * by_variance(d2, d1)
        by_parts = (q1 * q2 + c * c) * by_c + 2 * c * by_variances
        return f, g, c * g + by_parts / (2 * math.pi)


def _difference(first: Tensor, second: Tensor, log_ratio: Tensor) -> Tensor:
    """Return the difference of positive tensors from their log-ratio, without cancellation."""
    first_is_larger = -first * torch.expm1((-log_ratio).clamp(max=0))
    second_is_larger = second * torch.expm1(log_ratio.clamp(max=0))
    return torch.where(log_ratio >= 0, first_is_larger, second_is_larger)
