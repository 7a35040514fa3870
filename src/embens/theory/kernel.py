r"""Kernels of an ensemble: what one member has with itself, and what two members have in common.

Members that are drawn alike are exchangeable, so a covariance over members and inputs has only two
different blocks, ``same`` and ``cross``, whatever the number of members. With input or output
modulations they are not: kernels are then conditional on the values that were drawn, ``same`` is
``(member, n1, n2)``, ``cross`` is ``(member, member, n1, n2)`` with ``same`` on its diagonal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from embens.checks import Gamma, check_members, check_number, short_repr

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
    __repr__ = short_repr

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
                f"{what} does not apply: it needs exchangeable members, and this kernel is "
                "conditional on drawn input or output modulations, which make every member a "
                "different one. Use sites='hidden', or the blocks of `.dense(members)`."
            )


@dataclass(frozen=True)
class Kernels:
    r"""Kernels of an infinitely wide ensemble: :math:`\Sigma, \Theta^{com}, \Theta^{ind}`."""

    nngp: MemberKernel  # covariance of outputs at initialisation
    ntk_shared: MemberKernel  # the part of the tangent kernel from shared parameters
    ntk_individual: MemberKernel  # from the modulations; nothing between members
    __repr__ = short_repr

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

        ``gamma`` may be a function of :math:`M`; None: :func:`~embens.theory.natural_gamma`, which
        needs kernels of inputs with themselves. The rates :math:`\eta_w, \eta_u` are relative to
        the training's learning rate.
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
        return self.nngp.conditional

    @property
    def mT(self) -> Kernels:
        return Kernels(self.nngp.mT, self.ntk_shared.mT, self.ntk_individual.mT)

    @property
    def blocks(self) -> list[Tensor]:
        """The five blocks that differ: same and cross, same and cross, same."""
        nngp, shared = self.nngp, self.ntk_shared
        return [nngp.same, nngp.cross, shared.same, shared.cross, self.ntk_individual.same]

    @classmethod
    def of_blocks(cls, blocks: Sequence[Tensor]) -> Kernels:
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
        return self._map(lambda block: block.to(*args, **kwargs))

    def _map(self, function: Callable[[Tensor], Tensor]) -> Kernels:
        parts = (self.nngp, self.ntk_shared, self.ntk_individual)
        return Kernels(*(MemberKernel(function(p.same), function(p.cross)) for p in parts))


def zero_cross(same: Tensor) -> Tensor:
    """Return a zero for every entry of ``cross`` without any memory."""
    shape = same.shape if same.dim() == 2 else (same.shape[0], *same.shape)
    return torch.zeros((), dtype=same.dtype, device=same.device).expand(shape)


def natural_gamma(
    kernels: Kernels, members: int = 8, *, shared_rate: float = 1.0, individual_rate: float = 1.0
) -> float:
    r"""Return the gradient scale at which M members train as fast as one.

    The smaller root :math:`\gamma^*` in :math:`[0, M]` for the mean of the members,

    .. math::
        \lambda_{\max}\big(\eta_w \tfrac{\gamma}{M} [\Theta^{com}_{aa} + (M-1) \Theta^{com}_{ab}]
            + \eta_u \Theta^{ind}\big)
        = \lambda_{\max}\big(\eta_w \Theta^{com}_{aa} + \eta_u \Theta^{ind}\big) ,

    and for deviations from it, with :math:`\Theta^{com}_{aa} - \Theta^{com}_{ab}` in brackets,
    which is the smaller one where members repel each other. So the largest stable rate is that of a
    network alone: M where members are independent, 1 where they are equal, and in between about
    :math:`M / (1 + (M-1) r)` with :math:`r = \lambda_{\max}(\Theta^{com}_{ab}) /
    \lambda_{\max}(\Theta^{com}_{aa})`. The left side is convex in :math:`\gamma` and grows, so that
    Newton's method from M comes down to the root.

    ``kernels`` are those of some inputs with themselves; rates are as in :meth:`Kernels.ntk`.

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
    target, _ = largest_eigenpair(shared_rate * same + own)
    gamma = float(members)
    for mode in shared.modes(members):
        slope = shared_rate / members * mode.double()
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
    expected = "a positive number, a function of M that gives one, or None"
    return check_number("gamma", value, expected, lambda x: x > 0)


def check_rates(**rates: float) -> None:
    """Raise where a rate is no finite number >= 0."""
    for name, rate in rates.items():
        check_number(name, rate, "a number >= 0", lambda x: x >= 0)


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
