"""Joint laws: the values of a unit in different members depend on each other."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from embens.laws.independent import (
    Bernoulli,
    Normal,
    Sampled,
    check_field,
    check_signed_unit,
)
from embens.laws.law import QUADRATURE_NODES, Law


class Joint(Sampled):
    r"""Law of the values of a unit in all members, which are exchangeable but dependent.

    The first axis of a sample is the member axis. Joint laws have :math:`E u^2 = 1`, so ``overlap``
    is :math:`E[u_a u_b]`. The law of one member may depend on the number of members;
    ``marginal(members)`` returns it.

    Example:
        >>> Disjoint().marginal(4)
        Bernoulli(keep=0.25, scale=2.0)
    """

    _draw_noise = staticmethod(torch.randn)

    @property
    def mean(self) -> float:
        raise TypeError(
            f"The mean of {self!r} depends on the number of members. Use law.marginal(M).mean."
        )

    @property
    def second_moment(self) -> float:
        return 1.0

    @property
    def kurtosis(self) -> float:
        raise TypeError(
            f"The kurtosis of {self!r} depends on the number of members. "
            "Use law.marginal(M).kurtosis."
        )

    @abstractmethod
    def marginal(self, members: int) -> Law:
        """Return the law of a single member, which may depend on the number of members.

        Args:
            members: Number of members of the ensemble.

        Returns:
            The law of the values of one member.

        Raises:
            ValueError: If the law does not exist for this number of members.

        Example:
            >>> Correlated(-0.2).marginal(4)
            Normal(mean=0.0, std=1.0)
        """

    def pair_moment(self, members: int) -> float:
        self.marginal(members)  # raises if the law does not exist for this number of members
        return self.overlap

    def equal_share(self, members: int) -> float:
        """Return the mixture weight of "equal" in the law of two members.

        The joint law of two members is a mixture: with this weight their values are equal, and
        otherwise independent. The weight may be negative.

        Args:
            members: Number of members of the ensemble.

        Returns:
            The weight, at most 1.

        Raises:
            NotImplementedError: If the law of two members is not such a mixture.

        Example:
            >>> Masks(overlap=1.0).equal_share(4)  # all members have the same mask
            1.0
        """
        raise NotImplementedError(
            f"The joint expectation of a smooth activation over two members' v is not available "
            f"for {self!r}. Use the law for post, use a piecewise linear activation such as ReLU, "
            "or measure finite networks (embens.finite.nngp and ntk)."
        )

    def pair_quadrature(
        self, members: int, n: int = QUADRATURE_NODES
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError(
            f"The joint law of two members is not available for {self!r}, but corrections at "
            "finite width need it. Define pair_quadrature(members, n)."
        )

    def _noise_device(self, device: torch.device | str | None) -> torch.device | str | None:
        # Masks are arranged by sorting the noise, and tensors on the meta device have no values.
        if device is not None and torch.device(device).type == "meta":
            return "cpu"
        return device

    def _transform(self, noise: Tensor) -> Tensor:
        if noise.numel() == 0:
            return noise
        rows = torch.atleast_1d(noise)
        values = self._arrange(rows.reshape(len(rows), -1))
        return values.reshape(noise.shape)

    @abstractmethod
    def _arrange(self, noise: Tensor) -> Tensor:
        """Turn independent normal noise ``(member, unit)`` into values of the same shape.

        The order of a row's entries is a random order of the units. The sum of a row does not
        depend on that order, so the order of the sums is an independent order of the members.
        """


class _JointMasks(Joint):
    """Masks with jointly placed ones, so that every unit is used and shares are equal."""

    balanced = True

    def marginal(self, members: int) -> Bernoulli:
        # Every earlier mask covers the fraction `overlap` of a mask, so the mask of member a adds
        # the fraction (1 − overlap)^a of its ones as new units. Together the masks cover all units.
        keep = 1 / math.fsum((1 - self.overlap) ** a for a in range(members))
        return Bernoulli(keep, 1 / math.sqrt(keep))

    def pair_half_moment(self, sign_a: int, sign_b: int) -> float:
        if sign_a == 1 and sign_b == 1:
            return self.overlap
        return 0.0

    def equal_share(self, members: int) -> float:
        keep = self.marginal(members).keep
        if keep == 1:
            return 1.0
        return (self.overlap - keep) / (1 - keep)

    def pair_quadrature(
        self, members: int, n: int = QUADRATURE_NODES
    ) -> tuple[Tensor, Tensor, Tensor]:
        mask = self.marginal(members)
        both = self.overlap * mask.keep
        one = mask.keep - both
        first = [0.0, 0.0, mask.scale, mask.scale]
        second = [0.0, mask.scale, 0.0, mask.scale]
        weights = [1 - 2 * one - both, one, one, both]
        table = torch.tensor([first, second, weights], dtype=torch.float64, device="cpu")
        return table[0], table[1], table[2]

    @abstractmethod
    def overlap_variance(self, members: int) -> float:
        r"""Return :math:`N\,\mathrm{Var}(\frac1N \sum_j u_{aj} u_{bj})` for many units :math:`N`.

        Masks of a fixed size overlap more evenly than independent masks.

        Args:
            members: Number of members of the ensemble, at least 2.

        Returns:
            The variance, averaged over pairs of members.

        Example:
            >>> Disjoint().overlap_variance(4)
            0.0
        """


@final
@dataclass(frozen=True)
class Masks(_JointMasks):
    r"""Masksembles (Durasov et al., 2021): two masks share the fraction ``overlap`` of their ones.

    On :math:`N` units every mask has :math:`m \approx N / \sum_{a<M} (1 - \mathrm{overlap})^a`
    ones, and every unit is in at least one mask. Unlike in the original, ones have the value
    :math:`\sqrt{N/m}`, so that :math:`E u^2 = 1`.

    Args:
        overlap: One over the scale S of Masksembles; in (0, 1].

    Example:
        >>> masks = Masks(overlap=0.5).sample((4, 64), torch.Generator().manual_seed(0))
        >>> (masks > 0).sum(1).tolist()
        [34, 34, 34, 34]
    """

    overlap: float = 0.5  # pyright: ignore[reportIncompatibleMethodOverride]

    def __post_init__(self) -> None:
        expected = "in (0, 1], one over the scale S of Masksembles"
        check_field(self, "overlap", expected, lambda overlap: 0 < overlap <= 1)

    def _arrange(self, noise: Tensor) -> Tensor:
        members, units = noise.shape
        least_ones = math.ceil(units / members)
        ones = max(round(units * self.marginal(members).keep), least_ones)
        masks = torch.zeros_like(noise)
        is_unused = torch.ones_like(noise[0], dtype=torch.bool)
        member_order = noise.sum(1).argsort().tolist()
        for position, member in enumerate(member_order):
            unit_order = noise[member].argsort()
            unused_units = unit_order[is_unused[unit_order]]
            used_units = unit_order[~is_unused[unit_order]]
            # The remaining members divide the unused units as if these were a smaller layer. If
            # there are too few used units to fill the mask, more unused ones are needed.
            share = round(len(unused_units) * self.marginal(members - position).keep)
            new_ones = min(ones, max(share, ones - len(used_units)))
            selected = torch.cat([unused_units[:new_ones], used_units[: ones - new_ones]])
            masks[member, selected] = math.sqrt(units / ones)
            is_unused[selected] = False
        return masks

    def overlap_variance(self, members: int) -> float:
        # All quantities are fractions of the units of the layer.
        keep = self.marginal(members).keep
        total = 0.0
        used = keep  # by the earlier masks
        for position in range(1, members):
            # The mask at this position draws a part of its ones from the used units, at random.
            # Its overlap with an earlier mask, which covers `share` of them, is hypergeometric.
            unused_drawn = (1 - used) * self.marginal(members - position).keep
            used_drawn = keep - unused_drawn
            share = keep / used
            variance = used_drawn * share * (1 - share) * (1 - used_drawn / used)
            total += position * variance  # there are `position` earlier masks
            used += unused_drawn
        pairs = members * (members - 1) / 2
        return total / pairs / keep**2


@final
@dataclass(frozen=True)
class Disjoint(_JointMasks):
    r"""Orthogonal dropout: every unit belongs to exactly one member, with value :math:`\sqrt M`.

    Second moment 1, overlap 0. A layer needs at least as many units as there are members.

    Example:
        >>> masks = Disjoint().sample((2, 6), torch.Generator().manual_seed(0))
        >>> (masks > 0).sum(0).tolist()
        [1, 1, 1, 1, 1, 1]
    """

    @property
    def overlap(self) -> float:
        return 0.0

    def overlap_variance(self, members: int) -> float:
        return 0.0

    def _arrange(self, noise: Tensor) -> Tensor:
        members, units = noise.shape
        if units < members:
            raise ValueError(
                f"Disjoint needs at least one unit per member, got {members} members and {units} "
                "units. Use fewer members or a wider layer, or leave this site out."
            )
        rounds = math.ceil(units / members)
        owners = noise.sum(1).argsort().repeat(rounds)[:units]
        masks = torch.zeros_like(noise)
        masks[owners, noise[0].argsort()] = math.sqrt(members)
        return masks


@final
@dataclass(frozen=True)
class Correlated(Joint):
    r"""Jointly normal values with mean 0, second moment 1 and :math:`E[u_a u_b] = \rho`.

    Args:
        rho: The correlation, at least :math:`-1/(M-1)`; members repel each other below 0.

    Example:
        >>> Correlated(-0.2).pair_moment(members=4)
        -0.2
    """

    rho: float

    def __post_init__(self) -> None:
        check_signed_unit(self, "rho")

    @property
    def overlap(self) -> float:
        return self.rho

    def marginal(self, members: int) -> Normal:
        # 1 + (M − 1) rho is the smallest eigenvalue of the covariance if rho is negative. The
        # tolerance admits a rounded -1 / (M - 1).
        if 1 + (members - 1) * self.rho < -1e-9:
            raise ValueError(
                f"Correlated: rho must be at least -1/(M - 1) = {-1 / (members - 1):.6g} for "
                f"{members} members, got {self.rho}. Use a larger rho or fewer members."
            )
        return Normal()

    def pair_half_moment(self, sign_a: int, sign_b: int) -> float:
        # The arc-cosine kernel of degree 1 (Cho and Saul, 2009).
        rho = sign_a * sign_b * self.rho
        return (math.sqrt(1 - rho**2) + rho * (math.pi - math.acos(rho))) / (2 * math.pi)

    def pair_quadrature(
        self, members: int, n: int = QUADRATURE_NODES
    ) -> tuple[Tensor, Tensor, Tensor]:
        first, noise, weights = self.marginal(members).pair_quadrature(members, n)
        return first, self.rho * first + math.sqrt(1 - self.rho**2) * noise, weights

    def _arrange(self, noise: Tensor) -> Tensor:
        members = len(noise)
        self.marginal(members)  # raises if rho is too small
        # The covariance has the eigenvalue 1 + (M − 1) rho for the mean over members, and 1 − rho
        # for deviations from the mean.
        common = noise.mean(0)
        common_scale = math.sqrt(max(0.0, 1 + (members - 1) * self.rho))
        return math.sqrt(1 - self.rho) * (noise - common) + common_scale * common
