"""A walk over the traced graph of a network: the limit of forwards that are custom code.

torch.fx traces the forward; every module with a rule of :func:`embens.theory.propagate` stays one
node. Values that depend on the inputs alone are computed for both sets of inputs. Values after a
layer are :class:`~embens.theory.streams.Stream`.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from embens.networks import Abs, Cos, Erf, Sin
from embens.theory.attention import Scores, Weights, attend, normalise_scores, score
from embens.theory.moments import MEASURE, PAIRS, Moments, State, describe
from embens.theory.pixels import AVERAGES, keep_diagonal
from embens.theory.recursion import has_rule, propagate, unknown
from embens.theory.streams import (
    Part,
    Stream,
    add_streams,
    concatenate,
    merged,
    multiply_streams,
    scaled,
    split_stream,
)

ALL_PAIRS = 10**9
"""Number of poolings to come that keeps all pairs of pixels."""

_ADD = {operator.add, operator.iadd, torch.add, "add", "add_"}
_MULTIPLY = {operator.mul, operator.imul, torch.mul, "mul", "mul_"}
_DIVIDE = {operator.truediv, torch.div, "div"}
_CONCATENATE = {torch.cat, torch.concat}
_SPLIT = {torch.chunk, torch.split, "chunk", "split"}
_RESHAPE = {torch.flatten, torch.reshape, torch.squeeze, "flatten", "reshape", "view", "squeeze"}
_TRANSPOSE = {torch.transpose, "transpose", "permute", torch.permute}
_UNCHANGED = {"contiguous", "clone", "float", "double", "to", "type_as"}
_MEAN = {torch.mean, "mean"}
_MATMUL = {operator.matmul, torch.matmul, torch.bmm, "matmul", "bmm"}
_SOFTMAX = {torch.softmax, F.softmax, "softmax"}
_MAXIMUM = {
    F.max_pool1d,
    F.max_pool2d,
    F.max_pool3d,
    torch.max,
    torch.amax,
    torch.maximum,
    "max",
    "amax",
}
_MODULES: dict[Any, type[nn.Module]] = {
    torch.relu: nn.ReLU,
    F.relu: nn.ReLU,
    "relu": nn.ReLU,
    F.leaky_relu: nn.LeakyReLU,
    F.gelu: nn.GELU,
    torch.tanh: nn.Tanh,
    F.tanh: nn.Tanh,
    "tanh": nn.Tanh,
    torch.sigmoid: nn.Sigmoid,
    F.sigmoid: nn.Sigmoid,
    "sigmoid": nn.Sigmoid,
    F.silu: nn.SiLU,
    F.mish: nn.Mish,
    F.softplus: nn.Softplus,
    F.elu: nn.ELU,
    torch.erf: Erf,
    "erf": Erf,
    torch.sin: Sin,
    "sin": Sin,
    torch.cos: Cos,
    "cos": Cos,
    torch.abs: Abs,
    "abs": Abs,
    F.avg_pool1d: nn.AvgPool1d,
    F.avg_pool2d: nn.AvgPool2d,
    F.adaptive_avg_pool1d: nn.AdaptiveAvgPool1d,
    F.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d,
}
"""Functions and methods of tensors, and the modules whose rules they have."""


class Concrete(NamedTuple):
    """A value that depends on the inputs alone, for both sets of inputs."""

    first: Any
    second: Any


class _RuleTracer(torch.fx.Tracer):
    """Traces into modules without a rule; modules of torch stay nodes."""

    record_stack_traces = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if type(m).forward is nn.Sequential.forward:
            return False
        return has_rule(m) or m.__module__.startswith("torch.nn") or not list(m.children())


class Walk:
    """The traced graph of a network.

    Args:
        network: The network.
        example: One input, for the shapes of values.

    Attributes:
        nodes: Nodes of the graph, in order.
        layers: Names and modules of the nodes with a rule, in order.
        output: Module that computes the output, or None.

    Raises:
        TypeError: If the forward cannot be traced, or uses a layer twice.
        ValueError: If the input does not fit.
    """

    def __init__(self, network: nn.Module, example: Tensor):
        try:
            graph = _RuleTracer().trace(network)
        except Exception as error:
            raise unknown(network, "") from error
        self.network = network
        self.nodes = list(graph.nodes)
        self.layers: list[tuple[str, nn.Module]] = []
        for node in self.nodes:
            if node.op == "call_module":
                module = network.get_submodule(str(node.target))
                self._require_rule(module, node)
                self.layers.append((str(node.target), module))
        result = self.nodes[-1].args[0]
        self.output: nn.Module | None = None
        if isinstance(result, torch.fx.Node) and result.op == "call_module":
            self.output = network.get_submodule(str(result.target))
        self.shapes = self._find_shapes(graph, example)

    @property
    def largest_image(self) -> int:
        """Largest number of pixels or tokens of a value, as an upper bound for memory."""
        largest = 1
        for shape in self.shapes.values():
            axes = sorted(shape[1:])
            largest = max(largest, torch.Size(axes[:-1]).numel() if len(axes) > 1 else 1)
        return largest

    def _require_rule(self, module: nn.Module, node: torch.fx.Node) -> None:
        """Raise where a layer has no rule, or is used twice."""
        has_state = isinstance(module, _NormBase) or list(module.parameters())
        if has_state and not has_rule(module):
            raise TypeError(f"{unknown(module, str(node.target))}{_line(node)}")
        if any(module is used for _, used in self.layers) and list(module.parameters()):
            raise TypeError(
                f"{describe(module, str(node.target))} is used twice, so its outputs are "
                f"correlated in a way that has no rule.{_line(node)} {MEASURE}"
            )

    def _find_shapes(
        self, graph: torch.fx.Graph, example: Tensor
    ) -> dict[torch.fx.Node, torch.Size]:
        """Run the network once, and return the shapes of all tensors."""
        shapes: dict[torch.fx.Node, torch.Size] = {}

        class Shapes(torch.fx.Interpreter):
            def run_node(self, n: torch.fx.Node) -> Any:
                value = super().run_node(n)
                if isinstance(value, Tensor):
                    shapes[n] = value.shape
                return value

        parameter = next(self.network.parameters(), example)
        example = example.to(parameter.device)
        if example.is_floating_point():
            example = example.to(parameter.dtype)
        try:
            with torch.no_grad():
                Shapes(torch.fx.GraphModule(self.network, graph)).run(example)
        except (RuntimeError, ValueError, IndexError) as error:
            raise ValueError(
                f"x1 does not fit the network: its forward fails on inputs of shape "
                f"{tuple(example.shape)} ({error})."
            ) from error
        return shapes

    def run(self, state: State) -> State:
        """Pass kernels through the graph.

        Args:
            state: State that holds the inputs.

        Returns:
            The state of the outputs.

        Raises:
            TypeError: If an operation has no rule.
        """
        assert state.inputs is not None
        values: dict[torch.fx.Node, Any] = {}
        depth = 0
        for node in self.nodes:
            if node.op == "placeholder":
                values[node] = Concrete(*state.inputs)
                continue
            args = torch.fx.map_arg(node.args, values.__getitem__)
            kwargs = torch.fx.map_arg(node.kwargs, values.__getitem__)
            if node.op == "output":
                result = args[0]
                if not isinstance(result, Stream):
                    raise TypeError(f"the forward must return one tensor; got {result!r}.")
                return merged(result)
            streams = _streams(args, depth)
            if node.op == "call_module":
                values[node] = self._module(node, streams[0], state, depth)
            elif any(isinstance(value, Stream | Scores | Weights) for value in _flat(streams)):
                values[node] = self._operate(node, streams, kwargs)
            else:
                values[node] = self._compute(node, args, kwargs)
            for value in _flat([values[node]]):
                if isinstance(value, Stream | Scores | Weights):
                    depth = max(depth, value.depth)
        raise AssertionError("a graph ends in an output")

    def _module(self, node: torch.fx.Node, value: Any, start: State, depth: int) -> Any:
        """Apply the rule of a module, or the module itself before the first layer."""
        path = str(node.target)
        module = self.network.get_submodule(path)
        is_layer = isinstance(module, nn.Linear | _ConvNd | nn.Embedding)
        if isinstance(value, Tensor):  # does not depend on the inputs, such as positions
            assert start.inputs is not None
            value = Concrete(*[value.expand(len(x), *value.shape) for x in start.inputs])
        if not isinstance(value, Stream) and not is_layer:
            if isinstance(module, _NormBase) or any(True for _ in module.parameters()):
                raise unknown(module, path)
            return Concrete(*[module(part) for part in value])
        if not has_rule(module):
            error = unknown(module, path)
            raise TypeError(f"{error}{_line(node)}")
        if not isinstance(value, Stream):
            state = start.replace(inputs=tuple(value), depth=depth, path=path)
            after = propagate(module, state)
            return Stream((Part(after, self._width(node, after)),), path)
        if is_layer:
            after = propagate(module, merged(value).replace(path=path))
            return Stream((Part(after, self._width(node, after)),), path)
        if len(value.parts) > 1 and module.__class__.__name__.endswith("Norm"):
            raise TypeError(f"{describe(module, path)} of a concatenation has no rule. {MEASURE}")
        parts = []
        for part in value.parts:
            after = propagate(module, part.state.replace(path=path, depth=depth))
            depth = after.depth
            parts.append(Part(after, part.width))
        return Stream(tuple(parts), path).at(depth)

    def _width(self, node: torch.fx.Node, state: State) -> int:
        shape = self.shapes[node]
        return shape[-1] if state.features_last else shape[1]

    def _operate(self, node: torch.fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Apply the rule of a function or a method to streams."""
        target: Any = node.target
        first = args[0]
        if isinstance(first, Scores | Weights) or target in _MATMUL:
            return self._attention(node, args, kwargs)
        if target in _ADD or target in _MULTIPLY or target in _DIVIDE:
            return self._arithmetic(node, args)
        if target in _CONCATENATE:
            return self._concatenate(node, args, kwargs)
        if target in _SPLIT:
            return self._split(node, first)
        if target is F.scaled_dot_product_attention:
            return self._scaled_attention(node, args, kwargs)
        if target is operator.getitem and isinstance(first, list):
            return first[args[1]]
        if target is operator.getitem:
            return self._select(node, first, args[1])
        if target in _UNCHANGED:
            return first
        if target in _RESHAPE:
            return self._reshape(node, first)
        if target in _TRANSPOSE:
            return self._transpose(node, first)
        if target in _MEAN:
            return self._mean(node, args, kwargs)
        if target is getattr or target in ("size", "dim"):
            return self._query(node, first, args)
        if target in (F.dropout, F.dropout2d) and not kwargs.get("training", True):
            return first
        if target in _MODULES:
            kwargs = {name: value for name, value in kwargs.items() if name != "inplace"}
            module = _MODULES[target](*args[1:], **kwargs)
            rule = first.map(lambda state: propagate(module, state.replace(path=node.name)))
            return Stream(rule.parts, node.name).at(rule.depth)
        raise self._no_rule(node)

    def _arithmetic(self, node: torch.fx.Node, args: list[Any]) -> Stream:
        target: Any = node.target
        first, second = args[0], args[1]
        if isinstance(first, Concrete) or isinstance(second, Concrete):
            raise TypeError(
                f"{node.name!r} combines a stream with the inputs, which have finitely many units. "
                f"Apply a Linear or a convolution to them first.{_line(node)} {MEASURE}"
            )
        if isinstance(first, Stream) and isinstance(second, Stream):
            if target in _ADD:
                return add_streams(first, second)
            if target in _MULTIPLY:
                return multiply_streams(first, second)
            raise self._no_rule(node)
        stream, number = (first, second) if isinstance(first, Stream) else (second, first)
        if not isinstance(number, int | float) or target in _ADD:
            raise self._no_rule(node)
        if target in _DIVIDE:
            if stream is second:
                raise self._no_rule(node)
            number = 1 / number
        return stream.map(lambda state: scaled(state, number**2))

    def _attention(self, node: torch.fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Apply the rule of scores, their softmax, or the mean of values with its weights."""
        target: Any = node.target
        first = args[0]
        second = args[1] if len(args) > 1 else None
        if target in _MATMUL and isinstance(second, Stream):
            if isinstance(first, Weights):
                return attend(first, second)
            if isinstance(first, Stream):
                return score(first, second)
        if isinstance(first, Scores) and isinstance(second, int | float):
            if target in _MULTIPLY:
                return first.scaled(second)
            if target in _DIVIDE:
                return first.scaled(1 / second)
        axis = kwargs.get("dim", second)
        if isinstance(first, Scores) and target in _SOFTMAX and axis in (-1, 2):
            return normalise_scores(first)
        raise self._no_rule(node)

    def _scaled_attention(
        self, node: torch.fx.Node, args: list[Any], kwargs: dict[str, Any]
    ) -> Stream:
        """Apply the rule of ``F.scaled_dot_product_attention`` without a mask."""
        queries, keys, values = args[:3]
        scale = kwargs.get("scale")
        options = {name for name in kwargs if name != "scale" and kwargs[name]}
        if len(args) > 3 or options or not isinstance(queries, Stream):
            raise self._no_rule(node)
        transposed = keys.map(lambda s: s.replace(features_last=not s.features_last))
        scores = score(queries, transposed)
        if scale is None:
            scale = scores.width**-0.5
        weights = normalise_scores(scores.scaled(scale))
        return attend(weights, values.at(weights.depth))

    def _select(self, node: torch.fx.Node, stream: Any, index: Any) -> Stream:
        """Select one token, ``x[:, i]``."""
        is_token = isinstance(index, tuple) and len(index) == 2 and index[0] == slice(None)
        if not isinstance(stream, Stream) or not is_token or not isinstance(index[1], int):
            raise self._no_rule(node)
        token = index[1]

        def select(state: State) -> State:
            if state.spatial != 1 or not state.features_last or state.flat:
                raise self._no_rule(node)
            axes = (token, token) if state.layout == PAIRS else (token,)
            after = state.map(lambda kernel: kernel[(..., *axes)])
            return after.replace(layout=None, spatial=0, features_last=False)

        return stream.map(select)

    def _concatenate(self, node: torch.fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Stream:
        streams = list(args[0])
        axis = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        if not all(isinstance(stream, Stream) for stream in streams):
            raise TypeError(
                f"{node.name!r} joins streams with inputs or parameters, which have finitely many "
                f"units.{_line(node)} {MEASURE}"
            )
        self._require_features(node, streams[0], axis)
        return concatenate(streams)

    def _split(self, node: torch.fx.Node, stream: Stream) -> list[Stream]:
        axis = node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else 0)
        self._require_features(node, stream, axis)
        width = sum(part.width for part in stream.parts)
        count = int(node.args[1])  # type: ignore[arg-type]
        size = -(-width // count) if node.target in (torch.chunk, "chunk") else count
        widths = [min(size, width - start) for start in range(0, width, size)]
        return split_stream(stream, widths)

    def _require_features(self, node: torch.fx.Node, stream: Stream, axis: Any) -> None:
        state = stream.parts[0].state
        axes = 2 + (0 if state.flat else state.spatial)
        feature_axis = axes - 1 if state.features_last else 1
        if state.flat or axis % axes != feature_axis:
            raise TypeError(
                f"{node.name!r} joins or splits axis {axis}; only that of features has a rule, "
                f"{feature_axis}.{_line(node)} {MEASURE}"
            )

    def _reshape(self, node: torch.fx.Node, stream: Stream) -> Stream:
        """Flatten pixels and features, or all pixels; other shapes have no rule."""
        before = self.shapes[node.all_input_nodes[0]]
        after = self.shapes[node]
        if before == after:
            return stream
        state = stream.parts[0].state
        if len(after) == 3 and after[:2] == before[:2] and not state.features_last:
            return stream.map(_join_pixels)
        if len(after) != 2:
            raise self._no_rule(node)

        def flatten(state: State) -> State:
            if state.layout is None or state.flat:
                return state
            return keep_diagonal(state).replace(flat=True, features_last=False)

        return stream.map(flatten)

    def _transpose(self, node: torch.fx.Node, stream: Stream) -> Stream:
        """Exchange features and the only pixel axis."""
        axes = node.args[1:]
        if axes and isinstance(axes[0], tuple | list):
            axes = tuple(axes[0])
        orders = {(1, 2), (2, 1), (-1, -2), (-2, -1), (1, -1), (-1, 1), (0, 2, 1)}
        if tuple(axes) not in orders or stream.parts[0].state.spatial != 1:
            raise self._no_rule(node)
        return stream.map(lambda s: s.replace(features_last=not s.features_last))

    def _mean(self, node: torch.fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Stream:
        """Average over all pixels."""
        axes = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if axes is None or kwargs.get("keepdim", len(args) > 2 and args[2]):
            raise self._no_rule(node)
        stream: Stream = args[0]
        state = stream.parts[0].state
        count = 2 + state.spatial
        chosen = {axis % count for axis in ([axes] if isinstance(axes, int) else axes)}
        pixels = set(range(1, count - 1)) if state.features_last else set(range(2, count))
        if chosen != pixels or not pixels or state.flat:
            raise self._no_rule(node)

        def average(state: State) -> State:
            dims = tuple(range(-2 * state.spatial, 0))
            return state.map(lambda kernel: kernel.mean(dims)).replace(
                layout=None, spatial=0, features_last=False
            )

        return stream.map(average)

    def _query(self, node: torch.fx.Node, stream: Stream, args: list[Any]) -> Any:
        """Return a shape; sizes of the batch are those of the example and never matter."""
        shape = self.shapes[node.all_input_nodes[0]]
        if node.target == "dim" or args[1:] == ["ndim"]:
            return len(shape)
        if node.target == "size":
            return shape[args[1]] if len(args) > 1 else shape
        if args[1] == "shape":
            return shape
        raise self._no_rule(node)

    def _compute(self, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
        """Compute a value that depends on the inputs alone, for both sets."""

        def of(index: int) -> Any:
            def choose(value: Any) -> Any:
                return value[index] if isinstance(value, Concrete) else value

            chosen_args = _map(args, choose)
            chosen_kwargs = _map(kwargs, choose)
            if node.op == "call_method":
                return getattr(chosen_args[0], str(node.target))(*chosen_args[1:], **chosen_kwargs)
            if node.op == "get_attr":
                return operator.attrgetter(str(node.target))(self.network)
            assert callable(node.target)
            return node.target(*chosen_args, **chosen_kwargs)

        if any(isinstance(value, Concrete) for value in _flat([*args, *kwargs.values()])):
            return Concrete(of(0), of(1))
        return of(0)

    def _no_rule(self, node: torch.fx.Node) -> TypeError:
        name = getattr(node.target, "__name__", node.target)
        if node.target in _MAXIMUM:
            return TypeError(
                f"max pooling has no limit here: the maximum of correlated units is not Gaussian "
                f"and has no kernel in closed form.{_line(node)} Use average pooling, or write it "
                "as an nn.Module and give that a rule with embens.theory.propagate.register. "
                + MEASURE
            )
        return TypeError(
            f"the infinite-width limit of the operation {name!r} is not known.{_line(node)} Write "
            "it as an nn.Module and give that a rule with embens.theory.propagate.register. "
            + MEASURE
        )


def mixes_pixels_anywhere(nodes: list[torch.fx.Node], network: nn.Module) -> bool:
    """Return True if a graph mixes pixels or tokens, which needs all pairs of them."""
    for node in nodes:
        if node.op == "call_module":
            if isinstance(network.get_submodule(str(node.target)), tuple(AVERAGES)):
                return True
        elif node.target in _MEAN or node.target in _MATMUL:
            return True
        elif node.target is F.scaled_dot_product_attention:
            return True
        elif _MODULES.get(node.target) in AVERAGES:
            return True
    return False


def _join_pixels(state: State) -> State:
    """Return the kernels with one axis for all pixels of an input."""
    if state.flat or not state.spatial:
        raise ValueError(f"only pixels of images can be joined; got pixels {state.pixels}.")
    groups = 2 if state.layout == PAIRS else 1
    pixels = torch.Size(state.pixels).numel()

    def join(kernel: Tensor) -> Tensor:
        leading = kernel.shape[: kernel.dim() - groups * state.spatial]
        return kernel.reshape(*leading, *(pixels,) * groups)

    return state.map(join).replace(spatial=1)


def start_state(inputs: tuple[Tensor, Tensor], poolings: int, facts: Any) -> State:
    """Return the state that holds the inputs."""
    return State(Moments(None), inputs=inputs, poolings=poolings, facts=facts)


def _line(node: torch.fx.Node) -> str:
    """Return the line of the user's code that made a node, as the end of a sentence."""
    lines = (node.stack_trace or "").splitlines()
    for index in range(len(lines) - 2, -1, -1):
        is_frame = lines[index].lstrip().startswith("File ")
        if is_frame and "/torch/" not in lines[index]:
            return f" It is at {lines[index].strip()}: {lines[index + 1].strip()}."
    return ""


def _map(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, Concrete):
        return function(value)
    if isinstance(value, tuple | list):
        return type(value)(_map(part, function) for part in value)
    if isinstance(value, dict):
        return {name: _map(part, function) for name, part in value.items()}
    return function(value)


def _flat(values: Any) -> list[Any]:
    flat = []
    for value in values:
        if isinstance(value, list | tuple) and not isinstance(value, Concrete):
            flat.extend(_flat(value))
        else:
            flat.append(value)
    return flat


def _streams(args: Any, depth: int) -> list[Any]:
    """Return arguments with all streams numbered for the records that come next."""

    def renumber(value: Any) -> Any:
        if isinstance(value, Scores):
            return dataclasses.replace(value, state=value.state.replace(depth=depth))
        return value.at(depth) if isinstance(value, Stream) else value

    return [_map(arg, renumber) for arg in args]
