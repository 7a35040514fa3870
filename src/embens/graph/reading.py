"""The data flow of a network: which parameter layers come before which.

Sites are defined by the data flow. A *first* layer has no parameter layer before it, a *last* layer
none after it. :func:`read_flow` traces the network with torch.fx, which needs no input. A part that
cannot be traced is a black box whose layers are taken in the order of their registration, and this
guess is reported. :mod:`embens.graph.watching` follows one real call instead.

The analysis gives every value a :class:`Trail`: the layers that it depends on, those in which it is
affine, and where its channels are.
"""

import copy
import inspect
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves

from embens.graph.captures import explain_copying
from embens.graph.composites import (
    pass_attention,
    pass_black_box,
    pass_recurrent,
    trace_encoder,
    trace_encoder_layer,
)
from embens.graph.misreadings import OutsideGraph, Untraceable
from embens.graph.operations import (
    AFFINE,
    CHANNELWISE,
    FLATTENING,
    RANDOM_FUNCTIONS,
    RANDOM_MODULES,
    SHAPE_QUERIES,
    VIEWS,
    changed_arguments,
    operation_name,
)
from embens.graph.snapshots import unchanged_random_state
from embens.sites import Layer, find_layers, is_elementwise_dropout, is_layer

# Tracing

_TRACING = threading.Lock()
"""torch.fx replaces ``nn.Module.__call__`` for all threads while it traces."""


_PLAIN: tuple[Any, ...] = (int, float, complex, str)
"""Types of constants whose text in a graph is Python code."""


class Tracer(torch.fx.Tracer):
    """A torch.fx tracer with parameter layers, attentions and modules of torch as leaves.

    Args:
        root: The network to trace. Tracing may leave symbolic values in its attributes, so pass a
            copy (:func:`copy_module`).
        arguments: Arguments of ``root.forward`` that stay symbolic.
        constants: Values of its other arguments.
        opaque: Names of modules that become leaves as well.
    """

    proxy_buffer_attributes = True

    def __init__(
        self,
        root: nn.Module,
        arguments: Iterable[str],
        constants: Mapping[str, Any],
        opaque: Iterable[str] = (),
    ):
        super().__init__()
        self.arguments = tuple(arguments)
        self.constants = dict(constants)
        self.opaque = set(opaque)
        self.thread = threading.get_ident()
        self.tensor_names: dict[int, str] = {}
        for name, tensor in (*root.named_parameters(), *root.named_buffers()):
            self.tensor_names.setdefault(id(tensor), name)
        self.parameters_of = {id(module): dict(module._parameters) for module in root.modules()}
        self.open_modules: list[str] = []  # modules whose forward is being traced

    def trace_graph(self, root: nn.Module) -> torch.fx.Graph:
        """Return the graph of a network."""
        with _TRACING, self.checks(root):
            return self.trace(root)

    @contextmanager
    def checks(self, root: nn.Module) -> Iterator[None]:
        """Raise for code that must not be traced; keep the state of random generators."""
        if has_user_code(root):
            with unchanged_random_state(), OutsideGraph(refused=False):
                yield
        else:
            yield

    def create_args_for_root(self, root_fn, is_module, concrete_args=None):
        """Make placeholders of the symbolic arguments and fill in the constants."""
        signature = inspect.signature(root_fn)
        proxies = {name: self.create_proxy("placeholder", name, (), {}) for name in self.arguments}

        def call(root: nn.Module) -> Any:
            bound = signature.bind_partial(root)
            bound.arguments.update(self.constants)
            bound.arguments.update(proxies)
            ordered = {n: bound.arguments[n] for n in signature.parameters if n in bound.arguments}
            bound.arguments = ordered
            return root_fn(*bound.args, **bound.kwargs)

        return call, [self.root]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if is_layer(m) or module_qualified_name in self.opaque or is_elementwise_dropout(m):
            return True
        return super().is_leaf_module(m, module_qualified_name)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        name = self.tensor_names.get(id(attr_val)) if isinstance(attr_val, Tensor) else None
        if name is None or threading.get_ident() != self.thread:
            return attr_val
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy("get_attr", name, (), {})
        return parameter_proxy_cache[name]

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor):
            name = self.tensor_names.get(id(a))
            if name is None:
                raise Untraceable("the code makes tensors that do not depend on its input")
            return self.create_node("get_attr", name, (), {})
        if "numpy" in sys.modules and isinstance(a, sys.modules["numpy"].generic):
            a = a.item()
        # The text of a graph can hold plain numbers only, not those of a class such as IntEnum.
        for kind in _PLAIN:
            if isinstance(a, kind) and type(a) not in (bool, kind):
                a = kind(a)
        return super().create_arg(a)

    def call_module(self, m, forward, args, kwargs):
        if threading.get_ident() != self.thread:
            return forward(*args, **kwargs)
        name = self.path_of_module(m)
        if any(m._parameters.get(key) is not p for key, p in self.parameters_of[id(m)].items()):
            raise Untraceable(f"the code replaces the parameters of {name!r}")
        if name not in self.opaque:
            if type(m) is nn.TransformerEncoder:
                return trace_encoder(m, *args, **kwargs)
            if type(m) is nn.TransformerEncoderLayer:
                return trace_encoder_layer(m, *args, **kwargs)
        self.open_modules.append(name)
        result = super().call_module(m, forward, args, kwargs)
        self.open_modules.pop()
        return result


def has_user_code(root: nn.Module) -> bool:
    """Return whether a network contains classes that are not torch's or embens'."""
    for module in root.modules():
        if not type(module).__module__.startswith(("torch.nn.", "embens.")):
            return True
    return False


def copy_module(module: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Return a deep copy of a module that shares its parameters and buffers.

    Args:
        module: Any module.
        memo: Objects to replace in the copy, by the ``id`` of the original.
    """
    shared: dict[int, Any] = detached_state(module)
    for tensor in (*module.parameters(), *module.buffers()):
        shared[id(tensor)] = tensor
    for part in module.modules():
        for value in vars(part).values():
            # A placeholder of a per-member tensor; torch.export refuses to copy it.
            if isinstance(value, Tensor) and value.is_meta:
                shared[id(value)] = value
    shared.update(memo or {})
    return _deep_copy(module, shared)


def copy_reference(reference: nn.Module) -> nn.Module:
    """Return a deep copy of a network that shares no tensor with it.

    Raises:
        TypeError: Names the attribute that cannot be copied.
    """
    return _deep_copy(reference, detached_state(reference))


def _deep_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    try:
        copied = copy.deepcopy(module, dict(memo))
    except Exception as error:  # classes of the user may raise anything
        explain_copying(module, memo, error)
        raise
    originals = set(map(id, module.modules()))
    for name, part in copied.named_modules():
        if id(part) in originals:
            raise TypeError(
                f"{name or 'the reference'!r} ({type(part).__name__}) returns itself when it is "
                "copied, and members are copies of the reference. Remove its __deepcopy__."
            )
    return copied


def detached_state(module: nn.Module) -> dict[int, Any]:
    """Return a memo for ``copy.deepcopy`` that detaches results kept in attributes.

    torch refuses to copy a tensor that is part of an autograd graph.
    """
    memo: dict[int, Any] = {}
    for part in module.modules():
        for value in tree_leaves(list(vars(part).values())):
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    return memo


# Data flow


@dataclass(frozen=True)
class Trail:
    """What is known of one value in the network.

    Attributes:
        upstream: Names of the layers that it depends on.
        affine: Those among them in whose output it is affine.
        channels: Size of axis 1, where it is known to be the channels of an image.
        flat: Number of channels that were flattened with their positions into one axis.
        weight_of: Layers whose weight it is, for code that reads weights without calling a layer.
        random: Whether it depends on random numbers that are drawn in training mode.
    """

    upstream: frozenset[str] = frozenset()
    affine: frozenset[str] = frozenset()
    channels: int | None = None
    flat: int | None = None
    weight_of: frozenset[str] = frozenset()
    random: bool = False

    def through(
        self,
        upstream: frozenset[str],
        affine: frozenset[str] = frozenset(),
        channels: int | None = None,
        *,
        random: bool = False,
    ) -> "Trail":
        """Return the trail of the output of a module that this value is the input of."""
        return Trail(upstream, affine, channels, random=self.random or random)


@dataclass
class Flow:
    """The data flow of a reference.

    Attributes:
        upstream: For every layer that is used, the names of the layers before it.
        repeat: Number of features per channel of layers that follow a Flatten.
        norms: For every module with buffers that is called, the names of the layers before it.
        random: Names of those modules that see random inputs in training mode.
        outputs: Trails of the outputs; empty if they are unknown.
        guesses: What could not be read, in words.
    """

    upstream: dict[str, set[str]] = field(default_factory=dict)
    repeat: dict[str, int] = field(default_factory=dict)
    norms: dict[str, set[str]] = field(default_factory=dict)
    random: set[str] = field(default_factory=set)
    outputs: list[Trail] = field(default_factory=list)
    guesses: list[str] = field(default_factory=list)

    @property
    def first(self) -> set[str]:
        """Layers with no other parameter layer before them."""
        return {name for name, before in self.upstream.items() if not before - {name}}

    @property
    def last(self) -> set[str]:
        """Layers with no other parameter layer after them."""
        inner: set[str] = set()
        for name, before in self.upstream.items():
            inner |= before - {name}
        return set(self.upstream) - inner


class FlowReader:
    """Builds a :class:`Flow` from operations and module calls, in the order of execution."""

    def __init__(self, root: nn.Module):
        self.root = root
        self.flow = Flow()
        self.layers = find_layers(root)
        self.names: dict[int, str] = {}
        for name, module in root.named_modules():
            self.names[id(module)] = name
        self.owners: dict[int, frozenset[str]] = {}
        for name, layer in self.layers.items():
            module = root.get_submodule(layer.module)
            for parameter in module.parameters():
                owners = self.owners.get(id(parameter), frozenset())
                self.owners[id(parameter)] = owners | {name}

    def read_weight(self, tensor: Tensor) -> Trail:
        """Return the trail of a parameter that the code reads."""
        return Trail(weight_of=self.owners.get(id(tensor), frozenset()))

    def apply_operation(self, name: str, trails: list[Trail], arguments: tuple = ()) -> Trail:
        """Return the trail of the result of a function or method.

        Args:
            name: Its name; underscores around it are ignored.
            trails: Trails of its tensor arguments.
            arguments: All arguments but the first.
        """
        operation = name.strip("_")
        if operation == "getattr" and arguments:
            operation, arguments = str(arguments[0]), arguments[1:]
        if operation in SHAPE_QUERIES:
            return Trail()
        upstream: frozenset[str] = frozenset().union(*(trail.upstream for trail in trails))
        weights: frozenset[str] = frozenset().union(*(trail.weight_of for trail in trails))
        if weights and len(trails) == 1:
            return trails[0]  # a view of a weight is still a weight
        for layer in weights:
            self.flow.upstream.setdefault(layer, set()).update(upstream)
        affine = self._affine_after(operation, trails, arguments, upstream)
        channels, flat = self._channels_after(operation, trails, arguments)
        is_random = operation in RANDOM_FUNCTIONS or any(trail.random for trail in trails)
        return Trail(upstream | weights, affine, channels, flat, random=is_random)

    def _affine_after(
        self, operation: str, trails: list[Trail], arguments: tuple, upstream: frozenset[str]
    ) -> frozenset[str]:
        keeps = operation in AFFINE
        if operation in ("mul", "imul", "rmul"):
            keeps = sum(bool(trail.upstream) for trail in trails) <= 1
        elif operation in ("div", "truediv", "itruediv"):
            keeps = all(isinstance(argument, (int, float)) for argument in arguments)
        if not keeps:
            return frozenset()
        nonlinear = (trail.upstream - trail.affine for trail in trails)
        return upstream.difference(*nonlinear)

    def _channels_after(
        self, operation: str, trails: list[Trail], arguments: tuple
    ) -> tuple[int | None, int | None]:
        """Return the channels of axis 1, and those of a flattened axis, as far as known."""
        informed = [t for t in trails if t.channels is not None or t.flat is not None]
        if operation in CHANNELWISE:
            if len({(t.channels, t.flat) for t in informed}) == 1:
                return informed[0].channels, informed[0].flat
            return None, None
        if operation in FLATTENING and len(informed) == 1 and informed[0] is trails[0]:
            if operation in ("view", "reshape") and len(arguments) != 2:
                return None, None
            if operation in ("flatten", "Flatten") and arguments[:1] not in ((), (1,)):
                return None, None
            trail = informed[0]
            return None, trail.channels if trail.flat is None else trail.flat
        if operation in ("cat", "concat") and arguments[:1] == (1,):
            sizes = [t.channels for t in trails if t.channels is not None]
            if len(sizes) == len(trails):
                return sum(sizes), None
        return None, None

    def apply_module(
        self, module: nn.Module, name: str, trails: list[Trail], *, positions: bool = False
    ) -> Trail:
        """Return the trail of the output of a module that is not looked into.

        Args:
            module: The module.
            name: Its name in the network.
            trails: Trails of its inputs.
            positions: Whether inputs have axes between the rows and the features.
        """
        arguments = (module.start_dim,) if isinstance(module, nn.Flatten) else ()
        joint = self.apply_operation(type(module).__name__, trails, arguments)
        if isinstance(module, nn.MultiheadAttention):
            return pass_attention(self.flow, name, trails, joint)
        if name in self.layers:
            inputs = trails[0] if len(trails) == 1 else joint
            if isinstance(module, nn.RNNBase):
                return pass_recurrent(self, name, module, inputs)
            return self._apply_layer(self.layers[name], inputs, positions=positions)
        if isinstance(module, RANDOM_MODULES):
            return replace(joint, random=joint.random or getattr(module, "p", 1.0) > 0)
        if not any(is_layer(part) for part in module.modules()):
            if any(True for _ in module.buffers()):
                self.note_buffers(name, joint)
            return joint
        return pass_black_box(self, module, name, joint)

    def _apply_layer(self, layer: Layer, inputs: Trail, *, positions: bool = False) -> Trail:
        self.flow.upstream.setdefault(layer.name, set()).update(inputs.upstream)
        module = self.root.get_submodule(layer.module)
        spatial = isinstance(module, _ConvNd)
        if layer.inputs and not spatial:
            self._note_channels(layer, inputs, positions)
        affine = inputs.affine | {layer.name}
        channels = layer.outputs if spatial else None
        return inputs.through(inputs.upstream | {layer.name}, affine, channels)

    def _note_channels(self, layer: Layer, inputs: Trail, positions: bool) -> None:
        """Find out how many features of a Linear layer belong to one channel before a Flatten."""
        assert layer.inputs is not None
        if inputs.flat and layer.inputs % inputs.flat == 0:
            repeat = layer.inputs // inputs.flat
            if self.flow.repeat.setdefault(layer.name, repeat) != repeat:
                self.flow.repeat[layer.name] = 1
            return
        if positions or inputs.flat or inputs.channels:
            return
        earlier: set[str] = set()
        for name in inputs.upstream:
            earlier |= self.flow.upstream.get(name, set()) - {name}
        nearest = [self.layers[name] for name in inputs.upstream - earlier if name in self.layers]
        modules = [self.root.get_submodule(near.module) for near in nearest]
        follows_images = bool(nearest) and all(isinstance(m, _ConvNd) for m in modules)
        if follows_images and all(near.outputs != layer.inputs for near in nearest):
            self.flow.guesses.append(
                f"how the {layer.inputs} input features of {layer.name!r} make channels"
            )

    def note_buffers(self, name: str, inputs: Trail) -> None:
        self.flow.norms.setdefault(name, set()).update(inputs.upstream)
        if inputs.random:
            self.flow.random.add(name)


def read_graph(root: nn.Module, graph: torch.fx.Graph) -> Flow:
    """Return the data flow of a traced network."""
    reader = FlowReader(root)
    trails: dict[torch.fx.Node, Trail] = {}
    for node in graph.nodes:
        sources = [trails[source] for source in _input_nodes(node)]
        if node.op == "call_module":
            module = root.get_submodule(node.target)
            name = reader.names[id(module)]
            trails[node] = reader.apply_module(module, name, sources)
        elif node.op in ("call_function", "call_method"):
            name = operation_name(node.target)
            arguments = tuple(node.args[1:]) + tuple(node.kwargs.values())
            trails[node] = reader.apply_operation(name, sources, arguments)
            for target in changed_arguments(name, node.args, node.kwargs):
                _overwrite(target, trails[node], trails)
        elif node.op == "get_attr":
            trails[node] = reader.read_weight(_get_tensor(root, node.target))
        elif node.op == "output":
            reader.flow.outputs = sources
        else:
            trails[node] = Trail()
    return reader.flow


def _input_nodes(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the inputs of a node in order; ``h * h`` has one input twice."""
    inputs: list[torch.fx.Node] = []
    torch.fx.map_arg((node.args, node.kwargs), inputs.append)
    return inputs


def _get_tensor(root: nn.Module, target: str) -> Tensor:
    owner, _, name = target.rpartition(".")
    return getattr(root.get_submodule(owner), name)


def _overwrite(target: Any, trail: Trail, trails: dict[torch.fx.Node, Trail]) -> None:
    """Give a value that was changed in place, and whatever it is a view of, its new trail."""
    while isinstance(target, torch.fx.Node):
        old = trails[target]
        trails[target] = replace(old, upstream=old.upstream | trail.upstream, affine=frozenset())
        is_view = target.op != "placeholder" and operation_name(target.target) in VIEWS
        target = target.args[0] if is_view and target.args else None


def read_flow(reference: nn.Module) -> Flow:
    """Read the data flow of a network by tracing its code.

    Args:
        reference: Any module. A part that cannot be traced is taken in the order of registration.

    Returns:
        The flow. ``guesses`` lists what could not be read.
    """
    if not is_layer(reference):
        flow = _trace_flow(reference)
        if flow is not None:
            return flow
    reader = FlowReader(reference)
    reader.apply_module(reference, "", [Trail()])
    return reader.flow


def _trace_flow(reference: nn.Module) -> Flow | None:
    """Trace a network in training mode; modules whose code cannot be traced are opaque.

    Returns:
        The flow, or None if the outermost ``forward`` cannot be traced.
    """
    parameters = inspect.signature(reference.forward).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty]
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return None
    constants = {p.name: p.default for p in parameters if p.default is not p.empty}
    opaque: set[str] = set()
    while True:
        # Parametrizations run while the code is traced, and some update their buffers.
        buffers = {id(buffer): buffer.detach().clone() for buffer in reference.buffers()}
        root = copy_module(reference, buffers).train()
        tracer = Tracer(root, required, constants, opaque)
        try:
            graph = tracer.trace_graph(root)
        except Exception:  # the user's code may raise anything on symbolic values
            if not tracer.open_modules or tracer.open_modules[-1] in opaque:
                return None
            opaque.add(tracer.open_modules[-1])
            continue
        return read_graph(root, graph)
