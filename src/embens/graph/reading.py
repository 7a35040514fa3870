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
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from embens.sites import Layer, find_layers, is_layer

RANDOM_MODULES = (
    nn.modules.dropout._DropoutNd,
    nn.RReLU,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
)
ELEMENTWISE = frozenset(
    "relu leaky_relu elu selu celu gelu silu mish softplus hardtanh hardswish hardsigmoid relu6 "
    "tanh sigmoid logsigmoid abs erf sin cos exp log sqrt rsqrt square pow clamp clamp_min "
    "clamp_max softsign tanhshrink dropout dropout1d dropout2d dropout3d alpha_dropout "
    "feature_alpha_dropout add sub mul div truediv iadd isub imul itruediv radd rsub rmul neg "
    "contiguous clone to float double half bfloat16 type_as detach".split()
)
POOLING = frozenset(
    "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d "
    "adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d "
    "adaptive_max_pool3d boolean_dispatch".split()
)
# Operations and modules that keep axis 1 as the axis of channels.
CHANNELWISE = (
    ELEMENTWISE
    | POOLING
    | frozenset(name for name in nn.modules.activation.__all__ if name != "MultiheadAttention")
    | frozenset(
        (
            *nn.modules.batchnorm.__all__,
            *nn.modules.instancenorm.__all__,
            *nn.modules.dropout.__all__,
            *nn.modules.pooling.__all__,
            *nn.modules.padding.__all__,
            *nn.modules.upsampling.__all__,
            *("GroupNorm", "LocalResponseNorm", "Identity"),
        )
    )
    | frozenset(
        "prelu lp_pool1d lp_pool2d batch_norm group_norm instance_norm local_response_norm "
        "interpolate upsample pad".split()
    )
)
# Operations whose result is affine in whatever their argument was affine in.
AFFINE = frozenset(
    "add sub iadd isub radd rsub neg flatten view reshape squeeze unsqueeze permute transpose "
    "movedim swapaxes getitem mean sum cat concat stack contiguous clone to float double type_as "
    "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d "
    "dropout expand chunk split unbind select narrow Identity Flatten Unflatten AvgPool1d "
    "AvgPool2d AvgPool3d AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d Dropout "
    "PixelShuffle pixel_shuffle Upsample unflatten".split()
)
FLATTENING = frozenset("flatten Flatten view reshape mean amax squeeze".split())
SHAPE_QUERIES = frozenset("shape size dim ndim numel len dtype device".split())
TENSOR_QUERIES = frozenset(
    "requires_grad is_cuda is_meta layout is_sparse is_leaf is_floating_point is_complex "
    "names __len__ __hash__".split()
)
RANDOM_FUNCTIONS = frozenset(
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout rrelu bernoulli "
    "rand_like randn_like gumbel_softmax rand randn normal uniform multinomial".split()
)
VIEWS = frozenset(
    "getitem view view_as reshape flatten unflatten squeeze unsqueeze permute transpose t movedim "
    "swapaxes chunk split unbind select narrow expand expand_as detach contiguous getattr".split()
)

_TRACING = threading.Lock()
"""torch.fx replaces ``nn.Module.__call__`` for all threads while it traces."""


# Tracing


class Untraceable(Exception):
    """A network cannot be traced into a graph that is right for every call."""


class Tracer(torch.fx.Tracer):
    """A torch.fx tracer whose leaves are parameter layers, attentions and torch's own modules.

    Args:
        root: the network to trace. Tracing may leave symbolic values in its attributes, so pass a
            copy (:func:`copy_module`).
        arguments: arguments of ``root.forward`` that stay symbolic.
        constants: values of its other arguments.
        opaque: names of modules that become leaves as well.
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

    def trace_graph(self, root: nn.Module, *, exact: bool = False) -> torch.fx.Graph:
        """Return the graph of a network.

        Args:
            root: the network.
            exact: whether the graph has to give the results of the code at every later call, so
                that code which computes with tensors outside of the graph is refused.
        """
        self.saving_hooks = _saving_hooks() if exact else None
        self.exact = exact
        with _TRACING, _OutsideGraph(refused=exact):
            return self.trace(root)

    def create_node(self, *args: Any, **kwargs: Any) -> torch.fx.Node:
        if self.exact and _saving_hooks() != self.saving_hooks:
            raise Untraceable("the code recomputes or moves its activations")
        return super().create_node(*args, **kwargs)

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
        if is_layer(m) or module_qualified_name in self.opaque:
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
        return super().create_arg(a)

    def call_module(self, m, forward, args, kwargs):
        if threading.get_ident() != self.thread:
            return forward(*args, **kwargs)
        name = self.path_of_module(m)
        if any(m._parameters.get(key) is not p for key, p in self.parameters_of[id(m)].items()):
            raise Untraceable(f"the code replaces the parameters of {name!r}")
        if name not in self.opaque:
            if type(m) is nn.TransformerEncoder:
                return _trace_encoder(m, *args, **kwargs)
            if type(m) is nn.TransformerEncoderLayer:
                return _trace_encoder_layer(m, *args, **kwargs)
        self.open_modules.append(name)
        result = super().call_module(m, forward, args, kwargs)
        self.open_modules.pop()
        return result


def _saving_hooks() -> Any:
    """Return the hooks that torch.utils.checkpoint and save_on_cpu set, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


class _OutsideGraph(TorchFunctionMode):
    """Sees computations with real tensors while a network is traced.

    Their results are constants of the graph. Such code looks at values, draws random numbers,
    updates parameters, or recomputes activations (``torch.utils.checkpoint``).

    Args:
        refused: whether they are refused; otherwise only changes in place are, as a traced copy
            shares its parameters with the reference.
    """

    def __init__(self, *, refused: bool):
        super().__init__()
        self.refused = refused

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        is_symbolic = any(isinstance(leaf, torch.fx.Proxy) for leaf in leaves)
        owner = getattr(func, "__self__", None)  # for a property of a tensor
        name = getattr(owner, "__name__", None) or getattr(func, "__name__", "")
        is_query = name in SHAPE_QUERIES or name in TENSOR_QUERIES
        if is_symbolic or is_query or not (self.refused or is_in_place(name)):
            return func(*args, **kwargs)
        raise Untraceable(f"the code computes with tensors that are not inputs ({name!r})")


def _trace_encoder(
    encoder: nn.TransformerEncoder,
    src: Any,
    mask: Any = None,
    src_key_padding_mask: Any = None,
    is_causal: bool | None = None,
) -> Any:
    """Do what ``nn.TransformerEncoder`` does, without its checks of concrete values."""
    for layer in encoder.layers:
        src = layer(src, src_mask=mask, src_key_padding_mask=src_key_padding_mask)
    if encoder.norm is not None:
        src = encoder.norm(src)
    return src


def _trace_encoder_layer(
    layer: nn.TransformerEncoderLayer,
    src: Any,
    src_mask: Any = None,
    src_key_padding_mask: Any = None,
    is_causal: bool = False,
) -> Any:
    """Do what ``nn.TransformerEncoderLayer`` does, without its fused kernel."""

    def attend(x: Any) -> Any:
        x, _ = layer.self_attn(
            x,
            x,
            x,
            attn_mask=src_mask,
            key_padding_mask=src_key_padding_mask,
            need_weights=False,
        )
        return layer.dropout1(x)

    def feed_forward(x: Any) -> Any:
        x = layer.linear2(layer.dropout(layer.activation(layer.linear1(x))))
        return layer.dropout2(x)

    if layer.norm_first:
        src = src + attend(layer.norm1(src))
        return src + feed_forward(layer.norm2(src))
    src = layer.norm1(src + attend(src))
    return layer.norm2(src + feed_forward(src))


def copy_module(module: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Return a deep copy of a module that shares its parameters and buffers.

    Args:
        module: any module.
        memo: objects to replace in the copy, by the ``id`` of the original.
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
    return copy.deepcopy(module, shared)


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
        upstream: names of the layers that it depends on.
        affine: those among them in whose output it is affine.
        channels: size of axis 1, where it is known to be the channels of an image.
        flat: number of channels that were flattened with their positions into one axis.
        weight_of: layers whose weight it is, for code that reads weights without calling a layer.
        random: whether it depends on random numbers that are drawn in training mode.
    """

    upstream: frozenset[str] = frozenset()
    affine: frozenset[str] = frozenset()
    channels: int | None = None
    flat: int | None = None
    weight_of: frozenset[str] = frozenset()
    random: bool = False


@dataclass
class Flow:
    """The data flow of a reference.

    Attributes:
        upstream: for every layer that is used, the names of the layers before it.
        repeat: number of features per channel of layers that follow a Flatten.
        norms: for every module with buffers that is called, the names of the layers before it.
        random: names of those modules that see random inputs in training mode.
        outputs: trails of the outputs; empty if they are unknown.
        guesses: what could not be read, in words.
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
            name: its name; underscores around it are ignored.
            trails: trails of its tensor arguments.
            arguments: all arguments but the first.
        """
        operation = name.strip("_")
        is_attribute_query = (
            operation == "getattr" and arguments[:1] and arguments[0] in SHAPE_QUERIES
        )
        if operation in SHAPE_QUERIES or is_attribute_query:
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
            module: the module.
            name: its name in the network.
            trails: trails of its inputs.
            positions: whether inputs have axes between the rows and the features.
        """
        arguments = (module.start_dim,) if isinstance(module, nn.Flatten) else ()
        joint = self.apply_operation(type(module).__name__, trails, arguments)
        if isinstance(module, nn.MultiheadAttention):
            return self._apply_attention(name, trails, joint)
        if name in self.layers:
            inputs = trails[0] if len(trails) == 1 else joint
            return self._apply_layer(self.layers[name], inputs, positions=positions)
        if isinstance(module, RANDOM_MODULES):
            return replace(joint, random=joint.random or getattr(module, "p", 1.0) > 0)
        if not any(is_layer(part) for part in module.modules()):
            if any(True for _ in module.buffers()):
                self._note_buffers(name, joint)
            return joint
        return self._apply_black_box(module, name, joint)

    def _apply_layer(self, layer: Layer, inputs: Trail, *, positions: bool = False) -> Trail:
        self.flow.upstream.setdefault(layer.name, set()).update(inputs.upstream)
        module = self.root.get_submodule(layer.module)
        spatial = isinstance(module, _ConvNd)
        if layer.inputs and not spatial:
            self._note_channels(layer, inputs, positions)
        recurrent = isinstance(module, nn.RNNBase)
        affine = frozenset() if recurrent else inputs.affine | {layer.name}
        channels = layer.outputs if spatial else None
        upstream = inputs.upstream | {layer.name}
        return Trail(upstream, affine, channels, random=inputs.random)

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

    def _apply_attention(self, name: str, trails: list[Trail], joint: Trail) -> Trail:
        projections = [f"{name}.{part}".lstrip(".") for part in ("q_proj", "k_proj", "v_proj")]
        sources = trails[:3] if len(trails) >= 3 else (trails * 3)[:3]
        for projection, source in zip(projections, sources, strict=False):
            self.flow.upstream.setdefault(projection, set()).update(source.upstream)
        out = f"{name}.out_proj".lstrip(".")
        before = joint.upstream.union(projections)
        self.flow.upstream.setdefault(out, set()).update(before)
        return Trail(before | {out}, frozenset({out}), random=joint.random)

    def _apply_black_box(self, module: nn.Module, name: str, trail: Trail) -> Trail:
        """Take the layers inside a module in the order of registration."""
        parts = []
        inside_attention: set[int] = set()
        for part in module.modules():
            if isinstance(part, nn.MultiheadAttention):
                inside_attention |= {id(child) for child in part.children()}
            if is_layer(part) and id(part) not in inside_attention:
                parts.append(part)
        if len(parts) > 1 and not type(module).__module__.startswith("torch.nn"):
            self.flow.guesses.append(f"the order of the layers inside {name or 'the reference'!r}")
        draws = any(isinstance(part, RANDOM_MODULES) for part in module.modules())
        trail = Trail(trail.upstream, random=trail.random or draws)
        for part in parts:
            trail = self.apply_module(part, self.names[id(part)], [trail])
            trail = replace(trail, affine=frozenset(), channels=None)
        for part_name, part in module.named_modules():
            if not is_layer(part) and any(True for _ in part.buffers(recurse=False)):
                full_name = f"{name}.{part_name}".strip(".")
                self._note_buffers(full_name, trail)
        return trail

    def _note_buffers(self, name: str, inputs: Trail) -> None:
        self.flow.norms.setdefault(name, set()).update(inputs.upstream)
        if inputs.random:
            self.flow.random.add(name)


def is_in_place(operation: str) -> bool:
    """Return whether an operation of this name changes its first argument."""
    if operation.strip("_") in ("iadd", "isub", "imul", "itruediv", "setitem", "ipow"):
        return True
    return operation.endswith("_") and not operation.startswith("__")


def operation_name(target: Any) -> str:
    """Return the name of the target of a torch.fx node."""
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


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
            if is_in_place(name) or node.kwargs.get("inplace"):
                _overwrite(node.args[0], trails[node], trails)
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
        reference: any module. A part that cannot be traced is taken in the order of registration.

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
