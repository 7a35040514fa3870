"""What is known of a network's data flow, and how it is put together from what a reader sees.

A :class:`Trail` is what is known of a value: the layers upstream of it, its channels, and in which
layers' outputs it is still affine. A :class:`Flow` is the result for the whole network.
"""

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves

from embens.reading.attention import PROJECTIONS, Attention
from embens.reading.layers import NORMS, channels, is_layer, parameter_layers
from embens.reading.samples import (
    ALONG_AXES,
    CHANNELWISE_MODULES,
    ELEMENTWISE,
    POOLING,
    is_row_by_row,
    module_is_row_by_row,
)
from embens.reading.state import State, find_state

RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)

# Operations by name. "Channelwise" ones keep axis 1 as the channels; "affine" ones keep a value
# affine in whatever it was affine in. A name in neither set makes nothing of a value known.
_CHANNELWISE = {*ELEMENTWISE, *POOLING, *CHANNELWISE_MODULES} | set(
    "prelu lp_pool1d lp_pool2d batch_norm group_norm instance_norm local_response_norm "
    "interpolate upsample pad".split()
)
_AFFINE = frozenset(
    "add sub iadd isub radd rsub neg flatten view reshape squeeze unsqueeze permute transpose "
    "movedim swapaxes getitem mean sum cat concat stack contiguous clone to float double type_as "
    "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d "
    "dropout expand chunk split unbind select narrow Identity Flatten Unflatten AvgPool1d "
    "AvgPool2d AvgPool3d AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d Dropout "
    "PixelShuffle pixel_shuffle Upsample unflatten".split()
)
_FLATTENING = frozenset("flatten Flatten view reshape mean amax squeeze".split())
_SHAPE = frozenset("shape size dim ndim numel len dtype device".split())
_RANDOM_FUNCTIONS = frozenset(
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout rrelu bernoulli "
    "rand_like randn_like gumbel_softmax rand randn normal uniform multinomial".split()
)


def mentions(module: nn.Module, found: Callable[[str], bool]) -> bool:
    """Return whether the code of any module of the user's refers to a name with some property."""
    for cls in {c for m in module.modules() for c in type(m).__mro__}:
        if cls.__module__.startswith("torch.nn."):
            continue
        for value in vars(cls).values():
            code = getattr(value, "__code__", None)
            if code and any(map(found, code.co_names + code.co_freevars)):
                return True
    return False


@dataclass(frozen=True)
class Trail:
    """What is known of one value in the network."""

    upstream: frozenset[str] = frozenset()  # the layers (and random modules) that it depends on
    affine: frozenset[str] = frozenset()  # those among them in whose output it is affine
    channels: int | None = None  # the size of axis 1, where it is known to be channels of an image
    flat: int | None = None  # the channels, where they were flattened with positions into one axis
    producer: int | None = None  # the index of the module call whose very output it is
    rows: str = ""
    """What its first axis is made of: "" (a constant), "input" (inputs of the network, by functions
    alone), "result" (a module's output), or "size" (a number that was read off a shape)."""


@dataclass
class Call:
    """One call of one module: what its inputs and its output depend on, and who uses the output."""

    name: str
    upstream: frozenset[str]
    visible: bool = True  # whether any value was seen among the inputs
    parents: frozenset[int] = frozenset()  # the calls whose very outputs are inputs
    aliases: bool = False  # an output is an input, so which of them is used later can't be told
    result: frozenset[str] = frozenset()
    loose: frozenset[str] = frozenset()  # the rows of inputs that are no module's very output
    inside: tuple[int, ...] = ()  # the calls around it, outermost first
    leaf: bool = False  # it is not looked into
    consumers: set[tuple[int, ...]] = field(default_factory=set)
    """The chains of calls, outermost first, inside which the output is used."""


@dataclass(frozen=True)
class Step:
    """One operation of the code, or one module that is not looked into."""

    name: str  # of the function, or of the module's class
    around: tuple[str, ...] = ()  # the modules inside which it is, outermost first
    clear: bool = True  # whether it is known to keep samples to themselves
    joins: bool = False  # whether it takes several values
    rows: frozenset[str] = frozenset()  # those of the values that it takes
    before: frozenset[frozenset[str]] = frozenset()  # the layers before those made of inputs

    @property
    def operation(self) -> str:
        """Its name without underscores."""
        return self.name.strip("_")

    @property
    def reduces(self) -> bool:
        """Whether its result has fewer axes."""
        return self.operation in ALONG_AXES


@dataclass
class Flow:
    """The data flow of a reference network."""

    upstream: dict[str, set[str]] = field(default_factory=dict)  # the layers before each layer
    repeat: dict[str, int] = field(default_factory=dict)  # features of a channel, after a Flatten
    calls: list[Call] = field(default_factory=list)  # in order; none where code was not read
    outputs: list[Trail] = field(default_factory=list)  # empty where unknown
    steps: set[Step] = field(default_factory=set)
    opaque: set[str] = field(default_factory=set)  # modules whose code could not be read
    bypassed: set[str] = field(default_factory=set)  # layers whose weight the code reads uncalled
    guesses: list[str] = field(default_factory=list)  # what had to be guessed, in words
    state: State = field(default_factory=State)  # what the code keeps from call to call

    @property
    def first(self) -> set[str]:
        """The layers with no other parameter layer before them."""
        return {name for name, before in self.upstream.items() if not before - {name}}

    @property
    def last(self) -> set[str]:
        """The layers with no other parameter layer after them."""
        inner = {b for name, before in self.upstream.items() for b in before if b != name}
        return set(self.upstream) - inner


class Reader:
    """Builds a :class:`Flow` from the operations and module calls that one of the readers sees."""

    def __init__(self, root: nn.Module):
        self.root = root
        self.names: dict[int, str] = {id(m): n for n, m in reversed(list(root.named_modules()))}
        self.layers = parameter_layers(root)
        self.layer_names = {id(layer): name for name, layer in reversed(self.layers.items())}
        self.channels = {name: channels(layer) for name, layer in self.layers.items()}
        self.flow = Flow(state=find_state(root))
        self.stateful = {name for name, _ in self.flow.state.buffers | self.flow.state.kept}
        self.stack: list[int] = []
        self.weights = {id(p): n for n, layer in self.layers.items() for p in layer.parameters()}

    @property
    def around(self) -> tuple[str, ...]:
        """The modules whose code is running, outermost first."""
        return tuple(self.flow.calls[index].name for index in self.stack)

    def note(self, name: str, *, clear: bool) -> None:
        """Record something that the code does, without the values that it takes."""
        self.flow.steps.add(Step(name, self.around, clear))

    def combine(
        self, name: str, trails: list[Trail], arguments: tuple = (), *, clear: bool | None = None
    ) -> Trail:
        """Return the trail of an operation's result.

        Whether it keeps samples to themselves is told from its name where that is not said.
        """
        self.use(trails)
        operation, kinds = name.strip("_"), frozenset(t.rows for t in trails if t.rows)
        if operation in _SHAPE or (operation == "getattr" and arguments[0] in _SHAPE):
            self.note(name, clear=True)
            return Trail(rows="size" if kinds else "")
        if clear is None:
            doubtful = "size" in kinds or len({t.rows for t in trails}) > 1  # constants have rows
            clear = not kinds or (not doubtful and is_row_by_row(operation, arguments))
        data = (t.upstream for t in trails if t.rows in ("input", "result"))
        before = frozenset(frozenset(self._only_layers(upstream)) for upstream in data)
        self.flow.steps.add(Step(name, self.around, clear, len(trails) > 1, kinds, before))
        rows = next((kind for kind in ("result", "input", "size") if kind in kinds), "")
        upstream = frozenset().union(*(t.upstream for t in trails))
        if operation in _RANDOM_FUNCTIONS:
            upstream |= {"random"}
        keeps = operation in _AFFINE
        if operation in ("mul", "imul", "rmul"):
            keeps = sum(bool(t.upstream) for t in trails) <= 1
        elif operation in ("div", "truediv", "itruediv"):
            keeps = all(isinstance(a, (int, float)) for a in arguments)
        bent = [t.upstream - t.affine for t in trails]
        affine = upstream.difference(*bent) if keeps else frozenset()
        channels = flat = None
        known = [t for t in trails if t.channels is not None or t.flat is not None]
        if operation in _CHANNELWISE:
            if len({(t.channels, t.flat) for t in known}) == 1:
                channels, flat = known[0].channels, known[0].flat
        elif operation in _FLATTENING and len(known) == 1 and known[0] is trails[0]:
            flat = known[0].channels if known[0].flat is None else known[0].flat
            if operation in ("view", "reshape") and len(arguments) != 2:
                flat = None
            if operation in ("flatten", "Flatten") and arguments[:1] not in ((), (1,)):
                flat = None
        elif operation in ("cat", "concat") and arguments[:1] == (1,):
            sizes = [t.channels for t in trails if t.channels is not None]
            channels = sum(sizes) if len(sizes) == len(trails) else None
        return Trail(upstream, affine, channels, flat, rows=rows)

    def enter(self, name: str, trails: list[Trail], *, leaf: bool) -> int:
        """Record that a module is called on values with these trails; return the call's index."""
        index = len(self.flow.calls)
        upstream = frozenset().union(*(t.upstream for t in trails))
        parents = frozenset(t.producer for t in trails if t.producer is not None)
        loose = frozenset(t.rows for t in trails if t.producer is None) - {""}
        place = {"loose": loose, "inside": tuple(self.stack), "leaf": leaf}
        self.flow.calls.append(Call(name, upstream, bool(trails), parents, **place))
        self.stack.append(index)
        if leaf:
            self.use(trails)
        return index

    def leave(self, index: int, trails: list[Trail]) -> list[Trail]:
        """Close a call whose outputs have these trails; return the trails with their producer."""
        self.stack.pop()
        call, mine = self.flow.calls[index], frozenset()
        if call.name in self.stateful:
            mine = frozenset({call.name})
        for trail in trails:
            call.result |= trail.upstream | mine
        return [
            replace(t, upstream=t.upstream | mine, producer=index, rows=t.rows and "result")
            for t in trails
        ]

    def use(self, trails: list[Trail]) -> None:
        """Record that the code of the innermost open call uses these values."""
        for trail in trails:
            if trail.producer is not None:
                self.flow.calls[trail.producer].consumers.add(tuple(self.stack))

    def _pass_layer(self, name: str, inputs: Trail, *, positions: bool = False) -> Trail:
        layer = self.layers[name]
        self.flow.upstream.setdefault(name, set()).update(self._only_layers(inputs.upstream))
        takes, gives = self.channels[name]
        spatial = isinstance(layer, _ConvNd)
        if takes and not spatial and inputs.flat and takes % inputs.flat == 0:
            repeat = takes // inputs.flat
            if self.flow.repeat.setdefault(name, repeat) != repeat:
                self.flow.repeat[name] = 1
        elif takes and not (spatial or positions or inputs.flat or inputs.channels):
            before = self._only_layers(inputs.upstream)
            further = {b for n in before for b in self.flow.upstream.get(n, ()) if b != n}
            near = [self.layers[n] for n in before - further]
            if near and all(isinstance(n, _ConvNd) and n.out_channels != takes for n in near):
                guess = f"how the {takes} input features of {name!r} make channels"
                self.flow.guesses.append(guess)
        affine = frozenset() if isinstance(layer, nn.RNNBase) else inputs.affine
        channels = gives if spatial else None
        rows = inputs.rows and "result"
        return Trail(inputs.upstream | {name}, affine | {name}, channels, rows=rows)

    def _only_layers(self, names: frozenset[str]) -> set[str]:
        return {n for n in names if n in self.layers}

    def pass_leaf(
        self, module: nn.Module, name: str, trails: list[Trail], *, positions: bool = False
    ) -> Trail:
        """Return the trail of the output of a module that is not looked into.

        With ``positions`` between rows and features, the features are no flattened channels.
        """
        options = (module.start_dim,) if isinstance(module, nn.Flatten) else ()
        recurrent = isinstance(module, nn.RNNBase)  # its states have rows on another axis
        known = module_is_row_by_row(module) or (is_layer(module) and not recurrent)
        clear = known and bool(trails) and all(t.rows in ("input", "result") for t in trails)
        joint = self.combine(type(module).__name__, trails, options, clear=clear)
        joint = replace(joint, rows=joint.rows and "result")
        if is_layer(module) and len(trails) == 1:
            joint = trails[0]
        if isinstance(module, Attention):
            *inner, out = (f"{name}.{projection}".lstrip(".") for projection in PROJECTIONS)
            for projection, trail in zip(inner, trails * 3, strict=False):
                self._pass_layer(projection, trail)
            return self._pass_layer(out, Trail(joint.upstream.union(inner), rows=joint.rows))
        if is_layer(module):
            name = self.layer_names.get(id(module), name)
            return self._pass_layer(name, joint, positions=positions)
        if isinstance(module, RANDOM):
            return replace(joint, upstream=joint.upstream | {f"random:{name}"})
        if isinstance(module, NORMS):
            return replace(joint, upstream=joint.upstream | {name})
        return self._pass_black_box(module, name, joint)

    def _pass_black_box(self, module: nn.Module, name: str, trail: Trail) -> Trail:
        """Take the layers inside a module in the order of registration."""
        attentions = [m for m in module.modules() if isinstance(m, Attention)]
        projections = {id(part) for m in attentions for part in m.children()}
        layers = [m for m in module.modules() if is_layer(m) or isinstance(m, Attention)]
        inside = [m for m in layers if id(m) not in projections]
        if len(inside) > 1 and not type(module).__module__.startswith("torch.nn"):
            self.flow.guesses.append(f"the order of the layers inside {name or 'the reference'!r}")
        drawing = {n for n, m in module.named_modules() if isinstance(m, RANDOM)}
        if mentions(module, lambda word: word.strip("_") in _RANDOM_FUNCTIONS):
            drawing.add("")
        randoms = {"random:" + f"{name}.{n}".strip(".") for n in drawing}
        if inside:
            trail = Trail(trail.upstream, rows=trail.rows)
        for part in inside:
            trail = self.pass_leaf(part, self.names[id(part)], [trail])
            trail = replace(trail, affine=frozenset(), channels=None)
        return replace(trail, upstream=trail.upstream | randoms)


def copy_structure(module: nn.Module, replaced: Mapping[int, Any] | None = None) -> nn.Module:
    """Return a deep copy that shares the parameters (so it costs no memory) but nothing else.

    Some objects are ``replaced``, by their id.
    """
    memo = {id(p): p for p in module.parameters()}
    return copy.deepcopy(module, {**left_over(module), **memo, **(replaced or {})})


def opened(root: nn.Module) -> nn.Module:
    """Return a module whose attentions call their projections; parameters are not copied."""
    found = [m for m in root.modules() if isinstance(m, nn.MultiheadAttention)]
    found = [m for m in found if not isinstance(m, Attention)]
    if not found:
        return root
    held = Counter(id(p) for m in root.modules() for p in m._parameters.values())
    if any(held[id(p)] > 1 for m in found for p in m._parameters.values() if p is not None):
        raise ValueError(
            "two attentions of the reference have tied projections, which would be taken apart; "
            "call one and the same module twice"
        )
    root = copy_structure(root, {id(m): Attention(m) for m in found})
    for module in root.modules():
        if isinstance(module, nn.TransformerEncoder):  # else it looks for weights to go past them
            module.use_nested_tensor = False
    return root


def left_over(root: nn.Module) -> dict[int, Any]:
    """Return a memo for a deep copy in which results that modules have kept leave their graph."""
    values = (v for m in root.modules() for v in tree_leaves(vars(m)) if isinstance(v, Tensor))
    return {id(v): v.detach().clone() for v in values if not v.is_leaf}
