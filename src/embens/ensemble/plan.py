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
from embens.reading.layers import channels, parameter_layers

Side = Literal["pre", "post"]


@dataclass(frozen=True)
class Site:
    """One site: where, and what multiplies there."""

    layer: str
    kind: Side
    law: Law  # with a prior_std that of the means at the start
    size: int
    repeat: int = 1
    trainable: bool = True
    fresh: bool = False
    hidden: bool = True  # whether it is one of the paper's hidden sites
    prior_std: float | None = None  # of numbers that every pass draws around trainable means

    @property
    def random(self) -> bool:
        """Whether every pass has numbers of its own."""
        return self.fresh or self.prior_std is not None


@dataclass(frozen=True)
class OwnTensors:
    """A module of which every member has some tensors of its own.

    A norm layer without any is here as well: its batch statistics are those of one member.
    """

    module: str
    tensors: tuple[str, ...] = ()
    drawn: bool = False  # whether they began as draws of their own, rather than as copies


@dataclass(frozen=True)
class LowRankSite:
    """A layer whose weights differ between members by a matrix of low rank."""

    layer: str
    rank: int
    kind: Literal["multiplicative", "additive"]
    scale: float = 0.0  # of the members' deviations at the start, relative to the weights


@dataclass(frozen=True)
class SharedModule:
    """A module whose output is the same for all members and computed once."""

    module: str
    random: bool = False  # something random is before or in it: members differ in training mode
    keep: bool = True  # whether anything but other shared modules uses its output
    repeat: bool = False  # code that runs for all members at once uses it, so it is repeated


@dataclass(frozen=True)
class Folding:
    """How several members can run as one larger batch."""

    impossible: str = ""  # why they can't
    unclear: tuple[str, ...] = ()  # the operations that may mix samples
    unclear_before: tuple[str, ...] = ()  # the same among what members share, if it is repeated
    shares: bool = False  # what members share can stay as it is up to the first modulations:
    border: tuple[str, ...] = ()  # the modules whose input is still the same for all members


@dataclass(frozen=True)
class Heads:
    """How a network takes an input of each member at once; its last layers are members' own."""

    first: tuple[str, ...]  # the layers with a block of weights for every member
    repetition: float = 0.0  # the fraction of rows in training that are the same for all members
    mix: float | None = None  # the concentration of members' shares in training; None: all are 1


@dataclass(frozen=True)
class Subset:
    """Which members an ensemble has of a larger one, ``of`` so many; some may come repeatedly."""

    members: tuple[int, ...]
    of: int


@dataclass(frozen=True)
class Plan:
    """Everything that makes an ensemble out of a reference network."""

    family: str  # the function that made it
    members: int
    sites: tuple[Site, ...] = ()
    low_rank: tuple[LowRankSite, ...] = ()
    frozen: bool = False  # whether what members share is not trained
    pretrained: bool = False  # the reference was trained before, and members begin near it
    own: tuple[OwnTensors, ...] = ()
    own_last: bool = False  # whether all last layers are members' own, drawn for each
    shared: tuple[SharedModule, ...] = ()
    state: tuple[str, ...] = ()  # attributes that the code keeps from call to call, for each member
    separate: bool = False  # whether members are networks of their own
    folding: Folding = Folding()
    random: bool = False  # whether code draws random numbers before the first modulation
    copies: bool = False  # code may change what members share in place, so that each gets a copy
    not_collapsible: str = ""  # why the ensemble mean is not one plain network
    recompute: bool = False  # whether activations are recomputed in the backward pass
    widths: tuple[int, int] = (0, 0)  # the widest layer by samples, and the widest by positions
    input_channels: int = 1  # numbers at one position of the input
    heads: Heads | None = None
    subset: Subset | None = None  # of which members of another ensemble it was made

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
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """Return the plan that :meth:`to_dict` gave."""
        data = dict(data)
        data["sites"] = [Site(**{**s, "law": from_dict(s["law"])}) for s in data["sites"]]
        data["own"] = [OwnTensors(**_with_tuples(o)) for o in data["own"]]
        data["low_rank"] = [LowRankSite(**s) for s in data["low_rank"]]
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
            expected = channels(layers[site.layer])[site.kind == "pre"]
            if site.size * site.repeat != expected:
                raise ValueError(
                    f"the {site.kind} site of {site.layer!r} has {site.size} × {site.repeat} "
                    f"numbers; the reference's layer needs {expected}, which is another shape"
                )
        each += sum(getattr(modules[o.module], t).numel() for o in self.own for t in o.tensors)
        if self.members * max(each, 1) > numbers:
            raise ValueError(
                f"header and tensors disagree on the number of members: {self.members} have "
                f"{self.members * each} numbers of their own, the file has {numbers}"
            )


def _with_tuples(data: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
