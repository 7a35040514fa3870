r"""Duals of activations that are linear on each half-line: ReLU, leaky ReLU, absolute value.

With slopes :math:`a` right and :math:`b` left of 0 and :math:`\cos\theta = c / \sqrt{q_1 q_2}`,

.. math::
    G = \tfrac{1}{2}(a^2 + b^2) - \tfrac{1}{2\pi}(a - b)^2\, \theta, \qquad
    F = G\, c + \tfrac{1}{2\pi}(a - b)^2 \sqrt{q_1 q_2} \sin\theta

without modulations; for ReLU these are the arc-cosine kernels of degree 0 and 1. Since
:math:`\phi(v z) = |v|\, \phi(\pm z)`, modulations change two numbers. Within a member, :math:`F`
and :math:`G` are multiplied by :math:`E v^2`, and :math:`H = P(v \ne 0)\, F` without that factor.
Between members, :math:`\psi(z) = E_v\, \phi(v z)` is such an activation again, with slopes

.. math::
    a' = a\, m^+ - b\, m^-, \qquad b' = b\, m^+ - a\, m^-, \qquad m^\pm = E \max(\pm v, 0).

Near :math:`\theta = 0` an angle is known only to the square root of the rounding error. Angles
below that are taken to be 0 (or π), so that equal and collinear inputs give exact results.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from embens.laws import Law
from embens.theory.duals.expectations import Dual, is_differentiated, roots, tells_apart


@final
@dataclass(frozen=True)
class Homogeneous(Dual):
    """Dual of an activation with one slope on each side of 0.

    Attributes:
        right: slope for positive arguments.
        left: slope for negative arguments.
        at_zero: what torch takes for the derivative at 0, which ``H`` sees where ``v = 0``.

    Example:
        >>> one, minus = torch.ones(1), -torch.ones(1)
        >>> relu = Homogeneous()
        >>> [x.item() for x in relu.same(one, one, one, None)]
        [0.5, 0.5, 0.5]
        >>> [x.item() for x in relu.cross(one, one, minus, None)]
        [0.0, 0.0]
    """

    right: float = 1.0
    left: float = 0.0
    at_zero: float = 0.0

    def same(
        self, q1: Tensor, q2: Tensor, c: Tensor, law: Law | None, *, with_h: bool = True
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        second = 1.0 if law is None else law.second_moment
        f, g = _expectations(q1, q2, c, self.right, self.left, factor=second)
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
        plus, minus = law.half_moment(1, 1), law.half_moment(1, -1)
        right = self.right * plus - self.left * minus
        left = self.left * plus - self.right * minus
        return _expectations(q1, q2, c, right, left)


def _expectations(
    q1: Tensor, q2: Tensor, c: Tensor, right: float, left: float, *, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return :math:`F` and :math:`G` for these slopes, times a factor."""
    c = c.expand(torch.broadcast_shapes(q1.shape, q2.shape, c.shape))
    level = factor * (right**2 + left**2) / 2
    bend = factor * (right - left) ** 2 / (2 * math.pi)
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
    """Return the angle and its sine, with as few passes over memory as we can."""
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
