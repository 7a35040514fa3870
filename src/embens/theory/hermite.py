"""Hermite polynomials: their grid, and series of them at correlated normal variables."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

_REACH = 12.0  # exp(-REACH² / 4) is below the rounding error
_MAX_ENTRIES = 2**23  # products of coefficients in memory at once


def sum_over_nodes(weights: Tensor, first: Tensor, second: Tensor) -> Tensor:
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


def sum_series(
    weights: Tensor,
    first: Tensor,
    second: Tensor,
    rho: Tensor,
) -> tuple[Tensor, Tensor]:
    r"""Return :math:`\sum_n s_n \rho^{n+1} / (n+1)` and :math:`\sum_n s_n \rho^n`.

    Here :math:`s_n` is the product of the n-th coefficients, ``(node, …)``, summed over the nodes.
    Horner's scheme starts at the last term.
    """
    integral = torch.zeros_like(rho)
    total = torch.zeros_like(rho)
    chunk = max(1, _MAX_ENTRIES // max(1, rho.numel()))
    for stop in range(len(first), 0, -chunk):
        start = max(0, stop - chunk)
        products = sum_over_nodes(weights, first[start:stop], second[start:stop])
        for n in range(stop - 1, start - 1, -1):
            product = products[n - start]
            total = torch.addcmul(product, total, rho)
            integral = torch.addcmul(product / (n + 1), integral, rho)
    return rho * integral, total


def times_g(slopes: Tensor) -> Tensor:
    r"""Return the coefficients of :math:`g \phi'(x g)`: d_n from c_n, one term fewer."""
    count = len(slopes) - 1
    n = torch.arange(count, dtype=slopes.dtype, device=slopes.device)
    n = n.reshape(-1, *(1,) * (slopes.dim() - 1))
    above = (n + 1).sqrt() * slopes[1:]
    zero = torch.zeros_like(slopes[:1])
    below = torch.cat([zero, n[1:].sqrt() * slopes[: count - 1]])
    return above + below


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def grid(terms: int) -> tuple[Tensor, Tensor]:
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
def weighted_hermite(terms: int) -> Tensor:
    """Return orthonormal Hermite polynomials times the weights of the grid, ``(n, point)``."""
    points, weights = grid(terms)
    values = torch.empty(terms, len(points), dtype=torch.float64, device="cpu")
    # Recurrence for h_n(g) exp(-g²/4), which does not overflow.
    values[0] = torch.exp(-(points**2) / 4)
    values[1] = points * values[0]
    for n in range(1, terms - 1):
        next_values = points * values[n] - math.sqrt(n) * values[n - 1]
        values[n + 1] = next_values / math.sqrt(n + 1)
    return values * (weights * torch.exp(points**2 / 4))
