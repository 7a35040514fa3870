r"""The folded form of a network: several members as one larger batch.

A traced reference consists of operations on values whose first axis is the batch. If every
operation treats the rows of that axis independently (:mod:`embens.graph.rowwise`), the rows of
several members can be concatenated: members are consecutive blocks of rows, and a modulation
multiplies each block by the member's values.

:func:`fold` writes two graphs. The *prefix* computes everything before the first modulation, once
for all members, except a thin first convolution (:data:`THIN_CONVOLUTION`). The *suffix* computes
the rest for a chunk of members. Weights of the reference and values of the members are inputs of
the graphs, so the graphs have no state.
"""

import keyword
import math
import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.fx
from torch import nn
from torch.fx.node import map_arg
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves

from embens import networks
from embens.graph.convolutions import (
    convolution_options,
    member_convolution,
    modulated_convolution,
)
from embens.graph.domains import Domain, Unfoldable, Value
from embens.graph.functions import check_in_place, write_operation
from embens.graph.members import (
    Folded,
    low_rank_linear,
    low_rank_weights,
    member_embedding,
    member_linear,
    modulated_linear,
    repeat_rows,
    scale_members,
    unfold_members,
)
from embens.graph.norms import write_batch_norm, write_layer_norm
from embens.graph.operations import (
    DTYPE_QUERIES,
    RANDOM_MODULES,
    is_in_place,
    operation_name,
)
from embens.graph.reading import Tracer, copy_module, has_user_code
from embens.graph.snapshots import HOOKS
from embens.graph.tracing import StrictTracer
from embens.sites import Layer, Site, is_elementwise_dropout, is_layer
from embens.spec import EnsembleSpec

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    networks.Conv2d,
)
POOLING = frozenset(nn.modules.pooling.__all__) - {"MaxUnpool1d", "MaxUnpool2d", "MaxUnpool3d"}
PADDING = frozenset(nn.modules.padding.__all__)
# Modules that work along the axes after the first, for inputs of at least two axes.
ACTIVATIONS = frozenset(nn.modules.activation.__all__) - {"MultiheadAttention"}
FEATUREWISE = ACTIVATIONS | frozenset(
    "Identity LayerNorm RMSNorm GroupNorm LocalResponseNorm Dropout".split()
)
# Modules that need an axis of channels and positions after the batch.
IMAGE_MODULES = frozenset(
    "PixelShuffle PixelUnshuffle ChannelShuffle Upsample UpsamplingNearest2d UpsamplingBilinear2d "
    "Dropout1d Dropout2d Dropout3d AlphaDropout FeatureAlphaDropout InstanceNorm1d InstanceNorm2d "
    "InstanceNorm3d".split()
)

THIN_CONVOLUTION = 64
"""A first convolution with at most this many products per output is repeated by every member.

Sharing its result saves these products, but every member then reads and keeps the whole result to
modulate it. For a thin convolution, such as one of three colours, repeating takes less time and
memory.
"""


def fold(
    reference: nn.Module,
    layers: Mapping[str, Layer],
    spec: EnsembleSpec,
    ranks: Mapping[str, int],
    constants: Mapping[str, Any],
    *,
    per_member_inputs: bool = False,
) -> Folded:
    """Trace a network and rewrite it for chunks of members.

    Args:
        reference: The network, in the mode in which it will run.
        layers: Its parameter layers.
        spec: How members differ.
        ranks: Number of axes of every tensor argument, by name.
        constants: Values of the other arguments.
        per_member_inputs: Whether tensor arguments have a block of rows for every member already.

    Raises:
        Unfoldable: If members have to run one after another; the message says why.
        Unwatchable: If the code depends on something whose changes cannot be seen.
    """
    root = copy_module(reference)
    _refuse_modules(root)
    _register_placeholders(root, spec)
    graph = _trace(root, ranks, constants)
    rewriter = Rewriter(root, layers, spec, ranks, per_member_inputs)
    return rewriter.rewrite(graph, reference)


def _register_placeholders(root: nn.Module, spec: EnsembleSpec) -> None:
    """Register the placeholders of per-member tensors, for code that iterates over parameters."""
    for item in spec.per_member:
        module = root.get_submodule(item.module)
        for name in item.tensors:
            placeholder = vars(module).pop(name, None)
            if isinstance(placeholder, nn.Parameter):
                module.register_parameter(name, placeholder)
            elif placeholder is not None:
                module.register_buffer(name, placeholder)


def _trace(
    root: nn.Module, ranks: Mapping[str, int], constants: Mapping[str, Any]
) -> torch.fx.Graph:
    """Return the graph of a network whose code changes nothing and draws no random numbers."""
    guard = None
    tracer = Tracer(root, ranks, constants)
    if has_user_code(root):
        # Modules of torch need no strictness: they become leaves of the graph.
        tracer = StrictTracer(root, ranks, constants)
        guard = tracer.guard
    state = ModuleState(root, tensors=True)
    try:
        graph = tracer.trace_graph(root)
    except Exception as error:  # the user's code may raise anything on symbolic values
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise Unfoldable(f"torch.fx cannot trace it: {reason[:200]}") from None
    if guard is not None:
        change = state.change()
        if not change:
            change = guard.change()
        if change:
            raise Unfoldable(f"its code changes {change!r}")
    return graph


def _refuse_modules(root: nn.Module) -> None:
    """Refuse modules that a graph cannot call as the user's code does."""
    for name, module in root.named_modules():
        # The code of a graph contains the names of modules as they are.
        is_text = name.isprintable() and not {'"', "\\"} & set(name)
        if not is_text or any(keyword.iskeyword(part) for part in name.split(".")):
            raise Unfoldable(f"{name!r} cannot be a name in Python code")
        if any(getattr(module, hooks) for hooks in HOOKS):
            raise Unfoldable(f"{name or 'the reference'!r} has a hook")
        if "forward" in vars(module):
            raise Unfoldable(f"the forward of {name or 'the reference'!r} was replaced")


class ModuleState:
    """Remembers the attributes, children and hooks of the modules of a network.

    Args:
        root: The network.
        tensors: Whether parameters and buffers have to stay the same objects. Otherwise only the
            shapes of parameters and the types of buffers are compared.
    """

    def __init__(self, root: nn.Module, *, tensors: bool = False):
        self.tensors = tensors
        self.modules = []
        for name, module in root.named_modules():
            self.modules.append((name, module, dict(vars(module)), self._tables(vars(module))))

    def _tables(self, attributes: dict[str, Any]) -> list[Any]:
        """Return types of attributes, children, tensors and hooks of a module.

        They are compared at every call, so they have a form that is fast to build.
        """
        parameters, buffers = attributes["_parameters"], attributes["_buffers"]
        tables: list[Any] = [
            list(map(type, attributes.values())),  # 1, 1.0 and True are equal
            list(attributes["_modules"].values()),
            [None if tensor is None else tensor.shape for tensor in parameters.values()],
            list(map(type, buffers.values())),
            sum([len(attributes[hooks]) for hooks in HOOKS]),
        ]
        if self.tensors:
            tables.append([id(tensor) for tensor in (*parameters.values(), *buffers.values())])
        return tables

    def change(self) -> str:
        """Return the name of an attribute or a module that has changed; "" if nothing has."""
        for name, module, attributes, tables in self.modules:
            current = vars(module)
            if self._tables(current) != tables or not _is_equal(current, attributes):
                return self._changed_name(name, module, attributes) or name or "the reference"
        return ""

    def _changed_name(self, name: str, module: nn.Module, attributes: dict[str, Any]) -> str:
        for key in (*vars(module), *attributes):
            before, after = attributes.get(key), vars(module).get(key)
            if before is not after and not _is_equal(before, after):
                return f"{name}.{key}".lstrip(".")
        return ""


def _is_equal(left: Any, right: Any) -> bool:
    try:
        return bool(left == right)
    except (RuntimeError, ValueError, TypeError):  # another tensor or array
        return False


class Rewriter:
    """Analyses a traced graph node by node and writes the prefix and the suffix.

    Args:
        root: The traced copy of the reference.
        layers: Its parameter layers.
        spec: How members differ.
        ranks: Number of axes of every tensor argument, by name.
        per_member_inputs: Whether tensor arguments have a block of rows for every member already.
    """

    def __init__(
        self,
        root: nn.Module,
        layers: Mapping[str, Layer],
        spec: EnsembleSpec,
        ranks: Mapping[str, int],
        per_member_inputs: bool,
    ):
        self.root = root
        self.layers = layers
        self.ranks = ranks
        self.per_member_inputs = per_member_inputs
        self.sites = {(site.layer, site.kind): site for site in spec.sites}
        self.low_rank = {site.layer: site for site in spec.low_rank}
        self.per_member = {item.module: set(item.tensors) for item in spec.per_member}
        self.names = {id(module): name for name, module in root.named_modules()}
        # Module and name of each parameter and buffer, by ``id``; tied ones have several.
        self.owners: dict[int, list[tuple[str, str]]] = {}
        for name, module in root.named_modules():
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                self.owners.setdefault(id(tensor), []).append((name, key))
        # Domain and rank of the value of each traced node.
        self.facts: dict[torch.fx.Node, Value] = {}
        self.prefix, self.suffix = torch.fx.Graph(), torch.fx.Graph()
        # Nodes of the two new graphs by traced node.
        self.in_prefix: dict[torch.fx.Node, torch.fx.Node] = {}
        self.in_suffix: dict[torch.fx.Node, torch.fx.Node] = {}
        # Inputs of the prefix: arguments of the call by name.
        self.arguments: dict[str, torch.fx.Node] = {}
        # Inputs of both graphs: tensors of the reference by name.
        self.tensors: dict[str, tuple[torch.fx.Node, torch.fx.Node]] = {}
        # Inputs of the suffix: shared values by traced node, and values of the members by name.
        self.border: dict[torch.fx.Node, torch.fx.Node] = {}
        self.values: dict[str, torch.fx.Node] = {}
        self.count = self.suffix.placeholder("count")
        # Shared values in the suffix, with their rows repeated for each member.
        self.repeated: dict[torch.fx.Node, torch.fx.Node] = {}
        # For the default chunk, see Folded.
        self.has_convolutions = False
        self.has_positions = False
        self.width = 1

    def rewrite(self, graph: torch.fx.Graph, reference: nn.Module) -> Folded:
        """Return the folded network; its graphs call the modules of ``reference``."""
        for node in graph.nodes:
            if node.op == "placeholder":
                self._add_argument(node)
            elif node.op == "get_attr":
                self._add_tensor(node)
            elif node.op == "call_module":
                self._add_module(node)
            elif node.op == "output":
                self._add_output(node)
            else:
                write_operation(self, node)
        self.prefix.output(tuple(self.in_prefix[node] for node in self.border))
        prefix_inputs = [pair[0] for pair in self.tensors.values()]
        prefix_inputs += self.arguments.values()
        suffix_inputs = [self.count, *self.border.values()]
        suffix_inputs += [pair[1] for pair in self.tensors.values()]
        suffix_inputs += self.values.values()
        return Folded(
            _graph_module(reference, self.prefix, prefix_inputs),
            _graph_module(reference, self.suffix, suffix_inputs),
            list(self.arguments),
            [_locate(reference, name) for name in self.tensors],
            list(self.values),
            self.has_convolutions,
            self.has_positions,
            self.width,
        )

    # Inputs and outputs of the graphs

    def _add_argument(self, node: torch.fx.Node) -> None:
        name = str(node.target)
        self.arguments[name] = self.in_prefix[node] = self.prefix.placeholder(name)
        domain = Domain.SHARED
        if self.per_member_inputs:
            domain = Domain.MEMBER
            self.in_suffix[node] = self.border_node(node)
        self.facts[node] = Value(domain, self.ranks[name])

    def _add_tensor(self, node: torch.fx.Node) -> None:
        """Add a parameter or buffer that the code reads."""
        owner, _, name = str(node.target).rpartition(".")
        module = self.root.get_submodule(owner)
        module_name = self.names[id(module)]
        full_name = f"{module_name}.{name}".lstrip(".")
        tensor = getattr(module, name)
        if any(self._differs(*owner) for owner in self.owners[id(tensor)]):
            # The type and the device of a modulated tensor are the same for all members.
            is_queried = all(u.target is getattr and u.args[1] in DTYPE_QUERIES for u in node.users)
            if not is_queried or name in self.per_member.get(module_name, ()):
                raise Unfoldable(f"its code reads {full_name!r}, which differs between members")
        leading = tensor.shape[0] if tensor.dim() else None
        self.facts[node] = Value(Domain.CONSTANT, tensor.dim(), leading=leading)
        self.in_prefix[node], self.in_suffix[node] = self.tensor_nodes(full_name)

    def _differs(self, module: str, tensor: str) -> bool:
        """Return whether members have different versions of a tensor."""
        if tensor in self.per_member.get(module, ()):
            return True
        for name, layer in self.layers.items():
            is_part = layer.module == module and tensor in (*layer.weights, *layer.biases)
            if is_part and self.has_difference(name):
                return True
        return False

    def has_difference(self, layer: str) -> bool:
        """Return whether members differ by modulations or low-rank weights in a layer."""
        has_site = (layer, "pre") in self.sites or (layer, "post") in self.sites
        return has_site or layer in self.low_rank

    def tensor_nodes(self, name: str) -> tuple[torch.fx.Node, torch.fx.Node]:
        """Return the inputs of prefix and suffix for a parameter or buffer."""
        if name not in self.tensors:
            label = f"tensor_{len(self.tensors)}"
            self.tensors[name] = (self.prefix.placeholder(label), self.suffix.placeholder(label))
        return self.tensors[name]

    def value_node(self, key: str) -> torch.fx.Node:
        """Return the input of the suffix for values of the members."""
        if key not in self.values:
            self.values[key] = self.suffix.placeholder(f"value_{len(self.values)}")
        return self.values[key]

    def border_node(self, source: torch.fx.Node) -> torch.fx.Node:
        """Return the input of the suffix for a value that the prefix computes."""
        if source not in self.border:
            self.border[source] = self.suffix.placeholder(f"shared_{source.name}")
        return self.border[source]

    def argument(self, source: Any, domain: Domain) -> torch.fx.Node:
        """Return the node for a value in the graph of a domain; shared rows are repeated."""
        if domain is not Domain.MEMBER:
            if source not in self.in_prefix:
                raise Unfoldable("a shared value depends on values of members")
            return self.in_prefix[source]
        if source in self.in_suffix:
            return self.in_suffix[source]
        value = self.facts[source]
        node = self.border_node(source)
        if value.domain is Domain.CONSTANT or value.kind == "other":
            return node
        if value.kind in ("shape", "tuple"):
            raise Unfoldable("members use the shape of a shared value, or several at once")
        if source not in self.repeated:
            function = operator.mul if value.kind == "rows" else repeat_rows
            self.repeated[source] = self.suffix.call_function(function, (node, self.count))
        return self.repeated[source]

    def input_of(self, source: Any, is_shared: bool) -> torch.fx.Node:
        """Return the input of a layer: shared rows as they are, or rows of the members."""
        if is_shared:
            return self.border_node(source)
        return self.argument(source, Domain.MEMBER)

    def _add_output(self, node: torch.fx.Node) -> None:
        for leaf in tree_leaves(node.args[0]):
            if not isinstance(leaf, torch.fx.Node) and leaf is not None:
                raise Unfoldable("an output is not a tensor")

        def unfold(source: torch.fx.Node) -> torch.fx.Node:
            value = self.facts[source]
            if value.kind != "tensor" or value.domain is Domain.CONSTANT or not value.rank:
                raise Unfoldable("an output does not have one row per sample")
            rows = self.argument(source, Domain.MEMBER)
            return self.suffix.call_function(unfold_members, (rows, self.count))

        self.suffix.output(map_arg(node.args[0], unfold))

    # Operations and modules

    def emit(self, node: torch.fx.Node, value: Value) -> None:
        """Copy a node into the graph of its domain."""
        self.facts[node] = value
        is_member = value.domain is Domain.MEMBER
        if value.domain is Domain.CONSTANT:
            # A constant may depend on the type or the shape of values of the members.
            is_member = any(source not in self.in_prefix for source in node.all_input_nodes)
        graph = self.suffix if is_member else self.prefix
        domain = Domain.MEMBER if is_member else Domain.SHARED
        args = map_arg(node.args, lambda source: self.argument(source, domain))
        kwargs = map_arg(dict(node.kwargs), lambda source: self.argument(source, domain))
        target = node.target
        if node.op == "call_module":
            target = self.names[id(self.root.get_submodule(str(target)))]
        copied = graph.create_node(node.op, target, args, kwargs)
        new_nodes = self.in_suffix if is_member else self.in_prefix
        new_nodes[node] = copied

    def refuse_shared_change(self, node: torch.fx.Node, is_changing: bool) -> None:
        """Refuse a random in-place operation on a value that members share."""
        target: Any = node.args[0]
        if is_changing and self.facts[target].domain is not Domain.MEMBER:
            raise Unfoldable("its code drops parts of a shared value in place")

    def _add_module(self, node: torch.fx.Node) -> None:
        module = self.root.get_submodule(str(node.target))
        name = self.names[id(module)]
        if isinstance(module, nn.MultiheadAttention):
            from embens.graph.attention import write_attention

            write_attention(self, node, module, name)
            return
        if len(node.args) != 1 or node.kwargs or not isinstance(node.args[0], torch.fx.Node):
            raise Unfoldable(f"{name!r} ({type(module).__name__}) takes several inputs")
        value = self.facts[node.args[0]]
        if value.kind != "tensor" or value.rank is None or value.domain is Domain.CONSTANT:
            raise Unfoldable(f"the input of {name!r} has no batch axis")
        if getattr(module, "inplace", False):
            check_in_place(self, node)
        result = Value(value.domain, rank_after(module, name, value.rank))
        if is_layer(module):
            self._add_layer(node, module, name, result)
        elif isinstance(module, BATCH_NORMS) and self._needs_member_norm(module, name, value):
            self._finish(node, write_batch_norm(self, node, module, name), result)
        elif name in self.per_member and not isinstance(module, BATCH_NORMS):
            self._finish(node, write_layer_norm(self, node, module, name), result)
        else:
            is_random = isinstance(module, RANDOM_MODULES) and module.training
            is_random = is_random or type(module).__name__.startswith("Fractional")
            if is_random and getattr(module, "p", 1.0) > 0:
                self.refuse_shared_change(node, getattr(module, "inplace", False))
                result = replace(result, domain=Domain.MEMBER)
            self.emit(node, result)

    def _needs_member_norm(self, module: Any, name: str, value: Value) -> bool:
        """Return whether a BatchNorm normalises the rows of each member separately."""
        if name in self.per_member:
            return True
        uses_batch = module.training or module.running_mean is None
        return uses_batch and value.domain is Domain.MEMBER

    def _finish(self, node: torch.fx.Node, written: torch.fx.Node, result: Value) -> None:
        """Record the node that the suffix has for a traced node; its rows are those of members."""
        self.in_suffix[node] = written
        self.facts[node] = replace(result, domain=Domain.MEMBER)

    def _add_layer(self, node: torch.fx.Node, module: nn.Module, name: str, result: Value) -> None:
        """Write a parameter layer with the differences between members."""
        layer = self.layers[name]
        is_separate = name in self.per_member or name in self.low_rank
        pre, post = self.sites.get((name, "pre")), self.sites.get((name, "post"))
        is_shared = result.domain is Domain.SHARED
        if not is_shared or pre or post or is_separate:
            self.width = max(self.width, layer.inputs or 1, layer.outputs or 1)
            if result.rank is not None and result.rank > 2:
                self.has_positions = True
            runs_per_member = post is not None or is_separate or not is_shared
            if isinstance(module, _ConvNd) and runs_per_member:
                self.has_convolutions = True
        if is_separate:
            if pre or post:
                raise Unfoldable(f"{name!r} has modulations and separate weights")
            value = self.facts[node.args[0]]  # type: ignore[index]
            self._finish(node, self._write_member_layer(node, module, layer, value), result)
            return
        if not is_shared and not layer.mergeable:
            raise Unfoldable(f"{name!r} is not known to treat samples independently")
        if not pre and not post:
            self.emit(node, result)
            return
        if not layer.mergeable:
            raise Unfoldable(f"{name!r} computes its weight")
        if pre is not None and self.is_plain(module) and (post or self._is_thin(module, is_shared)):
            written = self._write_modulated(node, module, layer, is_shared)
            pre = None  # already applied
        elif post is None and is_shared:
            # The layer is the same for all members and belongs to the prefix.
            self.emit(node, result)
            written = self.border_node(node)
        else:
            written = self.input_of(node.args[0], is_shared)
            if post is not None:
                written = self._scale(written, post, layer, is_shared)
                is_shared = False
            written = self.suffix.call_module(layer.module, (written,))
        if pre is not None:
            written = self._scale(written, pre, layer, is_shared)
        self._finish(node, written, result)

    def _scale(self, x: torch.fx.Node, site: Site, layer: Layer, is_shared: bool) -> torch.fx.Node:
        arguments = (
            x,
            self.value_node(site.key),
            self.count,
            layer.spatial,
            site.repeat,
            is_shared,
        )
        return self.suffix.call_function(scale_members, arguments)

    def is_plain(self, module: nn.Module) -> bool:
        """Return whether a layer's function can be called directly with other weights."""
        if type(module) in (nn.Linear, networks.Linear):
            return True
        return type(module) in CONVOLUTIONS and module.padding_mode == "zeros"

    def _is_thin(self, module: nn.Module, is_shared: bool) -> bool:
        """Return whether every member should repeat a convolution of shared inputs."""
        if not is_shared or not isinstance(module, _ConvNd) or module.transposed:
            return False
        return module.weight[0].numel() <= THIN_CONVOLUTION

    def weights_of(
        self, module: nn.Module, layer: Layer, *, separate: bool = False
    ) -> tuple[torch.fx.Node, Any]:
        """Return weight and bias of a layer in the suffix; the bias may be None.

        Args:
            module: The layer's module.
            layer: The layer.
            separate: Whether they are the stacked tensors of the members.
        """
        nodes: list[Any] = []
        for name, factor in zip(("weight", "bias"), self.forward_factors(module), strict=True):
            if getattr(module, name, None) is None:
                nodes.append(None)
                continue
            full_name = f"{layer.module}.{name}".lstrip(".")
            is_separate = separate and name in self.per_member[layer.module]
            node = self.value_node(full_name) if is_separate else self.tensor_nodes(full_name)[1]
            nodes.append(self.scaled(node, factor))
        return nodes[0], nodes[1]

    def forward_factors(self, module: nn.Module) -> tuple[float, float]:
        """Return the factors of weight and bias in the forward pass of a layer."""
        if isinstance(module, networks.Parametrized) and module.parametrization == "ntk":
            return module.weight_std / math.sqrt(module.fan_in), module.bias_std
        return 1.0, 1.0

    def scaled(self, node: torch.fx.Node, factor: float) -> torch.fx.Node:
        """Return a node of the suffix times a number."""
        if factor == 1.0:
            return node
        return self.suffix.call_function(operator.mul, (node, factor))

    def write_linear(
        self,
        x: torch.fx.Node,
        weight: torch.fx.Node,
        bias: Any,
        layer: Layer,
        is_shared: bool = False,
    ) -> torch.fx.Node:
        """Write a Linear layer with the modulations of its inputs and outputs, if there are any."""
        values = self._modulations(layer)
        arguments = (x, weight, bias, *values, self.count, is_shared)
        return self.suffix.call_function(modulated_linear, arguments)

    def _modulations(self, layer: Layer) -> tuple[Any, Any, int]:
        """Return the nodes of the pre and post values of a layer, and the repeat of the latter."""
        pre, post = self.sites.get((layer.name, "pre")), self.sites.get((layer.name, "post"))
        pre_value = None if pre is None else self.value_node(pre.key)
        if post is None:
            return pre_value, None, 1
        return pre_value, self.value_node(post.key), post.repeat

    def _write_modulated(
        self, node: torch.fx.Node, module: nn.Module, layer: Layer, is_shared: bool
    ) -> torch.fx.Node:
        """Write a layer with modulated outputs and, unless a convolution is thin, inputs."""
        x = self.input_of(node.args[0], is_shared)
        weight, bias = self.weights_of(module, layer)
        if isinstance(module, nn.Linear):
            return self.write_linear(x, weight, bias, layer, is_shared)
        function, options = convolution_options(module)
        values = self._modulations(layer)
        arguments = (x, weight, bias, *values, self.count, is_shared)
        arguments = (*arguments, layer.transposed, function, options)
        return self.suffix.call_function(modulated_convolution, arguments)

    def _write_member_layer(
        self, node: torch.fx.Node, module: nn.Module, layer: Layer, value: Value
    ) -> torch.fx.Node:
        """Write a layer with low-rank or separate weights; return its node in the suffix."""
        if not self.is_plain(module) and type(module) is not nn.Embedding:
            raise Unfoldable(
                f"members have separate weights in {layer.name!r} ({type(module).__name__})"
            )
        is_shared = value.domain is Domain.SHARED
        x = self.input_of(node.args[0], is_shared)
        if layer.name in self.low_rank:
            site = self.low_rank[layer.name]
            weight, bias = self.weights_of(module, layer)
            left = self.value_node(f"{layer.name}.left")
            right = self.value_node(f"{layer.name}.right")
            if site.kind == "additive":
                left = self.scaled(left, self.forward_factors(module)[0])
            if isinstance(module, nn.Linear) and site.kind == "additive":
                arguments = (x, weight, bias, left, right, self.count, is_shared)
                return self.suffix.call_function(low_rank_linear, arguments)
            weights = self.suffix.call_function(low_rank_weights, (weight, left, right, site.kind))
        else:
            if "weight" not in self.per_member[layer.module]:
                raise Unfoldable(f"members share the weight of {layer.name!r}")
            weights, bias = self.weights_of(module, layer, separate=True)
        arguments = (x, weights, bias, self.count, is_shared)
        if isinstance(module, nn.Linear):
            return self.suffix.call_function(member_linear, arguments)
        if isinstance(module, nn.Embedding):
            has_options = module.max_norm is not None or module.padding_idx is not None
            if has_options or module.sparse or module.scale_grad_by_freq:
                raise Unfoldable(f"the embedding {layer.name!r} has options")
            return self.suffix.call_function(member_embedding, (x, weights, self.count, is_shared))
        return self.suffix.call_function(
            member_convolution, (*arguments, *convolution_options(module))
        )


def rank_after(module: nn.Module, name: str, rank: int) -> int:
    """Return the rank of a module's output, if the module treats rows independently.

    Raises:
        Unfoldable: If it is unknown, or if the input has no batch axis.
    """
    kind = type(module).__name__
    if isinstance(module, _ConvNd):
        is_known = rank == len(module.kernel_size) + 2
    elif isinstance(module, nn.Embedding):
        if module.scale_grad_by_freq:
            raise Unfoldable(f"the gradient of {name!r} depends on all indices of a batch")
        return rank + 1
    elif isinstance(module, nn.RNNBase):
        raise Unfoldable(f"the batch is not the first axis of the states of {name!r}")
    elif is_layer(module) or is_elementwise_dropout(module):
        is_known = rank >= 2
    elif not type(module).__module__.startswith("torch.nn"):
        raise Unfoldable(f"{name!r} ({kind}) is not known to treat samples independently")
    elif isinstance(module, nn.Flatten):
        start = module.start_dim + rank if module.start_dim < 0 else module.start_dim
        end = module.end_dim + rank if module.end_dim < 0 else module.end_dim
        if start > 0:
            return rank - (end - start)
        is_known = False
    elif isinstance(module, nn.Unflatten):
        if isinstance(module.dim, int) and module.dim % rank > 0:
            return rank - 1 + len(module.unflattened_size)
        is_known = False
    elif isinstance(module, nn.Softmax2d):
        is_known = rank == 4
    elif isinstance(module, (nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.GLU)):
        is_known = isinstance(module.dim, int) and module.dim % rank > 0
    elif isinstance(module, BATCH_NORMS):
        is_known = rank >= 2
    elif kind in FEATUREWISE:
        shape = getattr(module, "normalized_shape", ())
        is_known = rank >= 2 and len(shape) < rank
    elif kind in POOLING or kind in PADDING:
        axes = next((int(letter) for letter in kind if letter.isdigit()), 0)
        is_known = axes > 0 and rank == axes + 2 and not getattr(module, "return_indices", False)
    else:
        is_known = kind in IMAGE_MODULES and rank >= (4 if kind.startswith("Pixel") else 3)
        if kind.startswith("InstanceNorm"):
            # The first axis of an input with one axis less is that of the channels.
            is_batch = rank == int(kind[-2]) + 2
            is_known = is_batch and not getattr(module, "track_running_stats", False)
    if not is_known:
        raise Unfoldable(
            f"{name!r} ({kind}) on {rank} axes is not known to treat samples independently"
        )
    return rank


def _locate(reference: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that holds a parameter or buffer, and its name there."""
    owner, _, tensor = name.rpartition(".")
    return reference.get_submodule(owner), tensor


def _graph_module(
    reference: nn.Module, graph: torch.fx.Graph, inputs: list[torch.fx.Node]
) -> torch.fx.GraphModule:
    """Return a graph as a module whose arguments have a given order."""
    ordered = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in inputs:
        copies[node] = ordered.node_copy(node)
    for node in graph.nodes:
        if node not in copies:
            copies[node] = ordered.node_copy(node, lambda source: copies[source])
    ordered.eliminate_dead_code(is_impure_node=_is_kept)
    return torch.fx.GraphModule(reference, ordered)


def _is_kept(node: torch.fx.Node) -> bool:
    """Return whether a node stays in the graph even if its result is not used."""
    if node.users or node.op in ("placeholder", "output", "call_module"):
        return True
    return is_in_place(operation_name(node.target))
