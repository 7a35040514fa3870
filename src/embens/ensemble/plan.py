"""The plan of an ensemble: everything that makes it out of a reference network.

A plan is all that ``embed`` decides before it changes anything, and all that a saved ensemble needs
besides its tensors. :mod:`embens.embedding` makes it, :mod:`embens.ensemble.surgery` carries it
out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import nn

from embens import reading
from embens.checks import check_members, closest
from embens.laws import Law, from_dict

FORMAT, VERSION = "embens ensemble", 2
Side = Literal["pre", "post"]


@dataclass(frozen=True)
class Site:
    """One site: where, and what multiplies there.

    ``hidden`` says whether it is one of the paper's hidden sites.
    """

    layer: str
    kind: Side
    law: Law
    size: int
    repeat: int = 1
    trainable: bool = True
    fresh: bool = False
    hidden: bool = True


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
class Plan:
    """Everything that makes an ensemble out of a reference network.

    Attributes:
        family: the function that made it.
        members: how many.
        sites: where they differ.
        low_rank: layers in which they differ by matrices of low rank.
        frozen: whether what they share is not trained.
        own: modules with tensors of each member's own.
        own_last: whether all last layers are, drawn for each member.
        shared: modules computed once for all members.
        separate: whether members share nothing: they are networks of their own.
        folding: how several members run at once.
        random: whether code draws random numbers before the first modulation.
        copies: whether code may change what members share in place, so that each gets a copy.
        overwriting: ReLU modules that may work in place, because nothing else uses what a
            modulation just made for them.
        not_collapsible: why the ensemble mean is not one plain network; empty where it is.
        recompute: whether the reference recomputes activations in the backward pass.
        widths: the widest modulated input or output that has one row for each sample, and the
            widest that has one for each position (pixel, time) of the input.
        input_channels: numbers at one position of the input.
    """

    family: str
    members: int
    sites: tuple[Site, ...] = ()
    low_rank: tuple[LowRankSite, ...] = ()
    frozen: bool = False
    own: tuple[OwnTensors, ...] = ()
    own_last: bool = False
    shared: tuple[SharedModule, ...] = ()
    separate: bool = False
    folding: Folding = Folding()
    random: bool = False
    copies: bool = False
    overwriting: tuple[str, ...] = ()
    not_collapsible: str = ""
    recompute: bool = False
    widths: tuple[int, int] = (0, 0)
    input_channels: int = 1

    def to_json(self) -> str:
        """Return the plan as text."""
        sites = [{**asdict(site), "law": site.law.to_dict()} for site in self.sites]
        plan = {**asdict(self), "sites": sites}
        return json.dumps({"format": FORMAT, "version": VERSION, "plan": plan})

    @classmethod
    def from_json(cls, text: str, laws: Iterable[type[Law]] = ()) -> Plan:
        """Return the plan that :meth:`to_json` wrote; ``laws`` are those that can't be found."""
        content = json.loads(text)
        if content.get("format") != FORMAT:
            raise ValueError("not an ensemble's header")
        if content.get("version") != VERSION:
            newer = content.get("version", 0) > VERSION
            advice = "use a newer embens" if newer else "read it with embens 0.1"
            raise ValueError(
                f"the header has format version {content.get('version')}, this embens reads "
                f"{VERSION}; {advice}"
            )
        data = dict(content["plan"])
        data["sites"] = [Site(**{**s, "law": from_dict(s["law"], laws)}) for s in data["sites"]]
        data["own"] = [OwnTensors(**_with_tuples(o)) for o in data["own"]]
        data["low_rank"] = [LowRankSite(**s) for s in data.get("low_rank", ())]
        data["shared"] = [SharedModule(**s) for s in data["shared"]]
        data["folding"] = Folding(**_with_tuples(data["folding"]))
        return cls(**_with_tuples(data))

    def check(self, reference: nn.Module) -> None:
        """Check a plan from outside against a reference, before anything is built from it."""
        check_members(self.members)
        layers = reading.parameter_layers(reference)
        modules = dict(reference.named_modules())

        def known(name: str, names: Iterable[str]) -> None:
            if name not in names:
                raise ValueError(
                    f"the reference has no module {name!r}, which the saved ensemble has; pass a "
                    f"reference of the architecture that was saved"
                    f"{closest(name, [n for n in names if n])}"
                )

        for site in self.sites:
            known(site.layer, layers)
            takes, gives = reading.channels(site.layer, layers[site.layer])
            expected = {"pre": gives, "post": takes}.get(site.kind)
            if not isinstance(site.law, Law) or site.size * site.repeat != expected:
                raise ValueError(
                    f"the header's {site.kind!r} site of {site.layer!r} has {site.size} × "
                    f"{site.repeat} numbers; the reference's layer needs {expected}, which is "
                    "another shape"
                )
        for low in self.low_rank:
            known(low.layer, layers)
        for own in self.own:
            known(own.module, modules)
            module = modules[own.module]
            present = {*module._parameters, *module._buffers}
            for tensor in own.tensors:
                if tensor not in present:
                    raise ValueError(f"{own.module!r} in the reference has no tensor {tensor!r}")
        for name in (*(s.module for s in self.shared), *self.overwriting, *self.folding.border):
            known(name, modules)


def _with_tuples(data: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}


def site_module(name: str, layers: dict[str, nn.Module]) -> str:
    """Return the name of the module that carries a site: an attention for its projections."""
    owner, _, projection = name.rpartition(".")
    if reading.is_attention(layers[name]) and projection in reading.PROJECTIONS:
        return owner
    return name
