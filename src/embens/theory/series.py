"""Series in the correlation at the nodes of a table, and their tabulation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embens.theory.interpolation import (
    CorrelationAxis,
    Sums,
    chebyshev_transform,
    expand,
    remainder,
)


@dataclass(frozen=True)
class Series:
    """Products of coefficients at all pairs of some roots.

    Attributes:
        means: Products of a, ``(root, root)``.
        slopes: Products of c_n, ``(n, root, root)``.
        raised: Products of d_n, ``(n, root, root)``; None between members.
    """

    means: Tensor
    slopes: Tensor
    raised: Tensor | None = None

    def sums(self, rho: Tensor) -> list[Tensor]:
        """Return the sums for F, G and H at some correlations, each ``(correlation, root, root)``.

        The sum for F lacks the product of means. H is left out between members.
        """
        n = torch.arange(len(self.slopes), dtype=rho.dtype, device=rho.device)
        powers = rho[:, None] ** n
        integrals = powers * rho[:, None] / (n + 1)
        f = torch.tensordot(integrals, self.slopes, 1)
        g = torch.tensordot(powers, self.slopes, 1)
        if self.raised is None:
            return [f, g]
        h = torch.tensordot(powers[:, : len(self.raised)], self.raised, 1)
        return [f, g, h]

    def floor(self) -> float:
        """Return a thousandth of the largest sum; smaller functions are judged against it."""
        one = torch.ones(1, dtype=torch.float64)
        sizes = [float(part.abs().max()) for part in (self.means, *self.sums(one))]
        return max(sizes) / 1000

    def corner(self) -> Series:
        """Return the products at the first root alone."""
        raised = None if self.raised is None else self.raised[:, :1, :1]
        return Series(self.means[:1, :1], self.slopes[:, :1, :1], raised)


def root_error(series: Series, floor: float) -> float:
    """Return the error of interpolation in the roots, at correlation 1."""
    one = torch.ones(1, dtype=torch.float64)
    sums = [part[0] for part in series.sums(one)]
    return interpolation_error(torch.stack([series.means, *sums]), floor)


def interpolation_error(values: Tensor, floor: float) -> float:
    """Return the relative error of interpolation of some functions, ``(function, root, root)``."""
    transform = chebyshev_transform(values.shape[-1])
    return max(remainder(transform @ part, floor) for part in values)


def correlation_error(series: Series, axis: CorrelationAxis, floor: float) -> float:
    """Return the error of interpolation in the correlation."""
    transform = chebyshev_transform(axis.count)
    values = [part.flatten(1) for part in series.sums(axis.nodes())]
    return max(remainder(transform @ part, floor) for part in values)


def tabulate(series: Series, rho: Tensor) -> Sums:
    """Return Chebyshev coefficients of the sums."""
    coefficients = [expand(part) for part in series.sums(rho)]
    return Sums(expand(series.means[None]), *coefficients)
