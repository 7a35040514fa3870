"""Separate networks with the outputs of an ensemble.

Trained independently from different initialisations, such networks are a deep ensemble
(Lakshminarayanan et al. 2017). The procedures in ``snapshots`` and ``hyper`` return them as well.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import embens


class SeparateNetworks(nn.Module):
    """Ensemble of networks that share no parameters.

    Args:
        networks: One network per member. They are held, not copied, and may repeat.

    Shape:
        - input: whatever the networks take.
        - output: ``(member, batch, class)``.

    Example:
        >>> ensemble = SeparateNetworks([nn.Linear(4, 3), nn.Linear(4, 3)])
        >>> ensemble(torch.zeros(5, 4)).shape
        torch.Size([2, 5, 3])
    """

    def __init__(self, networks: Sequence[nn.Module]):
        super().__init__()
        if len(networks) == 0:
            raise ValueError("networks must hold at least one network, got none.")
        self.networks = nn.ModuleList(networks)

    @property
    def members(self) -> int:
        """Number of members."""
        return len(self.networks)

    def forward(self, *inputs: Any) -> Tensor:
        """Return the outputs of all networks, ``(member, batch, class)``."""
        return torch.stack([network(*inputs) for network in self.networks])

    def member(self, a: int) -> nn.Module:
        """Return the network of member ``a``, not a copy."""
        return self.networks[a]

    def subset(self, members: Iterable[int]) -> "SeparateNetworks":
        """Return an ensemble of some members; an index may repeat.

        Example:
            >>> ensemble = SeparateNetworks([nn.Linear(4, 3), nn.Linear(4, 3)])
            >>> ensemble.subset([1, 0, 1]).members
            3
        """
        return SeparateNetworks([self.networks[a] for a in members])


def redraw(
    reference: nn.Module, members: int, generator: torch.Generator | None = None
) -> list[nn.Module]:
    """Return copies of a network with newly initialised parameters.

    Args:
        reference: Network or layer whose modules have ``reset_parameters``. Its weights are unused.
        members: Number of copies.
        generator: Source of randomness.

    Example:
        >>> first, second = redraw(nn.Linear(4, 3), 2)
        >>> torch.equal(first.weight, second.weight)
        False
    """
    ensemble = embens.independent(reference, members, generator=generator)
    return [ensemble.member(a) for a in range(members)]
