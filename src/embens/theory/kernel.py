r"""Kernels of an ensemble: what one member has with itself, and what two members have in common.

Members that are drawn alike are exchangeable, so a covariance over members and inputs has only two
different blocks, ``same`` and ``cross``, whatever the number of members; that is a
:class:`MemberKernel`. :class:`Kernels` holds those of an infinitely wide ensemble.

With input or output modulations members are not exchangeable. Kernels are then conditional on the
values that were drawn: ``same`` is ``(member, n1, n2)``, ``cross`` is ``(member, member, n1, n2)``
with ``same`` on its diagonal.

Shared parameters learn from :math:`\frac{\gamma}{M} \sum_a` of the members' gradients. Where
those have nothing in common, :math:`\gamma = M` trains each member as if it were alone; where they
are equal, :math:`\gamma = 1` does. In between

.. math::
    \gamma^*(M) \simeq \frac{M}{1 + (M-1) r}, \qquad
    r = \lambda_{\max}(\Theta^{com}_{ab}) / \lambda_{\max}(\Theta^{com}_{aa}) ,

and :func:`natural_gamma` finds it without the approximation, from the spectrum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from embens.checks import Gamma, check_members

if TYPE_CHECKING:
    from jaxtyping import Float

DENSE = 2000
"""Kernels of more inputs than this get an iterative solver for their largest eigenvalue."""


@dataclass(frozen=True)
class MemberKernel:
    r"""Covariance that treats all members alike.

    .. math::
        K_{ab} = \delta_{ab}\, K_\mathrm{same} + (1 - \delta_{ab})\, K_\mathrm{cross}

    Example:
        >>> kernel = MemberKernel(same=2 * torch.eye(3), cross=torch.eye(3))
        >>> mean, deviation = kernel.modes(members=4)
        >>> mean.trace().item(), deviation.trace().item()
        (15.0, 3.0)
    """

    same: Float[Tensor, "*a n1 n2"]
    cross: Float[Tensor, "*ab n1 n2"]

    def modes(self, members: int) -> tuple[Tensor, Tensor]:
        """Return the kernels of the ensemble mean and of deviations from it."""
        self.require_exchangeable("modes")
        return self.same + (members - 1) * self.cross, self.same - self.cross

    def dense(self, members: int) -> Float[Tensor, "m m n1 n2"]:
        """Return all blocks, ``(member, member, n1, n2)``."""
        if self.conditional:
            return self.cross
        blocks = self.cross.expand(members, members, *self.cross.shape).clone()
        blocks[range(members), range(members)] = self.same
        return blocks

    @property
    def mT(self) -> MemberKernel:
        """The kernel with its inputs exchanged."""
        cross = self.cross.mT
        return MemberKernel(self.same.mT, cross.transpose(0, 1) if self.conditional else cross)

    @property
    def conditional(self) -> bool:
        """Whether it belongs to the drawn values of members that are not exchangeable."""
        return self.same.dim() > 2

    def require_exchangeable(self, what: str) -> None:
        """Raise where members are not exchangeable, naming what needs them to be."""
        if self.conditional:
            raise ValueError(
                f"{what} needs exchangeable members; this kernel is conditional on drawn input or "
                "output modulations, which make every member a different one. Use "
                "sites='hidden', or the blocks of `.dense(members)`."
            )


@dataclass(frozen=True)
class Kernels:
    r"""Kernels of an infinitely wide ensemble between two sets of inputs.

    Attributes:
        nngp: covariance :math:`\Sigma` of outputs at initialisation.
        ntk_shared: :math:`\Theta^{com}`, the part of the tangent kernel from shared parameters.
        ntk_individual: :math:`\Theta^{ind}`, from the modulations; nothing between members.
    """

    nngp: MemberKernel
    ntk_shared: MemberKernel
    ntk_individual: MemberKernel

    def ntk(
        self,
        members: int,
        gamma: Gamma = None,
        *,
        shared_rate: float = 1.0,
        individual_rate: float = 1.0,
    ) -> MemberKernel:
        r"""Return the kernel that training follows.

        .. math::
            \Theta_{ab} = \eta_w \frac{\gamma}{M} \Theta^{com}_{ab}
                + \delta_{ab}\, \eta_u \Theta^{ind}_a

        Args:
            members: :math:`M`.
            gamma: the gradient scale, or a function of the number of members. None:
                :func:`~embens.theory.natural_gamma`, which needs kernels of inputs with themselves.
            shared_rate: :math:`\eta_w`, relative to the training's learning rate.
            individual_rate: :math:`\eta_u`.
        """
        rates = {"shared_rate": shared_rate, "individual_rate": individual_rate}
        factor = shared_rate * resolve_gamma(self, members, gamma, **rates) / members
        individual = self.ntk_individual
        return MemberKernel(
            same=factor * self.ntk_shared.same + individual_rate * individual.same,
            cross=factor * self.ntk_shared.cross + individual_rate * individual.cross,
        )

    @property
    def conditional(self) -> bool:
        """Whether members are not exchangeable; see :class:`MemberKernel`."""
        return self.nngp.conditional

    @property
    def mT(self) -> Kernels:
        """The kernels with their inputs exchanged."""
        return Kernels(self.nngp.mT, self.ntk_shared.mT, self.ntk_individual.mT)

    @property
    def blocks(self) -> list[Tensor]:
        """The five blocks that differ: same and cross, same and cross, same."""
        nngp, shared = self.nngp, self.ntk_shared
        return [nngp.same, nngp.cross, shared.same, shared.cross, self.ntk_individual.same]

    @classmethod
    def of_blocks(cls, blocks: Sequence[Tensor]) -> Kernels:
        """Return the kernels that have these five blocks."""
        *shared, own = blocks
        cross = zero_cross(own)
        if own.dim() > 2:
            cross = cross.clone()
            cross[range(len(own)), range(len(own))] = own
        return cls(MemberKernel(*shared[:2]), MemberKernel(*shared[2:]), MemberKernel(own, cross))

    def __getitem__(self, index: tuple) -> Kernels:
        """Return the kernels of a part of the inputs, ``kernels[rows, columns]``."""
        index = (..., *index) if isinstance(index, tuple) else (..., index, slice(None))
        return self._map(lambda block: block[index])

    def to(self, *args, **kwargs) -> Kernels:
        """Return the kernels with another dtype or on another device."""
        return self._map(lambda block: block.to(*args, **kwargs))

    def _map(self, function: Callable[[Tensor], Tensor]) -> Kernels:
        parts = (self.nngp, self.ntk_shared, self.ntk_individual)
        return Kernels(*(MemberKernel(function(p.same), function(p.cross)) for p in parts))


def zero_cross(same: Tensor) -> Tensor:
    """Return a zero for every entry of ``cross`` without any memory."""
    shape = same.shape if same.dim() == 2 else (same.shape[0], *same.shape)
    return torch.zeros((), dtype=same.dtype, device=same.device).expand(shape)


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


def resolve_gamma(kernels: Kernels, members: int, gamma: Gamma = None, **rates: float) -> float:
    """Return a gradient scale as a number: given as one, as a function of M, or None (natural)."""
    if gamma is None:
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
