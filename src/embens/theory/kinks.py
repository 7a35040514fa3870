r"""Duals of activations with a kink at 0, by quadrature.

The plane of two normal variables is cut along the lines on which one of them is 0. In each of the
four sectors the activation is smooth, so Gauss–Legendre quadrature over angle and radius converges
fast. It costs more than the tables of smooth activations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from embens.laws import Law
from embens.theory.expectations import Dual, differs_between_members, roots

_SECTOR_NODES = 20
_RADIUS_NODES = 44
_LARGEST_RADIUS = 9.5
_LAW_NODES = 31
_ENTRIES_AT_ONCE = 2**12


class SectorNodes(NamedTuple):
    """Values of two normal variables, and their weights, each ``(…, node)``."""

    first: Tensor
    second: Tensor
    weights: Tensor


def sector_nodes(q1: Tensor, q2: Tensor, c: Tensor) -> SectorNodes:
    """Return quadrature nodes for two normal variables, cut where one of them is 0.

    Args:
        q1: Variances of the first variable.
        q2: Variances of the second variable, of the same shape.
        c: Covariances, of the same shape.

    Example:
        >>> one = torch.ones((), dtype=torch.float64)
        >>> nodes = sector_nodes(one, one, 0.5 * one)
        >>> positive = (nodes.first > 0) & (nodes.second > 0)
        >>> round(float((nodes.weights * positive).sum()), 12)  # 1/4 + arcsin(ρ) / 2π
        0.333333333333
    """
    root1, inverse1 = roots(q1)
    root2, inverse2 = roots(q2)
    cosine = (c * inverse1 * inverse2).clamp(-1, 1)
    squared_sine = (1 - cosine) * (1 + cosine)
    # Replacing 0 before the square root keeps its derivative finite.
    positive = squared_sine > 0
    sine = torch.where(positive, torch.where(positive, squared_sine, 1.0).sqrt(), 0.0)
    cut = torch.atan2(-cosine, sine)
    half = torch.full_like(cut, math.pi / 2)
    edges = torch.stack([-half, cut, half, cut + math.pi, 3 * half], -1)
    x, w = _legendre(_SECTOR_NODES)
    x, w = x.to(q1), w.to(q1)
    width = edges.diff(dim=-1).unsqueeze(-1)
    angles = (edges[..., :-1].unsqueeze(-1) + width * x).flatten(-2)
    angle_weights = (width * w / (2 * math.pi)).flatten(-2)
    radii, radius_weights = _radii()
    radii, radius_weights = radii.to(q1), radius_weights.to(q1)
    direction1 = torch.cos(angles)
    direction2 = cosine[..., None] * direction1 + sine[..., None] * torch.sin(angles)
    first = (root1[..., None] * direction1).unsqueeze(-1) * radii
    second = (root2[..., None] * direction2).unsqueeze(-1) * radii
    weights = angle_weights.unsqueeze(-1) * radius_weights
    return SectorNodes(first.flatten(-2), second.flatten(-2), weights.flatten(-2))


@cache
def _legendre(count: int) -> tuple[Tensor, Tensor]:
    """Return nodes and weights of Gauss–Legendre quadrature on [0, 1].

    Nodes are the eigenvalues of the Jacobi matrix of Legendre polynomials (Golub and Welsch).
    """
    k = torch.arange(1, count, dtype=torch.float64)
    off_diagonal = k / (4 * k**2 - 1).sqrt()
    jacobi = torch.diag(off_diagonal, 1) + torch.diag(off_diagonal, -1)
    x, vectors = torch.linalg.eigh(jacobi)
    return (x + 1) / 2, vectors[0] ** 2


@cache
def _radii() -> tuple[Tensor, Tensor]:
    """Return nodes and weights for the radius of two independent standard normal variables."""
    x, w = _legendre(_RADIUS_NODES)
    radii = _LARGEST_RADIUS * x
    return radii, _LARGEST_RADIUS * w * radii * torch.exp(-(radii**2) / 2)


class Kinked(Dual):
    """Dual of an activation that is smooth on both sides of 0.

    Args:
        function: The activation, elementwise.
        slope: Its derivative, elementwise.
        name: Name of the activation in messages.
    """

    def __init__(
        self, function: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor], name: str
    ):
        self.function = function
        self.slope = slope
        self.name = name

    def __repr__(self) -> str:
        return f"Kinked({self.name})"

    def same(
        self,
        q1: Tensor,
        q2: Tensor,
        c: Tensor,
        law: Law | None,
        *,
        with_h: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        pairs = [(1.0, 1.0, 1.0)]
        if law is not None:
            values, weights = law.quadrature(_LAW_NODES)
            pairs = list(zip(values.tolist(), values.tolist(), weights.tolist(), strict=True))
        f, g, h = self._integrate(q1, q2, c, pairs)
        return f, g, h if with_h else None

    def cross(self, q1: Tensor, q2: Tensor, c: Tensor, law: Law | None) -> tuple[Tensor, Tensor]:
        if not differs_between_members(law):
            f, g, _ = self.same(q1, q2, c, law, with_h=False)
            return f, g
        assert law is not None
        first, second, weights = law.pair_quadrature(2, _LAW_NODES)
        pairs = list(zip(first.tolist(), second.tolist(), weights.tolist(), strict=True))
        f, g, _ = self._integrate(q1, q2, c, pairs)
        return f, g

    def _integrate(
        self, q1: Tensor, q2: Tensor, c: Tensor, pairs: list[tuple[float, float, float]]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return F, G and H, averaged over pairs of modulations with weights."""
        q1, q2, c = torch.broadcast_tensors(q1, q2, c)
        parts = []
        chunks = zip(
            q1.flatten().split(_ENTRIES_AT_ONCE),
            q2.flatten().split(_ENTRIES_AT_ONCE),
            c.flatten().split(_ENTRIES_AT_ONCE),
            strict=True,
        )
        for variances1, variances2, covariances in chunks:
            nodes = sector_nodes(variances1, variances2, covariances)
            parts.append(self._expectations(nodes, pairs))
        f, g, h = (torch.cat(column).reshape(c.shape) for column in zip(*parts, strict=True))
        return f, g, h

    def _expectations(
        self, nodes: SectorNodes, pairs: list[tuple[float, float, float]]
    ) -> tuple[Tensor, Tensor, Tensor]:
        z1, z2, weights = nodes
        f = g = h = torch.zeros_like(z1[..., 0])
        for v1, v2, share in pairs:
            slopes = self.slope(v1 * z1) * self.slope(v2 * z2) * weights
            values = self.function(v1 * z1) * self.function(v2 * z2) * weights
            f = f + share * values.sum(-1)
            g = g + share * v1 * v2 * slopes.sum(-1)
            h = h + share * (z1 * z2 * slopes).sum(-1)
        return f, g, h
