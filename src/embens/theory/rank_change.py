r"""Low-rank members: the limit of layers with weights that differ by matrices of fixed rank.

*Multiplicative members* have the weights :math:`W \circ (1 + B_a A_a)` with :math:`r` columns of
:math:`B_a`, entries :math:`b` of variance :math:`s^2/r` and of :math:`A_a` of variance 1. Given row
:math:`b_i` of :math:`B_a`, unit :math:`i` is Gaussian with the covariance :math:`(1 + t) C` for
:math:`t = |b_i|^2`, where :math:`C` is that of the plain layer, because the columns of :math:`A_a`
average out. So units are a mixture over :math:`t \sim \frac{s^2}{r} \chi^2_r`. Units of two members
have the covariance :math:`C_{ab}`, without a factor. With :math:`\tau = 1 + t`,

.. math::
    F_{aa} = E_t[F(\tau q, \tau q', \tau c)], \quad G_{aa} = E_t[\tau\, G(\tau q, \tau q', \tau c)],
    \quad F_{ab} = E_{t, t'}[F(\tau q, \tau' q', c)], \quad G_{ab} = E_{t, t'}[G(\dots)] ,

where :math:`F, G` are the expectations without a modulation. Biases are a second addend, without a
factor. :mod:`embens.theory.mixture` computes the expectations and the tangents of :math:`B_a` and
:math:`A_a`.

*Additive members* :math:`W + B_a A_a` start with :math:`B_a = 0`, so they have the kernels of the
plain network. The tangent kernel of :math:`B_a` is :math:`\sum_{k \le r} \eta_k(x) \eta_k(x')` with
:math:`\eta = A_a x`. At a fixed rank it stays random, and its mean is used.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from embens.networks import Parametrized
from embens.spec import LowRankSite
from embens.theory.affine_step import AffineStep
from embens.theory.moments import MEASURE, State, describe
from embens.theory.pending import with_addends

_FEWEST_NODES, _MOST_NODES = 8, 64


def row_nodes(rank: int, scale: float) -> list[tuple[float, float]]:
    r"""Return quadrature nodes and weights of :math:`t = |b|^2` for a row :math:`b` of B.

    Args:
        rank: Rank of the members' matrices, :math:`r`.
        scale: Standard deviation of the entries of B times the root of the rank, :math:`s`.

    Example:
        >>> nodes = row_nodes(rank=2, scale=0.5)
        >>> round(sum(weight * t for t, weight in nodes), 9)  # scale²
        0.25
    """
    # √(1 + t) is singular at t = -1, so n nodes have an error of exp(-4 √(n r / (2 s²))). That is
    # 3e-10 for n = 60 s²/r.
    count = math.ceil(60 * scale**2 / rank)
    count = min(max(count, _FEWEST_NODES), _MOST_NODES)
    sizes, weights = chi_square_nodes(rank, count)
    t = scale**2 / rank * sizes
    has_weight = weights * (1 + t) > 1e-13  # larger units would only slow the expectations down
    return list(zip(t[has_weight].tolist(), weights[has_weight].tolist(), strict=True))


def chi_square_nodes(degrees: int, count: int) -> tuple[Tensor, Tensor]:
    """Return Gauss quadrature nodes and weights of the chi-square distribution.

    Args:
        degrees: Degrees of freedom.
        count: Number of nodes.

    Returns:
        Nodes and weights, each ``(node,)``.

    Example:
        >>> nodes, weights = chi_square_nodes(4, 8)
        >>> round((weights * nodes).sum().item(), 9), round((weights * nodes**2).sum().item(), 9)
        (4.0, 24.0)
    """
    # Eigenvalues of the Jacobi matrix of generalised Laguerre polynomials (Golub and Welsch).
    alpha = degrees / 2 - 1
    steps = torch.arange(count, dtype=torch.float64)
    off_diagonal = (steps[1:] * (steps[1:] + alpha)).sqrt()
    jacobi = torch.diag(2 * steps + 1 + alpha)
    jacobi = jacobi + torch.diag(off_diagonal, 1) + torch.diag(off_diagonal, -1)
    nodes, vectors = torch.linalg.eigh(jacobi)
    return 2 * nodes, vectors[0] ** 2


def change_rank(
    site: LowRankSite, step: AffineStep, before: State, after: State, *, is_first: bool
) -> State:
    """Add the members' matrices to the kernels after a layer.

    Args:
        site: Rank, kind and scale of its matrices.
        step: The plain layer.
        before: Kernels before it.
        after: Kernels after it.
        is_first: True for the first layer.

    Raises:
        TypeError: If the layer has no limit with these members.
    """
    name = describe(step.layer, before.path)
    if site.kind == "additive":
        return _add_matrices(site, step, before, after, name, is_first=is_first)
    if is_first:
        raise TypeError(
            f"{name} has multiplicative low-rank members and is the first layer. Its inputs are "
            "finitely many, so they do not average over the members' matrices. Use sites= with "
            f"the names of hidden layers. {MEASURE}"
        )
    if not step.law.bias_variance and not step.law.bias_gain:
        return after.replace(low_rank=site)
    # The matrices change the weights alone, so that units are a sum with the bias.
    weights, bias = step.split(before)
    return with_addends(after, (replace(weights, low_rank=site), bias))


def _add_matrices(
    site: LowRankSite,
    step: AffineStep,
    before: State,
    after: State,
    name: str,
    *,
    is_first: bool,
) -> State:
    """Add the mean tangent kernel of B to the kernels after a plain layer."""
    if site.scale:
        raise TypeError(
            f"{name} has additive low-rank members with scale={site.scale:g}. At a fixed rank "
            f"their outputs stay random in the limit. Use scale=0. {MEASURE}"
        )
    gain = 1.0
    layer = step.layer
    if isinstance(layer, Parametrized) and layer.parametrization == "ntk":
        # The factor of the forward pass is that of a weight, and weights are many.
        gain = layer.weight_std**2 / layer.fan_in if is_first else 0.0
    if not step.tracked or not gain:
        return after
    tangents = step.apply(before.covariance) * (site.rank * gain)
    if after.individual is not None:
        tangents = tangents + after.individual
    return after.replace(individual=tangents)
