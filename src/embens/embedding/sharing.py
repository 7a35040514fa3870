"""What members share, what each has of its own, and how several run at once.

Decided from the data flow of the reference. A value is *apart* if a modulation, or a tensor of a
member's own, lies before it; all other values are the same for every member. A module that gets
and gives only such values is computed once.

Several members run as one larger batch, *folded*: up to the border, the first modulations, rows are
those of the input; after it every sample has a row for each member.
"""

import math
import warnings
from collections.abc import Iterable, Iterator

from torch import nn

from embens.embedding.sites import is_within
from embens.ensemble.layers import is_linear_in_parameters
from embens.ensemble.plan import Folding, LowRankSite, OwnTensors, Plan, SharedModule, Site
from embens.reading.flow import Call, Flow, mentions
from embens.reading.layers import NORMS, channels, parameter_layers, unknown_layers
from embens.reading.samples import is_in_place, time_first

RUNNING = ("running_mean", "running_var", "num_batches_tracked")


class Sharing:
    """The decision for one reference and its sites.

    Members have all tensors of ``own`` modules for themselves, ``drawn`` or copied; ``separate``
    ones have every tensor. The running statistics of ``norms``, and their scale and shift, are
    "member" or "shared".
    """

    def __init__(
        self,
        reference: nn.Module,
        flow: Flow,
        sites: Iterable[Site | LowRankSite] = (),
        own: Iterable[str] = (),
        *,
        drawn: bool = True,
        separate: bool = False,
        norms: tuple[str, str] = ("member", "shared"),
    ):
        self.reference, self.flow, self.sites = reference, flow, tuple(sites)
        self.layers = parameter_layers(reference)
        self.modules = dict(reference.named_modules())
        self.separate, chosen = separate, [""] if separate else list(own)
        self.carriers = {s.layer for s in self.sites}
        self.post = {s.layer for s in self.sites if s.kind != "pre"}
        self.weights = {s.layer for s in self.sites if isinstance(s, LowRankSite)}
        self.own: dict[str, OwnTensors] = {}
        for name, module in ((n, m) for n, m in self.modules.items() if is_within(n, chosen)):
            items = (*module._parameters.items(), *module._buffers.items())
            if tensors := tuple(k for k, t in items if t is not None):
                self.own[name] = OwnTensors(name, tensors, drawn)
        self.tokens = self.carriers | {n for n in self.layers if is_within(n, self.own)}
        self.own_last = drawn and all(is_within(n, chosen) for n in flow.last)
        self.kept: tuple[str, ...] = ()
        self.own = self._own_running(*norms) | self.own
        if separate:
            self.kept = _dotted(flow.state.kept)
        shareable = self._shareable({*self.own, *(place.rpartition(".")[0] for place in self.kept)})
        outermost = [n for n in shareable if not is_within(n.rpartition(".")[0], shareable)]
        self.once = {} if separate else {n: shareable[n] for n in outermost}

    def plan(self, family: str, members: int) -> Plan:
        """Return the plan for so many members, and warn of what is not as it should be."""
        for text in self._worries():
            warnings.warn(text, stacklevel=7)
        recompute = mentions(self.reference, _is_checkpointing) and not self.separate
        copies = any(is_in_place(step.name) for step in self.flow.steps) or bool(self.flow.opaque)
        copies = copies or any(getattr(m, "inplace", False) for m in self.modules.values())
        widths, input_channels = self._widths()
        return Plan(
            family=family,
            members=members,
            sites=tuple(s for s in self.sites if isinstance(s, Site)),
            low_rank=tuple(s for s in self.sites if isinstance(s, LowRankSite)),
            own=tuple(self.own.values()),
            own_last=self.own_last and not self.separate,
            shared=() if recompute else self.shared(),
            state=self.kept,
            separate=self.separate,
            folding=self.folding(),
            random=self._is_random() and not self.separate,
            copies=copies,
            not_collapsible=self._why_not_collapsible(),
            recompute=recompute,
            widths=widths,
            input_channels=input_channels,
        )

    # What is the same for all members

    def _shareable(self, own: set[str]) -> dict[str, bool]:
        """Return the modules that give all members the same: name to whether they are random."""
        found: dict[str, bool] = {}
        differing: set[str] = set()
        for index, call in enumerate(self.flow.calls):
            random = any(t.startswith("random") for t in call.upstream | call.result)
            found[call.name] = found.get(call.name, False) or random
            if not self._is_same(index, call, own):
                differing.add(call.name)
        return {n: random for n, random in found.items() if n not in differing}

    def _is_same(self, index: int, call: Call, own: set[str]) -> bool:
        if not call.name or not call.visible or call.aliases:
            return False
        if call.upstream & (self.tokens | own) or self._overwrites_others(index):
            return False
        if own & {"", *(self.flow.calls[outer].name for outer in call.inside)}:
            return False  # code around it may use what each member has of its own
        differing = {n for n in self.carriers | own if is_within(n, [call.name])}
        if call.name in self.carriers - self.post:
            differing.discard(call.name)  # only its output is multiplied
        return not differing

    def _overwrites_others(self, index: int) -> bool:
        """Return whether a call works in place on what anyone else uses as well."""
        calls = self.flow.calls
        call = calls[index]
        if not any(getattr(m, "inplace", False) for m in self.modules[call.name].modules()):
            return False
        return any(index not in chain for p in call.parents for chain in calls[p].consumers)

    def _own_running(self, statistics: str, affine: str) -> dict[str, OwnTensors]:
        """Return the norm layers, and other modules with running buffers, that differ by member."""
        state, places, before = self.flow.state, set(), None
        untouched: list[str] = []
        while places != before:  # what a module keeps may differ by what another one keeps
            shareable, before = self._shareable({*self.own, *(name for name, _ in places)}), places
            untouched = [n for n, random in shareable.items() if not random]
            untouched = [n for n in untouched if n not in self.carriers]
            places = {p for p in state.buffers | state.kept if not is_within(p[0], untouched)}
        self.kept = _dotted(places & state.kept)
        found: dict[str, OwnTensors] = {}
        for name, module in self.modules.items():
            norm, apart = isinstance(module, NORMS), not is_within(name, untouched)
            names = ["weight", "bias"] if affine == "member" and norm else []
            running = sorted(b for n, b in state.buffers if n == name)
            if statistics == "member" and apart:
                names += dict.fromkeys([*(RUNNING if norm else ()), *running])
            present = tuple(n for n in names if getattr(module, n, None) is not None)
            batch = isinstance(module, nn.modules.batchnorm._NormBase)
            if present or (apart and (batch or running)):
                found[name] = OwnTensors(name, present)
        return found

    def shared(self) -> tuple[SharedModule, ...]:
        """Return the modules that are computed once."""
        result = []
        for name, random in self.once.items():
            carries = name in self.carriers
            uses = [c for c in self._uses(name) if self._once_of(c) != random]
            apart = [c for c in uses if self._once_of(c) is None]  # on the rows of all members
            repeat = not all(chain and self._is_border_aware(chain[-1]) for chain in apart)
            keep = carries or bool(uses)
            result.append(SharedModule(name, random, keep, repeat and not carries))
        return tuple(result)

    def _uses(self, name: str) -> list[list[str]]:
        """Return the chains of modules inside which the outputs of a module are used."""
        calls = [c for c in self.flow.calls if c.name == name]
        return [[self.flow.calls[i].name for i in chain] for c in calls for chain in c.consumers]

    def _once_of(self, chain: list[str]) -> bool | None:
        """Return whether the shared module of a chain is random; None if there is none."""
        return next((self.once[n] for n in chain if n in self.once), None)

    # Several members at once

    def _is_border_aware(self, name: str) -> bool:
        """Return whether a module itself can go from common rows to rows for each member."""
        return name in self.own or name in self.carriers

    def folding(self) -> Folding:
        """Return how several members run as one larger batch."""
        calls = self.flow.calls
        dependent = [n for n in self.modules if not is_within(n, self.once)]
        for name in dependent:
            if time_first(self.modules[name]) is self.modules[name]:
                return Folding(f"the batch is not the first axis in {name!r}")
        apart = sorted({*self.carriers, *self.own})
        recurrent = [n for n in apart if isinstance(self.modules[n], nn.RNNBase)]
        if recurrent:
            return Folding(f"the batch is not the first axis of the states of {recurrent[0]!r}")
        if self.kept:
            return Folding(f"the code keeps {self.kept[0]!r} from one call to the next")
        if not calls:
            return Folding(unclear=("the code could not be read",))
        outside = [step for step in self.flow.steps if not self._in_once(step.around)]
        unclear = {step.operation for step in outside if not step.clear}
        for name in dependent:
            if self.modules[name]._forward_hooks or self.modules[name]._forward_pre_hooks:
                unclear.add(f"a hook of {name!r}")
        unclear |= {o for o in self.flow.opaque if not is_within(o, self.once)}
        unclear |= {f"a buffer of {n!r}" for n, _ in self.flow.state.buffers if n in self.own}
        if any(step.reduces for step in outside):
            unclear |= {step.operation for step in outside if step.joins}
        if any(trail.rows not in ("input", "result") for trail in self.flow.outputs):
            unclear.add("an output that is not made of the input")
        before = {s.operation for s in self.flow.steps if self._in_once(s.around) and not s.clear}
        before |= {o for o in self.flow.opaque if is_within(o, self.once)}
        meet = any(step.rows >= {"input", "result"} for step in outside)
        border = None if meet else self._border()
        return Folding(
            unclear=tuple(sorted(unclear)),
            unclear_before=tuple(sorted(before)),
            shares=border is not None,
            border=tuple(sorted(border or ())),
        )

    def _in_once(self, around: tuple[str, ...]) -> bool:
        return any(name in self.once for name in around)

    def _border(self) -> set[str] | None:
        """Return the modules at the border; None where it can't be drawn."""
        if any(trail.rows == "input" for trail in self.flow.outputs):
            return None
        common = {s.module for s in self.shared() if not s.repeat} - self.carriers
        found: dict[str, bool] = {}
        for call in self.flow.calls:
            if self._in_once(tuple(self.flow.calls[i].name for i in call.inside)):
                continue
            sources = {self.flow.calls[p].name in common for p in call.parents}
            sources |= {rows == "input" for rows in call.loose}
            once = call.name in self.once
            if not (once or self._is_border_aware(call.name)):
                if call.leaf and "input" in call.loose:
                    return None
                continue
            if len(sources) > 1 or (once and sources == {False}):
                return None
            takes_common = sources == {True}
            if found.setdefault(call.name, takes_common) != takes_common:
                return None
        return {n for n, takes_common in found.items() if takes_common and self._is_border_aware(n)}

    def _is_random(self) -> bool:
        """Return whether anything random comes before the first modulation."""
        apart = self.tokens | set(self.own)
        common = [c for c in self.flow.calls if not c.upstream & apart]
        drawn = (c.upstream | (c.result if c.leaf else frozenset()) for c in common)
        return any(t.startswith("random") for tokens in drawn for t in tokens)

    # What else a plan holds

    def _widths(self) -> tuple[tuple[int, int], int]:
        """Return ``Plan.widths`` and ``Plan.input_channels``."""
        rows = positions = 1
        for name in self.flow.upstream if self.separate else self.tokens:
            width = max(s or 1 for s in channels(self.layers[name]))
            if name in self.flow.repeat:
                rows = max(rows, width)
            else:
                positions = max(positions, math.ceil(width / self._shrinkage(name)))
        takes = [channels(self.layers[n])[0] or 1 for n in self.flow.first]
        return (rows, positions), min(takes, default=1)

    def _shrinkage(self, name: str) -> float:
        """Return how many positions of the input come to one of a layer, by strides before it."""
        before, factor = self.flow.upstream.get(name, set()), 1.0
        axes = max((len(getattr(layer, "stride", ())) for layer in self.layers.values()), default=0)
        for call in {call.name: call for call in self.flow.calls if call.leaf}.values():
            stride = getattr(module := self.modules[call.name], "stride", 1)
            steps = math.prod(stride) if isinstance(stride, tuple) else stride**axes
            if isinstance(module, nn.modules.conv._ConvTransposeNd):
                factor /= steps if call.name in {*before, name} else 1
            elif call.name in before or (call.name not in self.layers and call.upstream <= before):
                factor *= steps
        return factor

    def _why_not_collapsible(self) -> str:
        """Return why the mean of the members' outputs is not one network's; empty where it is."""
        flow, own = self.flow, dict.fromkeys((*self.own, *self.weights))
        if self.separate:
            return "its members are separate networks"
        if any(s.random for s in self.sites if isinstance(s, Site)):
            return "its masks are drawn anew at each pass"
        bent = [n for n in own if not is_linear_in_parameters(self.modules[n])]
        if bent:
            return f"members have tensors of their own in {bent[0]!r}"
        layers = {s.layer for s in self.sites if isinstance(s, Site)} | own.keys()
        for layer in layers:
            chained = flow.upstream.get(layer, set()) & layers
            if chained:
                return f"the weights of {sorted(chained)[0]!r} and {layer!r} multiply each other"
        if not flow.outputs:
            return "the data flow after the modulated layers could not be read; pass example_input"
        for trail in flow.outputs:
            bent = sorted((trail.upstream & layers) - trail.affine)
            if bent:
                return f"the output is not linear in the output of {bent[0]!r}"
        return ""

    def _worries(self) -> Iterator[str]:
        """Yield what the user should know of the reference."""
        state = self.flow.state
        if self.flow.guesses and not self.separate:
            yield (
                "the data flow of the reference could not be read in full; guessed: "
                + "; ".join(dict.fromkeys(self.flow.guesses))
                + ". To be sure, pass example_input=x (a batch, or a tuple of arguments)."
            )
        unknown = {} if self.separate else unknown_layers(self.reference)
        if unknown:
            kinds = sorted({type(m).__name__ for m in unknown.values()})
            yield (
                f"members do not differ in {_some(unknown)}: layers of type {', '.join(kinds)} are "
                "not known. Make them known with embens.register_layer(kind, channels), where "
                "channels(layer) returns how many channels a layer takes and gives."
            )
        read = sorted(self.flow.bypassed - self.flow.upstream.keys())
        if read and not self.separate:
            yield (
                f"members do not differ in {_some(read)}: the code reads the weight without "
                "calling the layer. Call it, layer(x), to have members there."
            )
        asking = [n or "the reference" for n, m in self.modules.items() if _compares_types(m)]
        if asking and not self.separate:
            yield (
                f"the forward of {_some(asking)} compares the type of layers, which are wrapped in "
                "an ensemble. Ask isinstance(layer, ...) instead, which holds there."
            )
        left = {p for p in state.left if not is_within(p[0], self.once)}
        for places, text in ((state.kept, _KEPT), (left, _LEFT)):
            if places:
                yield f"the forward assigns {_some(_dotted(places))} and {text}"


_KEPT = (
    "reads what it has kept there, which is not saved with the ensemble. After the first "
    "modulation every member keeps its own, so that members run one after another. Make it a "
    "buffer (register_buffer), or an input and an output."
)
_LEFT = (
    "leaves it for others to read: after a pass it is that of the members that ran last. Return "
    "it from the forward to have it for all members."
)


def _dotted(places: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    return tuple(".".join(place).lstrip(".") for place in sorted(places))


def _some(names: Iterable[str]) -> str:
    """Return the first of some names, for a message."""
    names = [repr(name) for name in names]
    return ", ".join(names[:6]) + (", …" if len(names) > 6 else "")


def _is_checkpointing(word: str) -> bool:
    return word in ("checkpoint", "checkpoint_sequential") or "checkpointing" in word


def _compares_types(module: nn.Module) -> bool:
    code = getattr(type(module).forward, "__code__", None)
    names = code.co_names if code and not type(module).__module__.startswith("torch.") else ()
    return "type" in names and any(isinstance(getattr(nn, name, None), type) for name in names)
