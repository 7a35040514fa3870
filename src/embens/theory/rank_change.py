r"""Low-rank members: the limit of layers with weights that differ by matrices of fixed rank.

*Multiplicative members* have the weights :math:`W \circ (1 + B_a A_a)` with :math:`r` columns of
:math:`B_a`, entries :math:`b` of variance :math:`s^2/r` and of :math:`A_a` of variance 1. Given row
:math:`b_i` of :math:`B_a`, unit :math:`i` is Gaussian with the covariance :math:`(1 + t) C` for
:math:`t = |b_i|^2`, where :math:`C` is that of the plain layer, because the columns of :math:`A_a`
average out. So units are a mixture over :math:`t \sim \frac{s^2}{r} \chi^2_r`. Units of two members
have the covariance :math:`C_{ab}`, without a factor. With :math:`\tau = 1 + t`,

.. math::
    F_{aa} = E_t[F(\tau q, \tau q', \tau c)], \quad G_{aa} = E_t[\tau\, G(\tau q, \tau q', \tau c)],
    \quad F_{ab} = E_{t, t'}[F(\tau q, \tau' q', c)], \quad G_{ab} = E_{t, t'}[G(\dots)] .

The tangents of :math:`B_a` and :math:`A_a` add to :math:`\Theta^{ind}`

.. math::
    H = E_t\big[\tfrac{t}{\tau^2} H(\tau q, \dots) + (r - \tfrac{t}{\tau} + t)\, c\, G(\tau q,
    \dots)\big] ,

where :math:`F, G, H` are the expectations without a modulation.

*Additive members* :math:`W + B_a A_a` start with :math:`B_a = 0`, so they have the kernels of the
plain network. The tangent kernel of :math:`B_a` is :math:`\sum_{k \le r} \eta_k(x) \eta_k(x')` with
:math:`\eta = A_a x`. At a fixed rank it stays random, and its mean is used.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from embens.laws import Law
from embens.networks import Parametrized
from embens.spec import LowRankSite
from embens.theory.expectations import Dual
from embens.theory.moments import MEASURE, State, describe

_FEWEST_NODES, _MOST_NODES = 8, 64


class RankDual(Dual):
    """Dual of an activation of multiplicative low-rank units.

    Args:
        plain: Dual of the activation.
        rank: Rank of the members' matrices.
        scale: Standard deviation of their entries.
    """

    def __init__(self, plain: Dual, rank: int, scale: float):
        self.plain = plain
        self.rank = rank
        self.scale = scale
        # √(1 + t) is singular at t = -1, so n nodes have an error of exp(-4 √(n r / 2 s²)).
        count = math.ceil(60 * scale**2 / rank)
        count = min(max(count, _FEWEST_NODES), _MOST_NODES)
        sizes, weights = chi_square_nodes(rank, count)
        t = scale**2 / rank * sizes
        has_weight = weights * (1 + t) > 1e-13  # larger units would only slow the plain dual down
        self._nodes = list(zip(t[has_weight].tolist(), weights[has_weight].tolist(), strict=True))

    def prepare(self, q_max: float, law: Law | None) -> Dual:
        """Return this dual with the plain one prepared for the largest unit."""
        largest_size, _ = self._nodes[-1]
        return RankDual(self.plain.prepare((1 + largest_size) * q_max, None), self.rank, self.scale)

    def same(
        self, q1: Tensor, q2: Tensor, c: Tensor, law: Law | None, *, with_h: bool = True
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return F, G and the tangents of the members' matrices within a member."""
        total_f = total_g = total_h = torch.zeros((), dtype=c.dtype, device=c.device)
        for t, weight in self._nodes:
            tau = 1 + t
            f, g, h = self.plain.same(tau * q1, tau * q2, tau * c, None, with_h=with_h)
            total_f = total_f + weight * f
            total_g = total_g + weight * tau * g
            if h is not None:
                tangents = t / tau**2 * h + (self.rank - t / tau + t) * c * g
                total_h = total_h + weight * tangents
        return total_f, total_g, total_h if with_h else None

    def cross(self, q1: Tensor, q2: Tensor, c: Tensor, law: Law | None) -> tuple[Tensor, Tensor]:
        """Return F and G between two members."""
        total_f = total_g = torch.zeros((), dtype=c.dtype, device=c.device)
        for t1, weight1 in self._nodes:
            for t2, weight2 in self._nodes:
                f, g = self.plain.cross((1 + t1) * q1, (1 + t2) * q2, c, None)
                total_f = total_f + weight1 * weight2 * f
                total_g = total_g + weight1 * weight2 * g
        return total_f, total_g


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
    layer: nn.Module, site: LowRankSite, before: State, after: State, signal: Tensor
) -> State:
    """Add the members' matrices to the kernels after a layer.

    Args:
        layer: The layer.
        site: Rank, kind and scale of its matrices.
        before: Kernels before the layer.
        after: Kernels after the plain layer.
        signal: Covariance before the layer, with its map of pixels applied.

    Raises:
        TypeError: If the layer has no limit with these members.
    """
    name = describe(layer, before.path)
    is_first = before.inputs is not None
    if site.kind == "additive":
        return _add_matrices(layer, site, after, signal, name, is_first=is_first)
    if is_first:
        raise TypeError(
            f"{name} has multiplicative low-rank members and is the first layer. Its inputs are "
            "finitely many, so they do not average over the members' matrices. Use sites= with "
            f"the names of hidden layers. {MEASURE}"
        )
    if isinstance(layer, Parametrized) and layer.bias is not None and layer.bias_std:
        raise TypeError(
            f"{name} has biases and multiplicative low-rank members. Its units are a mixture of "
            f"Gaussians that has no rule with biases. Use bias_std=0. {MEASURE}"
        )
    return after.replace(low_rank=site)


def _add_matrices(
    layer: nn.Module, site: LowRankSite, after: State, signal: Tensor, name: str, *, is_first: bool
) -> State:
    """Add the mean tangent kernel of B to the kernels after a plain layer."""
    if site.scale:
        raise TypeError(
            f"{name} has additive low-rank members with scale={site.scale:g}. At a fixed rank "
            f"their outputs stay random in the limit. Use scale=0. {MEASURE}"
        )
    gain = 1.0
    if isinstance(layer, Parametrized) and layer.parametrization == "ntk":
        # The factor of the forward pass is that of a weight, and weights are many.
        gain = layer.weight_std**2 / layer.fan_in if is_first else 0.0
    if not after.facts.tracked or not gain:
        return after
    tangents = signal * (site.rank * gain)
    if after.individual is not None:
        tangents = tangents + after.individual
    return after.replace(individual=tangents)
