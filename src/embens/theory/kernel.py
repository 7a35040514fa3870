r"""Kernels of an ensemble: what one member has with itself, and what two members have in common.

Members that are drawn alike are exchangeable, so a covariance over members and inputs has only two
different blocks, ``same`` and ``cross``, whatever the number of members; that is a
:class:`MemberKernel`. :class:`Kernels` holds those of an infinitely wide ensemble.

With input or output modulations members are not exchangeable. Kernels are then conditional on the
values that were drawn: ``same`` is ``(member, n1, n2)``, ``cross`` is ``(member, member, n1, n2)``
with ``same`` on its diagonal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float


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
        gamma: float | Callable[[int], float] | None = None,
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
        from embens.theory.gamma import resolve_gamma

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
