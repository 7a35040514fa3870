r"""Variance that one unit of a hidden layer adds to a kernel between two members.

Member :math:`a` has the input :math:`x`, member :math:`b` the input :math:`x'`. Their units have
pre-activations :math:`z_a, z_b`, modulations :math:`v_a, v_b, u_a, u_b`, and gradients :math:`e_a,
e_b` of the network's output by the unit's output. The unit adds

.. math::
    Y = u_a^2\, \phi_a^\top A_a \phi_a + u_b^2\, \phi_b^\top A_b \phi_b
        + u_a u_b \big(\phi_a^\top A_{ab} \phi_b + e_a^\top B e_b\big), \qquad
    B_{pq} = \Theta_{pq}\, \psi_{a,p} \psi_{b,q} .

Vectors are over pixels, with one entry in a perceptron; :math:`\phi_a = \phi(v_a z_a)` and
:math:`\psi_a = v_a\, \phi'(v_a z_a)`. The gradients are normal and independent of the rest, with
covariances :math:`D_a, D_b, D_{ab}`, so their moments are known in closed form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from embens.theory import activations
from embens.theory.closed_forms import Homogeneous
from embens.theory.kinks import sector_nodes
from embens.theory.placement import Modulation

DRAWS = 1024
"""Number of fixed draws of a channel's pixels."""

_SMOOTH_NODES = 17  # nodes of v for each member, where it is no factor of the activation


@dataclass(frozen=True)
class Sensitivities:
    """Derivatives of the outputs' kernels by the kernels of one hidden layer, ``(pair, p, p)``.

    Attributes:
        first: :math:`A_a`, by the kernel of the first member.
        second: :math:`A_b`, by the kernel of the second member.
        between: :math:`A_{ab}`, by the kernel between both.
        gradient_first: :math:`D_a`, covariance of the first member's gradients.
        gradient_second: :math:`D_b`, covariance of the second member's gradients.
        gradient_between: :math:`D_{ab}`, covariance between both.
    """

    first: Tensor
    second: Tensor
    between: Tensor
    gradient_first: Tensor
    gradient_second: Tensor
    gradient_between: Tensor


class PairMoments(NamedTuple):
    r"""Expectations :math:`m_{ij} = E[u_a^i u_b^j]` of two members."""

    m20: float
    m02: float
    m11: float
    m40: float
    m04: float
    m22: float
    m31: float
    m13: float

    def times(self, other: PairMoments) -> PairMoments:
        """Return the moments of a product of independent modulations."""
        return PairMoments(*(x * y for x, y in zip(self, other, strict=True)))


class _Terms(NamedTuple):
    """Means over units of the terms of Y, each ``(pair,)``, without the factors of u."""

    first: Tensor
    second: Tensor
    between: Tensor


def unit_variance(
    activation: nn.Module,
    covariances: tuple[Tensor, Tensor, Tensor],
    tangent: Tensor,
    sensitivities: Sensitivities,
    pre: Modulation | None,
    post: Modulation | None,
) -> Tensor:
    """Return the variance of Y over units.

    Args:
        activation: The activation of the layer.
        covariances: Covariances of its units within the first member, within the second member and
            between both, each ``(pair, p, p)``.
        tangent: Tangent kernel of shared parameters between both members, ``(pair, p, p)``.
        sensitivities: Derivatives of the outputs' kernels.
        pre: Modulation v.
        post: Modulation u.

    Returns:
        One variance for each pair of inputs, ``(pair,)``. Times 1/width it is the variance that the
        layer adds.
    """
    z1, z2, weights = _unit_nodes(*covariances)
    post_moments = _pair_moments(post)
    zero = weights.new_zeros(len(weights))
    totals = _Terms(zero, zero, zero)
    mean = square = zero
    class_means = []
    for v1, v2, v_moments in _classes(activation, pre):
        value1, slope1 = _values(activation, v1, z1)
        value2, slope2 = _values(activation, v2, z2)
        terms, noise = _unit_terms(value1, slope1, value2, slope2, tangent, sensitivities)
        moments = v_moments.times(post_moments)
        averages = _Terms(*((term * weights).sum(1) for term in terms))
        class_mean = moments.m20 * averages.first + moments.m02 * averages.second
        class_mean = class_mean + moments.m11 * averages.between
        mean = mean + class_mean
        class_means.append((v_moments.m20, class_mean))
        square = square + (_square(terms, noise, moments) * weights).sum(1)
        totals = _Terms(
            totals.first + v_moments.m20 * averages.first,
            totals.second + v_moments.m02 * averages.second,
            totals.between + v_moments.m11 * averages.between,
        )
    variance = square - mean**2
    variance = variance - _excess_of_post(totals, post)
    return variance - _excess_of_pre(class_means, mean, pre)


def _square(terms: _Terms, noise: Tensor, m: PairMoments) -> Tensor:
    """Return the expectation of Y² over u and the gradients, for each unit."""
    first, second, between = terms
    square = m.m40 * first**2 + m.m04 * second**2 + 2 * m.m22 * first * second
    square = square + 2 * (m.m31 * first + m.m13 * second) * between
    return square + m.m22 * (between**2 + noise)


def _unit_terms(
    value1: Tensor,
    slope1: Tensor,
    value2: Tensor,
    slope2: Tensor,
    tangent: Tensor,
    s: Sensitivities,
) -> tuple[_Terms, Tensor]:
    """Return the terms of Y, averaged over gradients, and the variance of the last one.

    All results are ``(pair, unit)``.
    """
    if tangent.shape[-1] == 1:
        first = s.first[:, 0] * value1[..., 0] ** 2
        second = s.second[:, 0] * value2[..., 0] ** 2
        between = s.between[:, 0] * value1[..., 0] * value2[..., 0]
        form = tangent[:, 0] * slope1[..., 0] * slope2[..., 0]
        between = between + form * s.gradient_between[:, 0]
        scale = s.gradient_first[:, 0] * s.gradient_second[:, 0] + s.gradient_between[:, 0] ** 2
        return _Terms(first, second, between), form**2 * scale
    first = ((value1 @ s.first) * value1).sum(-1)
    second = ((value2 @ s.second) * value2).sum(-1)
    between = ((value1 @ s.between) * value2).sum(-1)
    between = between + ((slope1 @ (tangent * s.gradient_between)) * slope2).sum(-1)
    form = slope1.unsqueeze(-1) * tangent.unsqueeze(1) * slope2.unsqueeze(-2)
    independent = s.gradient_first.unsqueeze(1) @ form @ s.gradient_second.unsqueeze(1)
    noise = (form * independent).sum((-2, -1))
    mixed = form @ s.gradient_between.mT.unsqueeze(1)
    noise = noise + (mixed * mixed.mT).sum((-2, -1))
    return _Terms(first, second, between), noise


def _values(activation: nn.Module, v: float, z: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return :math:`\phi(v z)` and its derivative by z."""
    with torch.enable_grad():
        units = (v * z).requires_grad_()
        values = activation(units)
        (slopes,) = torch.autograd.grad(values.sum(), units)
    return values.detach(), v * slopes


# --- Modulations ---------------------------------------------------------------------------------


def _pair_moments(modulation: Modulation | None) -> PairMoments:
    if modulation is None:
        return _constant_moments(1.0)
    first, second, weights = _pair_nodes(modulation)
    return _moments_of(first, second, weights)


def _pair_nodes(modulation: Modulation, n: int = 181) -> tuple[Tensor, Tensor, Tensor]:
    law = modulation.law
    if not modulation.differs_between_members:  # both members have the same constant
        values, weights = law.quadrature(n)
        return values, values, weights
    return law.pair_quadrature(modulation.members, n)


def _moments_of(first: Tensor, second: Tensor, weights: Tensor) -> PairMoments:
    moments = []
    for i, j in ((2, 0), (0, 2), (1, 1), (4, 0), (0, 4), (2, 2), (3, 1), (1, 3)):
        moments.append(float(weights @ (first**i * second**j)))
    return PairMoments(*moments)


def _constant_moments(weight: float) -> PairMoments:
    return PairMoments(*[weight] * len(PairMoments._fields))


def _classes(
    activation: nn.Module, pre: Modulation | None
) -> Iterator[tuple[float, float, PairMoments]]:
    """Yield values of v in both members with the moments of the factors that remain.

    A homogeneous activation takes the size of v as a factor, so its classes are pairs of signs. For
    other activations, and masks, classes are nodes of a quadrature.
    """
    if pre is None:
        yield 1.0, 1.0, _constant_moments(1.0)
        return
    is_factor = isinstance(activations.dual(activation), Homogeneous) and not pre.law.balanced
    if not is_factor:
        first, second, weights = _pair_nodes(pre, _SMOOTH_NODES)
        for v1, v2, weight in zip(first.tolist(), second.tolist(), weights.tolist(), strict=True):
            yield v1, v2, _constant_moments(weight)
        return
    first, second, weights = _pair_nodes(pre)
    for sign1 in (1.0, -1.0):
        for sign2 in (1.0, -1.0):
            yield sign1, sign2, _signed_moments(first * sign1, second * sign2, weights)


def _signed_moments(first: Tensor, second: Tensor, weights: Tensor) -> PairMoments:
    """Return moments of sizes where both are positive; zeros belong to both signs by half."""

    def part(values: Tensor) -> Tensor:
        return (values > 0).to(values) + 0.5 * (values == 0).to(values)

    return _moments_of(
        first.clamp(min=0), second.clamp(min=0), weights * part(first) * part(second)
    )


def _excess_of_post(means: _Terms, post: Modulation | None) -> Tensor:
    """Return the variance that independent units have and masks u of a fixed size do not."""
    if post is None or not post.law.balanced:
        return torch.zeros_like(means.first)
    first, second, weights = (part.to(means.first) for part in _pair_nodes(post))
    main = torch.outer(first**2, means.first) + torch.outer(second**2, means.second)
    main = main + torch.outer(first * second, means.between)
    return _variance(main, weights) - means.between**2 * _overlap_variance(post)


def _excess_of_pre(
    class_means: list[tuple[float, Tensor]], mean: Tensor, pre: Modulation | None
) -> Tensor:
    """Return the same for masks v; classes are the four combinations of 0 and the mask's value."""
    if pre is None or not pre.law.balanced:
        return torch.zeros_like(mean)
    weights = mean.new_tensor([weight for weight, _ in class_means])
    main = torch.stack([value for _, value in class_means]) / weights[:, None].clamp(min=1e-300)
    neither, only_second, only_first, both = main
    scale = pre.marginal.scale  # type: ignore[attr-defined]
    interaction = (both - only_first - only_second + neither) / scale**2
    return _variance(main, weights) - interaction**2 * _overlap_variance(pre)


def _overlap_variance(modulation: Modulation) -> float:
    law = modulation.law
    return law.overlap_variance(modulation.members)  # type: ignore[attr-defined]


def _variance(values: Tensor, weights: Tensor) -> Tensor:
    """Return the variance of ``values``, ``(node, pair)``, with these weights of nodes."""
    mean = weights @ values
    return weights @ values**2 - mean**2


# --- Values of units -----------------------------------------------------------------------------


def _unit_nodes(first: Tensor, second: Tensor, between: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return values of normal units in both members and their weights.

    Args:
        first: Covariances of pixels within the first member, ``(pair, p, p)``.
        second: The same within the second member.
        between: Covariances between both.

    Returns:
        Two tensors of values ``(pair, unit, p)``, and weights ``(pair, unit)``.
    """
    if first.shape[-1] > 1:
        return _draw_pixels(first, second, between)
    nodes = sector_nodes(first[:, 0, 0], second[:, 0, 0], between[:, 0, 0])
    return nodes.first.unsqueeze(-1), nodes.second.unsqueeze(-1), nodes.weights


def _draw_pixels(first: Tensor, second: Tensor, between: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return fixed draws of the pixels of a channel; every draw comes with its negative."""
    pairs, pixels, _ = first.shape
    above = torch.cat([first, between], 2)
    below = torch.cat([between.mT, second], 2)
    values, vectors = torch.linalg.eigh(torch.cat([above, below], 1))
    root = vectors * values.clamp(min=0).sqrt().unsqueeze(1)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(DRAWS // 2, 2 * pixels, generator=generator).to(first)
    noise = torch.cat([noise, -noise])
    z = noise @ root.mT
    return z[..., :pixels], z[..., pixels:], first.new_full((pairs, DRAWS), 1 / DRAWS)
