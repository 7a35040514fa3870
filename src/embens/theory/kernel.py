r"""Kernels of an ensemble: two blocks for any number of members.

Members with the same distribution are exchangeable. So a covariance over members and inputs has
only two different blocks for any number of members, ``same`` (a member with itself) and ``cross``
(two members). With input or output modulations members are not exchangeable. Kernels are then
conditional on the drawn values: ``same`` is ``(member, n1, n2)`` and ``cross`` is ``(member,
member, n1, n2)`` with ``same`` on its diagonal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from embens.checks import check_members, check_number, short_repr
from embens.optim import Gamma

if TYPE_CHECKING:
    from jaxtyping import Float

MAX_DENSE_INPUTS = 2000
"""Kernels of more inputs than this use an iterative solver for their largest eigenvalue."""


@dataclass(frozen=True)
class MemberKernel:
    r"""Covariance of exchangeable members.

    .. math::
        K_{ab} = \delta_{ab}\, K_\mathrm{same} + (1 - \delta_{ab})\, K_\mathrm{cross}

    Attributes:
        same: Block of a member with itself, ``(n1, n2)``; conditional: ``(member, n1, n2)``.
        cross: Block of two members, ``(n1, n2)``; conditional: ``(member, member, n1, n2)``.

    Example:
        >>> kernel = MemberKernel(same=2 * torch.eye(3), cross=torch.eye(3))
        >>> mean, deviation = kernel.modes(members=4)
        >>> mean.trace().item(), deviation.trace().item()
        (15.0, 3.0)
        >>> kernel.dense(members=4).shape
        torch.Size([4, 4, 3, 3])
        >>> kernel.require_exchangeable("my_function")  # raises if the kernel is conditional
    """

    same: Float[Tensor, "*a n1 n2"]
    cross: Float[Tensor, "*ab n1 n2"]
    __repr__ = short_repr

    def modes(self, members: int) -> tuple[Tensor, Tensor]:
        """Return the kernels of the ensemble mean and of deviations from it.

        Args:
            members: Number of members M.

        Returns:
            ``same + (M - 1) cross`` and ``same - cross``, each ``(n1, n2)``.

        Raises:
            ValueError: If members are not exchangeable.
        """
        self.require_exchangeable("modes")
        mean = self.same + (members - 1) * self.cross
        deviation = self.same - self.cross
        return mean, deviation

    def dense(self, members: int) -> Float[Tensor, "m m n1 n2"]:
        """Return the kernel between all members.

        Args:
            members: Number of members.

        Returns:
            All blocks, ``(member, member, n1, n2)``.
        """
        if self.conditional:
            return self.cross
        blocks = self.cross.expand(members, members, *self.cross.shape).clone()
        blocks[range(members), range(members)] = self.same
        return blocks

    @property
    def mT(self) -> MemberKernel:
        """The kernel with both sets of inputs exchanged."""
        cross = self.cross.mT
        if self.conditional:
            cross = cross.transpose(0, 1)
        return MemberKernel(self.same.mT, cross)

    @property
    def conditional(self) -> bool:
        """True if the kernel is conditional on the drawn values of members."""
        return self.same.dim() > 2

    def require_exchangeable(self, caller: str) -> None:
        """Raise where members are not exchangeable.

        Args:
            caller: Name of the function that needs exchangeable members.

        Raises:
            ValueError: If the kernel is conditional.
        """
        if self.conditional:
            raise ValueError(
                f"{caller} does not apply: it needs exchangeable members, and this kernel is "
                "conditional on drawn input or output modulations. Use sites='hidden', or the "
                "blocks of `.dense(members)`."
            )


@dataclass(frozen=True)
class Kernels:
    r"""Kernels of an infinitely wide ensemble.

    Attributes:
        nngp: :math:`\Sigma`, the covariance of outputs at initialisation.
        ntk_shared: :math:`\Theta^{com}`, the tangent kernel of shared parameters.
        ntk_individual: :math:`\Theta^{ind}`, the tangent kernel of individual parameters; it is
            zero between members. Trainable input modulations and additive low-rank members have
            finitely many parameters, whose tangents stay random; this is their mean.

    Example:
        >>> one = torch.eye(2)
        >>> shared = MemberKernel(same=one, cross=0.5 * one)
        >>> k = Kernels(nngp=shared, ntk_shared=shared, ntk_individual=MemberKernel(one, 0 * one))
        >>> k.ntk(members=4, gamma=2.0).same  # γ/M · 1 + 1
        tensor([[1.5000, 0.0000],
                [0.0000, 1.5000]])
        >>> k[:1].nngp.same.shape
        torch.Size([1, 2])
        >>> k.to(torch.float64).nngp.same.dtype
        torch.float64
        >>> Kernels.of_blocks(k.blocks).nngp.cross.equal(k.nngp.cross)
        True
    """

    nngp: MemberKernel
    ntk_shared: MemberKernel
    ntk_individual: MemberKernel
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

        Args:
            members: Number of members :math:`M`.
            gamma: Gradient scale: a number, a function of :math:`M`, or None for
                :func:`~embens.theory.natural_gamma`, which needs kernels of inputs with themselves.
            shared_rate: Rate :math:`\eta_w` relative to the learning rate of training.
            individual_rate: Rate :math:`\eta_u` relative to the learning rate of training.

        Returns:
            The kernel with blocks as in these kernels.
        """
        scale = resolve_gamma(
            self,
            members,
            gamma,
            shared_rate=shared_rate,
            individual_rate=individual_rate,
        )
        factor = shared_rate * scale / members
        shared = self.ntk_shared
        individual = self.ntk_individual
        return MemberKernel(
            same=factor * shared.same + individual_rate * individual.same,
            cross=factor * shared.cross + individual_rate * individual.cross,
        )

    @property
    def conditional(self) -> bool:
        """True if the kernels are conditional on the drawn values of members."""
        return self.nngp.conditional

    @property
    def mT(self) -> Kernels:
        """The kernels with both sets of inputs exchanged."""
        return Kernels(self.nngp.mT, self.ntk_shared.mT, self.ntk_individual.mT)

    @property
    def blocks(self) -> list[Tensor]:
        """The blocks nngp same and cross, ntk_shared same and cross, and ntk_individual."""
        return [
            self.nngp.same,
            self.nngp.cross,
            self.ntk_shared.same,
            self.ntk_shared.cross,
            self.ntk_individual.same,
        ]

    @classmethod
    def of_blocks(cls, blocks: Sequence[Tensor]) -> Kernels:
        """Return the kernels with given blocks.

        Args:
            blocks: Five blocks in the order of :attr:`blocks`.

        Returns:
            Kernels in which ``ntk_individual`` is zero between members.
        """
        nngp_same, nngp_cross, shared_same, shared_cross, individual = blocks
        individual_cross = zero_cross(individual)
        if individual.dim() > 2:
            members = range(len(individual))
            individual_cross = individual_cross.clone()
            individual_cross[members, members] = individual
        return cls(
            MemberKernel(nngp_same, nngp_cross),
            MemberKernel(shared_same, shared_cross),
            MemberKernel(individual, individual_cross),
        )

    def __getitem__(self, index: tuple) -> Kernels:
        """Return the kernels of some of the inputs.

        Args:
            index: ``kernels[rows, columns]``, or ``kernels[rows]`` for all columns.

        Returns:
            Kernels with blocks of these rows and columns.
        """
        if not isinstance(index, tuple):
            index = (index, slice(None))
        return self._map(lambda block: block[(..., *index)])

    def to(self, *args, **kwargs) -> Kernels:
        """Return the kernels with another dtype or on another device.

        Args:
            *args: Arguments of ``Tensor.to``.
            **kwargs: Keyword arguments of ``Tensor.to``.

        Returns:
            Kernels whose blocks are converted.
        """
        return self._map(lambda block: block.to(*args, **kwargs))

    def _map(self, function: Callable[[Tensor], Tensor]) -> Kernels:
        parts = []
        for kernel in (self.nngp, self.ntk_shared, self.ntk_individual):
            parts.append(MemberKernel(function(kernel.same), function(kernel.cross)))
        return Kernels(*parts)


def zero_cross(same: Tensor) -> Tensor:
    """Return a ``cross`` block of zeros that takes no memory.

    Args:
        same: The block within a member, ``(n1, n2)`` or ``(member, n1, n2)``.
    """
    shape = same.shape if same.dim() == 2 else (same.shape[0], *same.shape)
    return torch.zeros((), dtype=same.dtype, device=same.device).expand(shape)


def natural_gamma(
    kernels: Kernels,
    members: int = 8,
    *,
    shared_rate: float = 1.0,
    individual_rate: float = 1.0,
) -> float:
    r"""Compute the gradient scale at which M members train as fast as one.

    It is the root :math:`\gamma^*` in :math:`[0, M]` of the equation for the ensemble mean,

    .. math::
        \lambda_{\max}\big(\eta_w \tfrac{\gamma}{M} [\Theta^{com}_{aa} + (M-1) \Theta^{com}_{ab}]
            + \eta_u \Theta^{ind}\big)
        = \lambda_{\max}\big(\eta_w \Theta^{com}_{aa} + \eta_u \Theta^{ind}\big) ,

    or that of the equation for deviations, with :math:`\Theta^{com}_{aa} - \Theta^{com}_{ab}` in
    brackets, whichever is smaller. (The second one matters only where members repel each other.) So
    the largest stable learning rate is that of a single network. The result is M for independent
    members, 1 for equal ones, and in between about :math:`M / (1 + (M-1) r)` with :math:`r =
    \lambda_{\max}(\Theta^{com}_{ab}) / \lambda_{\max}(\Theta^{com}_{aa})`.

    Args:
        kernels: Kernels of some inputs with themselves.
        members: Number of members :math:`M`.
        shared_rate: Relative rate :math:`\eta_w`, as in :meth:`Kernels.ntk`.
        individual_rate: Relative rate :math:`\eta_u`.

    Returns:
        The gradient scale :math:`\gamma^*`.

    Raises:
        ValueError: If the kernels are not symmetric, or members are not exchangeable.

    Example:
        >>> one, zero = torch.eye(3).double(), torch.zeros(3, 3).double()
        >>> shared = MemberKernel(same=one, cross=0.25 * one)
        >>> k = Kernels(nngp=shared, ntk_shared=shared, ntk_individual=MemberKernel(zero, zero))
        >>> natural_gamma(k, members=5)  # 5 / (1 + 4 * 0.25)
        2.5
    """
    check_members(members)
    check_rates(shared_rate=shared_rate, individual_rate=individual_rate)
    shared = kernels.ntk_shared
    shared.require_exchangeable("natural_gamma")
    same = shared.same.double()
    cross = shared.cross.double()
    if same.shape[0] != same.shape[1] or not torch.allclose(same, same.mT, rtol=1e-6):
        raise ValueError(
            "natural_gamma needs kernels of inputs with themselves, which are symmetric; got a "
            f"kernel of shape {tuple(same.shape)} that is not. Pass gamma as a number, or "
            "natural_gamma of the train data's kernels."
        )
    if not cross.any() or not shared_rate:
        return float(members)
    if members == 1 or torch.equal(cross, same):
        return 1.0
    individual = individual_rate * kernels.ntk_individual.same.double()
    target, _ = largest_eigenpair(shared_rate * same + individual)
    gamma = float(members)
    for mode in shared.modes(members):
        slope = shared_rate / members * mode.double()
        gamma = _descend_to_root(slope, individual, target, gamma)
    return min(max(gamma, 0.0), float(members))


def _descend_to_root(slope: Tensor, offset: Tensor, target: float, gamma: float) -> float:
    r"""Solve :math:`\lambda_{\max}(\gamma\,\mathrm{slope} + \mathrm{offset}) = \mathrm{target}`.

    The left side is convex and increasing in :math:`\gamma`, so Newton's method from above descends
    to the root. A start below the root is returned as it is.
    """
    for _ in range(100):
        value, vector = largest_eigenpair(gamma * slope + offset)
        derivative = (vector @ slope @ vector).item()
        if value <= target or derivative <= 0:
            break
        step = (value - target) / derivative
        gamma -= step
        if step < 1e-14 * gamma:
            break
    return gamma


def resolve_gamma(kernels: Kernels, members: int, gamma: Gamma = None, **rates: float) -> float:
    """Return a gradient scale as a number.

    Args:
        kernels: Kernels of inputs with themselves, for the natural scale.
        members: Number of members M.
        gamma: A number, a function of M, or None for the natural scale.
        rates: Relative rates, as in :func:`natural_gamma`.

    Raises:
        ValueError: If the scale is not positive.
    """
    if gamma is None:
        return natural_gamma(kernels, members, **rates)
    value = gamma(members) if callable(gamma) else gamma
    expected = "a positive number, a function of M that gives one, or None"
    return check_number("gamma", value, expected, lambda x: x > 0)


def check_rates(**rates: float) -> None:
    """Raise unless all rates are finite and >= 0."""
    for name, rate in rates.items():
        check_number(name, rate, "a number >= 0", lambda x: x >= 0)


def largest_eigenpair(matrix: Float[Tensor, "n n"]) -> tuple[float, Float[Tensor, " n"]]:
    """Return the largest eigenvalue of a symmetric matrix and its eigenvector.

    Args:
        matrix: Symmetric matrix, ``(n, n)``.

    Returns:
        The eigenvalue, and a vector of norm 1, ``(n,)``.
    """
    n = len(matrix)
    if n > MAX_DENSE_INPUTS:
        # A random start is orthogonal to no eigenvector.
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(n, 1, generator=generator, dtype=matrix.dtype).to(matrix.device)
        values, vectors = torch.lobpcg(matrix, X=start, niter=500, tol=1e-12)
        vector = vectors[:, 0]
        residual = (matrix @ vector - values[0] * vector).norm()
        # The relative error of the eigenvalue is the square of this.
        if residual <= 1e-7 * values[0].abs():
            return values[0].item(), vector
    values, vectors = torch.linalg.eigh(matrix)
    return values[-1].item(), vectors[:, -1]
