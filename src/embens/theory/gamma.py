r"""Gradient scale: how much the shared parameters are to hear of every member.

Shared parameters get :math:`\frac{\gamma}{M} \sum_a` of the members' gradients. Where gradients of
different members have nothing in common, :math:`\gamma = M` trains each as if it were alone; where
they are equal, :math:`\gamma = 1` does. In between

.. math::
    \gamma^*(M) \simeq \frac{M}{1 + (M-1) r}, \qquad
    r = \lambda_{\max}(\Theta^{com}_{ab}) / \lambda_{\max}(\Theta^{com}_{aa}) ,

and :func:`natural_gamma` finds it without the approximation, from the spectrum.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from embens.checks import Gamma, check_members
from embens.theory.kernel import Kernels

if TYPE_CHECKING:
    from jaxtyping import Float

DENSE = 2000
"""Kernels of more inputs than this get an iterative solver for their largest eigenvalue."""


def natural_gamma(
    kernels: Kernels,
    members: int = 8,
    *,
    shared_rate: float = 1.0,
    individual_rate: float = 1.0,
) -> float:
    r"""Return the gradient scale at which M members train as fast as one.

    The root :math:`\gamma^*` in :math:`[0, M]` of

    .. math::
        \lambda_{\max}\big(\eta_w \tfrac{\gamma}{M} [\Theta^{com}_{aa} + (M-1) \Theta^{com}_{ab}]
            + \eta_u \Theta^{ind}\big)
        = \lambda_{\max}\big(\eta_w \Theta^{com}_{aa} + \eta_u \Theta^{ind}\big) ,

    so that the largest stable rate is that of a network alone: M where members are independent, 1
    where they are equal. The left side is convex in :math:`\gamma` and grows, so that Newton's
    method from M comes down to the root.

    Args:
        kernels: of some inputs with themselves.
        members: :math:`M`.
        shared_rate: :math:`\eta_w`.
        individual_rate: :math:`\eta_u`.

    Example:
        >>> from embens.theory.kernel import MemberKernel
        >>> one, none = torch.eye(3).double(), torch.zeros(3, 3).double()
        >>> shared = MemberKernel(same=one, cross=0.25 * one)
        >>> k = Kernels(nngp=shared, ntk_shared=shared, ntk_individual=MemberKernel(none, none))
        >>> natural_gamma(k, members=5)  # 5 / (1 + 4 * 0.25)
        2.5
    """
    check_members(members)
    check_rates(shared_rate=shared_rate, individual_rate=individual_rate)
    shared = kernels.ntk_shared
    shared.require_exchangeable("natural_gamma")
    same, cross = shared.same.double(), shared.cross.double()
    if same.shape[0] != same.shape[1] or not torch.allclose(same, same.mT, rtol=1e-6):
        raise ValueError(
            "natural_gamma needs kernels of inputs with themselves, which are symmetric; got "
            f"other ones, of shape {tuple(same.shape)}. Pass gamma as a number, or the natural "
            "one of the train data's kernels."
        )
    if not cross.any() or not shared_rate:
        return float(members)
    if members == 1 or torch.equal(cross, same):
        return 1.0
    own = individual_rate * kernels.ntk_individual.same.double()
    slope = shared_rate / members * (same + (members - 1) * cross)
    target, _ = largest_eigenpair(shared_rate * same + own)
    gamma = float(members)
    for _ in range(100):
        value, vector = largest_eigenpair(gamma * slope + own)
        rise = (vector @ slope @ vector).item()
        if value <= target or rise <= 0:
            break
        step = (value - target) / rise
        gamma -= step
        if step < 1e-14 * gamma:
            break
    return min(max(gamma, 0.0), float(members))


def resolve_gamma(
    kernels: Kernels,
    members: int,
    gamma: Gamma = None,
    *,
    shared_rate: float = 1.0,
    individual_rate: float = 1.0,
) -> float:
    """Return a gradient scale as a number: given as one, as a function of M, or None (natural)."""
    if gamma is None:
        rates = {"shared_rate": shared_rate, "individual_rate": individual_rate}
        return natural_gamma(kernels, members, **rates)
    value = gamma(members) if callable(gamma) else gamma
    value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    expected = (
        f"gamma must be a positive number, a function of M that gives one, or None; got {value!r}."
    )
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(expected)
    if not 0 < float(value) < math.inf:
        raise ValueError(f"{expected} 1 is the sum of gradients over M, M their sum.")
    return float(value)


def check_rates(**rates: float) -> None:
    """Raise where a rate is no finite number >= 0."""
    for name, rate in rates.items():
        if isinstance(rate, bool) or not isinstance(rate, Real):
            raise TypeError(f"{name} must be a number >= 0; got {rate!r}.")
        if not 0 <= float(rate) < math.inf:
            raise ValueError(f"{name} must be a number >= 0; got {rate!r}.")


def largest_eigenpair(matrix: Float[Tensor, "n n"]) -> tuple[float, Float[Tensor, " n"]]:
    """Return the largest eigenvalue of a symmetric matrix, and its eigenvector."""
    n = len(matrix)
    if n > DENSE:
        generator = torch.Generator().manual_seed(0)  # any start that is orthogonal to nothing
        start = torch.randn(n, 1, generator=generator, dtype=matrix.dtype).to(matrix.device)
        values, vectors = torch.lobpcg(matrix, X=start, niter=500, tol=1e-12)
        vector = vectors[:, 0]
        error = (matrix @ vector - values[0] * vector).norm()
        if error <= 1e-7 * values[0].abs():  # the eigenvalue's error is the square of that
            return values[0].item(), vector
    values, vectors = torch.linalg.eigh(matrix)
    return values[-1].item(), vectors[:, -1]
