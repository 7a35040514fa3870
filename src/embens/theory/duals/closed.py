r"""Duals with closed forms for fixed modulations: erf, sine, cosine and GELU.

Given :math:`v_1, v_2`, let :math:`Q_i = v_i^2 q_i` and :math:`C = v_1 v_2 c` be the moments of
:math:`y_i = v_i z_i`. A law with a few values is summed over. For other laws these activations are
read from tables, as all smooth ones are (:mod:`embens.theory.duals.smooth`).

Integration by parts gives, where no shorter form is at hand,

.. math::
    E[y_1 y_2\, \phi' \phi'] = C g + (Q_1 Q_2 + C^2)\, \partial_C g
        + 2 C\, (Q_1 \partial_{Q_1} + Q_2 \partial_{Q_2})\, g, \qquad g = E[\phi' \phi'].
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import final

import torch
from torch import Tensor

from embens.laws import Law
from embens.theory.duals.expectations import Dual, tells_apart
from embens.theory.duals.smooth import Smooth

_FEW = 8  # values of a modulation that are summed over


class Closed(Smooth):
    """Dual with a closed form for fixed modulations."""

    @abstractmethod
    def fixed(self, q1: Tensor, q2: Tensor, c: Tensor, *, with_h: bool) -> tuple[Tensor, ...]:
        r"""Return :math:`E[φφ]`, :math:`E[φ'φ']` and, on demand, :math:`E[y_1 y_2 φ'φ']`."""

    def same(
        self, q1: Tensor, q2: Tensor, c: Tensor, law: Law | None, *, with_h: bool = True
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        values = _few_values(law)
        if values is None:
            return super().same(q1, q2, c, law, with_h=with_h)
        sizes: dict[float, float] = {}
        for v, weight in values:  # v and -v give the same
            sizes[abs(v)] = sizes.get(abs(v), 0.0) + weight
        sums = [torch.zeros((), dtype=c.dtype, device=c.device)] * (3 if with_h else 2)
        for v, weight in sizes.items():
            f, g, *h = self.fixed(v**2 * q1, v**2 * q2, v**2 * c, with_h=with_h)
            terms = [f, v**2 * g, *(x / v**2 if v else c * g for x in h)]
            sums = [total + weight * term for total, term in zip(sums, terms, strict=True)]
        return sums[0], sums[1], sums[2] if with_h else None

    def cross(self, q1: Tensor, q2: Tensor, c: Tensor, law: Law | None) -> tuple[Tensor, Tensor]:
        values = _few_values(law)
        if not tells_apart(law):
            return self.same(q1, q2, c, law, with_h=False)[:2]
        if values is None:
            return super().cross(q1, q2, c, law)
        sums = [torch.zeros((), dtype=c.dtype, device=c.device)] * 2
        for v1, weight1 in values:
            for v2, weight2 in values:
                f, g = self.fixed(v1**2 * q1, v2**2 * q2, v1 * v2 * c, with_h=False)
                weight = weight1 * weight2
                sums = [sums[0] + weight * f, sums[1] + weight * v1 * v2 * g]
        return sums[0], sums[1]

    def prepare(self, q_min: float, q_max: float, law: Law | None) -> Dual:
        return self if _few_values(law) is not None else super().prepare(q_min, q_max, law)


@final
class Erf(Closed):
    r"""Dual of the error function.

    .. math::
        E[\phi \phi] = \frac{2}{\pi} \arcsin \frac{2 C}{\sqrt{(1 + 2 Q_1)(1 + 2 Q_2)}}

    Example:
        >>> one = torch.ones(1, dtype=torch.float64)
        >>> Erf().same(one, one, one / 2, None)[0].item() * math.pi / 2  # arcsin 1/3
        0.339836909454...
    """

    def __init__(self):
        super().__init__(torch.erf, "erf")

    def fixed(self, q1: Tensor, q2: Tensor, c: Tensor, *, with_h: bool) -> tuple[Tensor, ...]:
        delta = 1 + 2 * (q1 + q2) + 4 * (q1 * q2 - c * c)
        root = delta.sqrt()
        f, g = 2 / math.pi * torch.atan2(2 * c, root), 4 / math.pi / root
        return (f, g, c * g / delta) if with_h else (f, g)


@final
class Sine(Closed):
    r"""Dual of the sine: :math:`E[\phi \phi] = e^{-(Q_1 + Q_2) / 2} \sinh C`.

    Example:
        >>> one = torch.ones(1, dtype=torch.float64)
        >>> Sine().same(one, one, one, None)[0].item()  # (1 - e⁻²) / 2
        0.432332358381...
    """

    def __init__(self):
        super().__init__(torch.sin, "sin")

    def fixed(self, q1: Tensor, q2: Tensor, c: Tensor, *, with_h: bool) -> tuple[Tensor, ...]:
        minus, plus, sine, cosine = _waves(q1, q2, c)
        if not with_h:
            return sine, cosine
        rest = (q1 - c) * (q2 - c) * minus - (q1 + c) * (q2 + c) * plus
        return sine, cosine, c * cosine + rest / 2


@final
class Cosine(Closed):
    r"""Dual of the cosine: :math:`E[\phi \phi] = e^{-(Q_1 + Q_2) / 2} \cosh C`.

    Example:
        >>> one = torch.ones(1, dtype=torch.float64)
        >>> Cosine().same(one, one, one, None)[0].item()  # (1 + e⁻²) / 2
        0.567667641618...
    """

    def __init__(self):
        super().__init__(torch.cos, "cos")

    def fixed(self, q1: Tensor, q2: Tensor, c: Tensor, *, with_h: bool) -> tuple[Tensor, ...]:
        minus, plus, sine, cosine = _waves(q1, q2, c)
        if not with_h:
            return cosine, sine
        rest = (q1 - c) * (q2 - c) * minus + (q1 + c) * (q2 + c) * plus
        return cosine, sine, c * sine + rest / 2


@final
class Gelu(Closed):
    r"""Dual of :math:`x\, \Phi(x)` with the normal distribution function :math:`\Phi`.

    With :math:`d_i = 1 + Q_i`, :math:`\Delta = d_1 d_2 - C^2`,
    :math:`\kappa = 1 / d_1 + 1 / d_2 - 1` and :math:`N = Q_1 Q_2 + \kappa C^2`,

    .. math::
        2 \pi\, E[\phi \phi] = C\, \left(\tfrac{\pi}{2} + \arcsin \tfrac{C}{\sqrt{d_1 d_2}}\right)
            + N / \sqrt{\Delta}

    Example:
        >>> zero, one = torch.zeros(1), torch.ones(1)
        >>> round(math.pi * Gelu().same(one, one, zero, None)[0].item(), 6)  # Q₁Q₂ / 2√(d₁d₂)
        0.25
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


def _waves(q1: Tensor, q2: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return E cos(y1 - y2), E cos(y1 + y2), and half their difference and sum."""
    mean = (q1 + q2) / 2
    minus, plus = torch.exp(c - mean), torch.exp(-c - mean)
    small = torch.exp(-mean) * torch.sinh(c.clamp(-1, 1))  # where the difference would cancel
    return minus, plus, torch.where(c.abs() < 1, small, (minus - plus) / 2), (minus + plus) / 2


def _few_values(law: Law | None) -> list[tuple[float, float]] | None:
    """Return the values of a law and their weights, or None if they are many."""
    if law is None:
        return [(1.0, 1.0)]
    nodes, weights = law.quadrature()
    return list(zip(nodes.tolist(), weights.tolist(), strict=True)) if len(nodes) <= _FEW else None
