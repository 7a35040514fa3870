"""Placement: the modulations and copies at each layer of the reference.

The rules of :mod:`embens.theory.recursion` see modules of the plain reference. A placement adds the
modulations of a layer, and the kind of copies that members have of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import nn

from embens.laws import Law
from embens.theory.ensembles import drawn_members, per_member
from embens.theory.expectations import differs_between_members

if TYPE_CHECKING:
    from embens.ensemble import EmbeddedEnsemble
    from embens.spec import LowRankSite, Site


@dataclass(frozen=True)
class Modulation:
    r"""Distribution of a modulation :math:`u` or :math:`v` over the members.

    Attributes:
        site: The site in the specification of the ensemble.
        members: Number of members that the law was drawn for; moments of joint laws depend on it.
    """

    site: Site
    members: int

    @property
    def law(self) -> Law:
        """Distribution as the user gave it, maybe joint over members."""
        return self.site.law

    @property
    def marginal(self) -> Law:
        """Distribution of one member's values."""
        return self.law.marginal(self.members)

    @property
    def trainable(self) -> bool:
        """True if the values are parameters, not fixed or resampled masks."""
        return self.site.trainable and not self.site.fresh

    @property
    def second_moment(self) -> float:
        r"""Expectation :math:`E u_a^2`."""
        return self.law.second_moment

    @property
    def pair_moment(self) -> float:
        r"""Expectation :math:`E[u_a u_b]` of two members."""
        return self.law.pair_moment(self.members)

    @property
    def differs_between_members(self) -> bool:
        """True if members draw different values."""
        return differs_between_members(self.law)


@dataclass(frozen=True)
class Placement:
    """Modulations and copies of one layer of the reference.

    Attributes:
        pre: Modulation of the layer's output, before the activation.
        post: Modulation of the layer's input, after the activation before it.
        copies: "drawn" or "copied" where every member has a copy of the layer, with weights drawn
            for each member or copied from the reference; "" where members share it.
        low_rank: Matrices of low rank by which the weights of members differ, or None.
    """

    pre: Modulation | None = None
    post: Modulation | None = None
    copies: Literal["", "drawn", "copied"] = ""
    low_rank: LowRankSite | None = None


SHARED = Placement()
"""Placement of a layer that all members share and that nothing modulates."""

Placements = Mapping[nn.Module, Placement]


def find_placements(ensemble: EmbeddedEnsemble, reference: nn.Module) -> dict[nn.Module, Placement]:
    """Return the placements of all layers at which members differ.

    Args:
        ensemble: The ensemble.
        reference: Its plain reference; its modules are the keys of the result.
    """
    spec = ensemble.spec
    members = drawn_members(ensemble)
    modulations = {}
    for site in spec.sites:
        modulations[site.layer, site.kind] = Modulation(site, members)
    copies: dict[str, Literal["drawn", "copied"]] = {}
    for item in per_member(ensemble):
        if item.tensors:
            copies[item.module] = "drawn" if item.drawn else "copied"
    low_rank = {site.layer: site for site in spec.low_rank}
    placements = {}
    for name, module in reference.named_modules():
        placement = Placement(
            pre=modulations.get((name, "pre")),
            post=modulations.get((name, "post")),
            copies=copies.get(name, ""),
            low_rank=low_rank.get(name),
        )
        if placement != SHARED:
            placements[module] = placement
    return placements
