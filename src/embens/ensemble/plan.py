"""The plan of an ensemble: everything that makes it out of a reference network.

A plan is all that ``embed`` decides before it changes anything, and all that a saved ensemble needs
besides its tensors. :mod:`embens.embedding` makes it, :mod:`embens.ensemble.surgery` carries it
out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from torch import nn

from embens.checks import check_members, closest
from embens.laws import Law, from_dict
from embens.reading.layers import PROJECTIONS, channels, is_attention, parameter_layers

Side = Literal["pre", "post"]


@dataclass(frozen=True)
class Site:
    """One site: where, and what multiplies there.

    ``hidden`` says whether it is one of the paper's hidden sites. With a ``prior_std`` the numbers
    are drawn around trainable means at every pass; their law is that of the means at the start.
    """

    layer: str
    kind: Side
    law: Law
    size: int
    repeat: int = 1
    trainable: bool = True
    fresh: bool = False
    hidden: bool = True
    prior_std: float | None = None

    @property
    def random(self) -> bool:
        """Whether every pass has numbers of its own."""
        return self.fresh or self.prior_std is not None


@dataclass(frozen=True)
class OwnTensors:
    """A module of which every member has some tensors of its own.

    A norm layer without any is here as well: its batch statistics are those of one member.
    ``drawn`` says whether they began as draws of their own, rather than as copies.
    """

    module: str
    tensors: tuple[str, ...] = ()
    drawn: bool = False


@dataclass(frozen=True)
class LowRankSite:
    """A layer whose weights differ between members by a matrix of low rank.

    Attributes:
        layer: its name.
        rank: of the matrix.
        kind: whether it multiplies the weight, entry by entry and added to 1, or is added to it.
        scale: the size of the members' deviations at the start, relative to the weights.
    """

    layer: str
    rank: int
    kind: Literal["multiplicative", "additive"]
    scale: float = 0.0


@dataclass(frozen=True)
class SharedModule:
    """A module whose output is the same for all members and computed once.

    Attributes:
        module: its name.
        random: whether something random comes before it or lies in it, so that in training mode
            members differ after all.
        keep: whether anything but other shared modules uses its output.
        repeat: whether code that runs for all members at once uses its output, which is then
            repeated for each of them.
    """

    module: str
    random: bool = False
    keep: bool = True
    repeat: bool = False


@dataclass(frozen=True)
class Folding:
    """How several members can run as one larger batch.

    Attributes:
        impossible: why they can't; empty where they can.
        unclear: the operations that may mix samples; empty where it is known that none does.
        unclear_before: the same among what members share, if it is repeated for each of them.
        shares: whether what members share can stay as it is up to the first modulations, the
            ``border``; otherwise the inputs are repeated for each member.
        border: the modules whose input is still the same for all members.
    """

    impossible: str = ""
    unclear: tuple[str, ...] = ()
    unclear_before: tuple[str, ...] = ()
    shares: bool = False
    border: tuple[str, ...] = ()


@dataclass(frozen=True)
class Heads:
    """How a network takes an input of each member at once; its last layers are members' own.

    Attributes:
        first: the layers with a block of weights for every member.
        repetition: the fraction of rows in training that are the same for all members.
        mix: the concentration of the members' shares in training; None: all are 1.
    """

    first: tuple[str, ...]
    repetition: float = 0.0
    mix: float | None = None


@dataclass(frozen=True)
class Subset:
    """Which members an ensemble has of a larger one, ``of`` so many; some may come repeatedly."""

    members: tuple[int, ...]
    of: int


@dataclass(frozen=True)
class Plan:
    """Everything that makes an ensemble out of a reference network.

    Attributes:
        family: the function that made it.
        members: how many.
        sites: where they differ.
        low_rank: layers in which they differ by matrices of low rank.
        frozen: whether what they share is not trained.
        pretrained: whether the reference was trained before, and members begin near it.
        own: modules with tensors of each member's own.
        own_last: whether all last layers are, drawn for each member.
        shared: modules computed once for all members.
        state: attributes that the code keeps from one call to the next, for each member.
        separate: whether members share nothing: they are networks of their own.
        folding: how several members run at once.
        random: whether code draws random numbers before the first modulation.
        copies: whether code may change what members share in place, so that each gets a copy.
        not_collapsible: why the ensemble mean is not one plain network; empty where it is.
        recompute: whether the reference recomputes activations in the backward pass.
        widths: the widest modulated input or output that has one row for each sample, and the
            widest that has one for each position (pixel, time) of the input.
        input_channels: numbers at one position of the input.
        heads: how members' inputs are summed, in networks that run once for all of them.
        subset: of which members of another ensemble it was made; None: its members were drawn.
    """

    family: str
    members: int
    sites: tuple[Site, ...] = ()
    low_rank: tuple[LowRankSite, ...] = ()
    frozen: bool = False
    pretrained: bool = False
    own: tuple[OwnTensors, ...] = ()
    own_last: bool = False
    shared: tuple[SharedModule, ...] = ()
    state: tuple[str, ...] = ()
    separate: bool = False
    folding: Folding = Folding()
    random: bool = False
    copies: bool = False
    not_collapsible: str = ""
    recompute: bool = False
    widths: tuple[int, int] = (0, 0)
    input_channels: int = 1
    heads: Heads | None = None
    subset: Subset | None = None

    @property
    def drawn(self) -> int:
        """How many members their numbers were drawn for, which laws joint over members ask."""
        return self.members if self.subset is None else self.subset.of

    @property
    def repeats(self) -> bool:
        """Whether some members are the same."""
        return self.subset is not None and len(set(self.subset.members)) < self.members

    @property
    def has_prior(self) -> bool:
        """Whether training adds a divergence from a prior to the members' losses."""
        return self.family == "bayesian" or any(s.prior_std is not None for s in self.sites)

    def require_embedded(self, what: str) -> None:
        """Raise where members are no networks of their own in the reference."""
        if self.heads is not None:
            raise ValueError(
                f"{what} is not defined for networks with an input for each member (mimo): the "
                "blocks of their first layers belong to the outputs of all members. What they are "
                "at test, with one input for all, is ensemble.subset(range(ensemble.members))."
            )

    def select(self, members: Iterable[int]) -> Plan:
        """Return the plan of an ensemble of some of the members; it has one block for inputs."""
        members, blocks = tuple(members), self.heads.first if self.heads else ()
        own = tuple(o for o in self.own if o.module not in blocks)
        known = self.subset.members if self.subset else range(self.members)
        chosen = Subset(tuple(known[a] for a in members), self.drawn)
        return replace(self, members=len(members), own=own, heads=None, subset=chosen)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON can hold it."""
        sites = [{**asdict(site), "law": site.law.to_dict()} for site in self.sites]
        return {**asdict(self), "sites": sites}

    @classmethod
    def from_dict(cls, data: dict[str, Any], laws: Iterable[type[Law]] = ()) -> Plan:
        """Return the plan that :meth:`to_dict` gave; ``laws`` are those that can't be found."""
        data = {key: value for key, value in data.items() if key != "overwriting"}  # no longer
        data["sites"] = [Site(**{**s, "law": from_dict(s["law"], laws)}) for s in data["sites"]]
        data["own"] = [OwnTensors(**_with_tuples(o)) for o in data["own"]]
        data["low_rank"] = [LowRankSite(**s) for s in data.get("low_rank", ())]
        data["shared"] = [SharedModule(**s) for s in data["shared"]]
        data["folding"] = Folding(**_with_tuples(data["folding"]))
        for name, kind in (("heads", Heads), ("subset", Subset)):
            if data.get(name):
                data[name] = kind(**_with_tuples(data[name]))
        return cls(**_with_tuples(data))

    def check(self, reference: nn.Module, numbers: float = math.inf) -> None:
        """Check a plan from outside against a reference, before anything is built from it.

        ``numbers`` is how many there are for it, so that a plan for more takes no memory.
        """
        check_members(self.members)
        if self.subset is not None:
            chosen = [a in range(check_members(self.subset.of)) for a in self.subset.members]
            if len(chosen) != self.members or not all(chosen):
                raise ValueError(f"the header's {self.subset} does not name {self.members} members")
        layers, modules = parameter_layers(reference), dict(reference.named_modules())
        differing = [s.layer for s in (*self.sites, *self.low_rank)]
        shared, own = [s.module for s in self.shared], [o.module for o in self.own]
        keeping = [place.rpartition(".")[0] for place in self.state]
        first = self.heads.first if self.heads else ()
        every = (*own, *shared, *self.folding.border, *keeping)
        for names, known in ((differing, layers), (every, modules), (first, own)):
            for name in (n for n in names if n not in known):
                raise ValueError(
                    f"the reference has no module {name!r}, which the saved ensemble has; pass a "
                    f"reference of the architecture that was saved"
                    f"{closest(name, [n for n in known if n])}"
                )
        each = sum(site.size for site in self.sites if not site.fresh)
        for site in self.sites:
            takes, gives = channels(site.layer, layers[site.layer])
            expected = {"pre": gives, "post": takes}.get(site.kind)
            if not isinstance(site.law, Law) or site.size * site.repeat != expected:
                raise ValueError(
                    f"the header's {site.kind!r} site of {site.layer!r} has {site.size} × "
                    f"{site.repeat} numbers; the reference's layer needs {expected}, which is "
                    "another shape"
                )
        for name, tensors in ((o.module, o.tensors) for o in self.own):
            present = {**modules[name]._parameters, **modules[name]._buffers}
            for tensor in tensors:
                if tensor not in present:
                    raise ValueError(f"{name!r} in the reference has no tensor {tensor!r}")
                each += present[tensor].numel()
        if self.members * max(each, 1) > numbers:
            raise ValueError(
                f"header and tensors disagree on the number of members: {self.members} have "
                f"{self.members * each} numbers of their own, the file has {numbers}"
            )


def _with_tuples(data: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}


def site_module(name: str, layers: dict[str, nn.Module]) -> str:
    """Return the name of the module that carries a site: an attention for its projections."""
    owner, _, projection = name.rpartition(".")
    if is_attention(layers[name]) and projection in PROJECTIONS:
        return owner
    return name
