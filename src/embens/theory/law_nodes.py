"""Quadrature nodes for the distribution of a modulation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from embens.laws import Law, Normal, Shifted

_LAW_NODES = 121


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
        sizes = self.sizes.tolist()
        plus = self.plus.tolist()
        minus = self.minus.tolist()
        return list(zip(sizes, plus, minus, strict=True))

    def select(self, mask: Tensor) -> LawNodes:
        """Return the nodes at which a boolean mask, ``(node,)``, is true."""
        return LawNodes(self.sizes[mask], self.plus[mask], self.minus[mask])

    def split(self, size: int) -> list[LawNodes]:
        """Return the nodes in groups of at most ``size``."""
        sizes = self.sizes.split(size)
        plus = self.plus.split(size)
        minus = self.minus.split(size)
        return [LawNodes(*part) for part in zip(sizes, plus, minus, strict=True)]

    def to(self, device: torch.device) -> LawNodes:
        """Return the nodes on another device."""
        return LawNodes(
            self.sizes.to(device),
            self.plus.to(device),
            self.minus.to(device),
        )


def law_nodes(law: Law | None, width: float, fineness: int = 1) -> LawNodes:
    """Return quadrature nodes for a modulation.

    Args:
        law: Distribution of the modulation; None means the constant 1.
        width: Scale of v on which the integrand varies; used for normal laws only.
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
    total = plus + minus
    symmetric = (plus - minus).abs() <= 1e-14 * total
    plus = torch.where(symmetric, total / 2, plus)
    minus = torch.where(symmetric, total / 2, minus)
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
    """Return True if a law is normal with a positive variance."""
    return isinstance(law, Normal | Shifted) and law.std > 0
