"""Resolution of a quadrature: nodes of a modulation with a count of Hermite terms each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from embens.theory.law_nodes import LawNodes

MAX_ENTRIES = 2**23
"""Coefficients in memory at once."""


@dataclass(frozen=True)
class Resolution:
    """Nodes of the law and Hermite polynomials per node that reach the accuracy.

    Large values of a modulation make an activation steep and need many terms; most values do not.

    Attributes:
        groups: Nodes of the law with the number of terms that they need.
    """

    groups: tuple[tuple[LawNodes, int], ...]

    @property
    def terms(self) -> int:
        """Largest number of terms."""
        return max(terms for _, terms in self.groups)

    @property
    def sizes(self) -> Tensor:
        """Sizes of all nodes, ``(node,)``."""
        return torch.cat([nodes.sizes for nodes, _ in self.groups])

    @property
    def deviation(self) -> float:
        """Root of the second moment of the law."""
        moments = [float(nodes.both @ nodes.sizes**2) for nodes, _ in self.groups]
        return math.sqrt(math.fsum(moments))

    @property
    def is_constant(self) -> bool:
        """True if the law has a single value."""
        nodes, _ = self.groups[0]
        return len(self.sizes) == 1 and not bool((nodes.plus * nodes.minus).any())

    def parts(self, roots: int, device: torch.device) -> Iterator[tuple[LawNodes, int]]:
        """Yield nodes and terms, a few nodes at a time.

        Args:
            roots: Number of roots of variances; more roots need more memory per node.
            device: Device of the nodes.
        """
        for nodes, terms in self.groups:
            count = MAX_ENTRIES // (terms * max(1, roots))
            for part in nodes.to(device).split(max(1, count)):
                yield part, terms


class Evaluation(NamedTuple):
    """An activation and its derivative at points x >= 0 and their mirror images.

    Attributes:
        even_values: φ(x) + φ(-x).
        slopes: φ'(x).
        mirrored_slopes: φ'(-x).
    """

    even_values: Tensor
    slopes: Tensor
    mirrored_slopes: Tensor

    def slope_gram(self, weights: Tensor) -> Tensor:
        """Integrate products of slopes at all pairs of roots, with weights of the points."""
        positive = (self.slopes * weights) @ self.slopes.mT
        negative = (self.mirrored_slopes * weights) @ self.mirrored_slopes.mT
        return positive + negative
