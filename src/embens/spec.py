"""The specification of an ensemble: how its members differ, as the user asked for it.

A spec is small and immutable, and it is saved with the tensors of the ensemble. How an ensemble
runs is derived from the reference and the spec, and is never saved.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from torch import nn

from embens.sites import Site, find_layers


@dataclass(frozen=True)
class LowRankSite:
    r"""A layer whose weights differ between members by a matrix of low rank.

    Attributes:
        layer: Name of the layer.
        rank: Rank of the matrix.
        kind: "multiplicative" for weights :math:`W \circ (1 + B_a A_a)`, "additive" for
            :math:`W + B_a A_a`.
        scale: Initial standard deviation of the matrix, relative to the weights.
    """

    layer: str
    rank: int
    kind: Literal["multiplicative", "additive"]
    scale: float = 0.0


@dataclass(frozen=True)
class PerMember:
    """A module of which every member has separate tensors.

    Attributes:
        module: Name of the module.
        tensors: Names of its per-member parameters and buffers.
        drawn: Whether parameters were initialised separately for each member.
    """

    module: str
    tensors: tuple[str, ...]
    drawn: bool = False


@dataclass(frozen=True)
class EnsembleSpec:
    """What the user asked for: everything that makes an ensemble out of a reference.

    Attributes:
        family: Name of the function that made the ensemble.
        members: Number of members.
        sites: Modulated sites.
        low_rank: Layers with low-rank members.
        per_member: Modules with separate tensors for each member.
        frozen: Whether the shared parameters are not trained.
        pretrained: Whether the members begin near a trained reference.
        separate: Whether members share no parameter.
        individual_head: True if every member has a separately drawn last layer.
        sampled: Number of members for which the modulations were sampled; 0: ``members``. A subset
            keeps the number of the original ensemble, because joint laws depend on it.
        chosen: Indices of a subset's members in the original ensemble; empty for all members.
    """

    family: str
    members: int
    sites: tuple[Site, ...] = ()
    low_rank: tuple[LowRankSite, ...] = ()
    per_member: tuple[PerMember, ...] = ()
    frozen: bool = False
    pretrained: bool = False
    separate: bool = False
    individual_head: bool = False
    sampled: int = 0
    chosen: tuple[int, ...] = ()

    @property
    def has_repeated_members(self) -> bool:
        """Whether some members of a subset are the same."""
        return len(set(self.chosen)) < len(self.chosen)

    def subset(self, members: Iterable[int]) -> "EnsembleSpec":
        """Return the spec of an ensemble of some of the members.

        Args:
            members: Indices of the members.

        Returns:
            The spec, with the indices in the original ensemble.
        """
        original = self.chosen or tuple(range(self.members))
        chosen = tuple(original[a] for a in members)
        sampled = self.sampled or self.members
        return replace(self, members=len(chosen), sampled=sampled, chosen=chosen)

    def to_dict(self) -> dict[str, Any]:
        """Return the spec in a form that JSON can hold; files are read by ``ensemble.header``."""
        data = asdict(self)
        data["sites"] = [{**asdict(site), "law": site.law.to_dict()} for site in self.sites]
        return data

    def check_reference(self, reference: nn.Module) -> None:
        """Raise ValueError if a reference lacks a layer of the spec or has other sizes.

        Args:
            reference: The network that a saved ensemble is joined to.
        """
        layers = find_layers(reference)
        modules = dict(reference.named_modules())
        for site in self.sites:
            layer = _require(layers, site.layer)
            channels = layer.channels(site.kind)
            if site.size * site.repeat != channels:
                raise ValueError(
                    f"the {site.kind} site of layer {site.layer!r} has {site.size} × {site.repeat} "
                    f"values, the reference's layer has {channels} channels: another shape. Pass "
                    "the architecture that was saved."
                )
        for low_rank in self.low_rank:
            _require(layers, low_rank.layer)
        for item in self.per_member:
            module = _require(modules, item.module)
            tensors = {**module._parameters, **module._buffers}
            for name in item.tensors:
                if tensors.get(name) is None:
                    raise ValueError(
                        f"the reference's module {item.module!r} has no tensor {name!r}. Pass the "
                        "architecture that was saved."
                    )


def _require(items: Mapping[str, Any], name: str) -> Any:
    if name not in items:
        raise ValueError(
            f"the reference has no module {name!r}, which the saved ensemble has. Pass a reference "
            "of the architecture that was saved."
        )
    return items[name]
