"""Rules of functions and methods of tensors in a traced forward.

A rule takes the streams before an operation and returns the stream after it. Operations that act as
a module of torch, such as ``F.relu``, use the rule of that module.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn import functional as F

from embens.networks import Abs, Cos, Erf, Sin
from embens.theory.moments import MEASURE, PAIRS, State
from embens.theory.pixels import AVERAGES, keep_diagonal
from embens.theory.recursion import propagate
from embens.theory.scores import Scores, Weights, attend, normalise_scores, score
from embens.theory.streams import (
    Stream,
    add_streams,
    concatenate,
    multiply_streams,
    scaled,
    split_stream,
)

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


class Operations:
    """Rules of operations in one graph.

    Args:
        shapes: Shapes of the values of nodes, for one input.
    """

    def __init__(self, shapes: dict[torch.fx.Node, torch.Size]):
        self.shapes = shapes

    def apply(self, node: torch.fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Apply the rule of a function or a method to streams.

        Args:
            node: The node of the graph.
            args: Its arguments; at least one is a stream.
            kwargs: Its keyword arguments.

        Raises:
            TypeError: If the operation has no rule; the message has the line of the user's code.
        """
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
                f"Apply a Linear or a convolution to them first.{line_of(node)} {MEASURE}"
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
                f"units.{line_of(node)} {MEASURE}"
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
                f"{feature_axis}.{line_of(node)} {MEASURE}"
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

    def _no_rule(self, node: torch.fx.Node) -> TypeError:
        name = getattr(node.target, "__name__", node.target)
        if node.target in _MAXIMUM:
            return TypeError(
                "max pooling has no limit here: the maximum of correlated units is not Gaussian "
                f"and has no kernel in closed form.{line_of(node)} Use average pooling, or write "
                "it as an nn.Module and give that a rule with embens.theory.propagate.register. "
                + MEASURE
            )
        return TypeError(
            f"the infinite-width limit of the operation {name!r} is not known.{line_of(node)} "
            "Write it as an nn.Module and give that a rule with embens.theory.propagate.register. "
            + MEASURE
        )


def mixes_pixels_anywhere(nodes: list[torch.fx.Node], network: nn.Module) -> bool:
    """Return True if a graph mixes pixels or tokens, which needs all pairs of them."""
    mixing = {*_MEAN, *_MATMUL, F.scaled_dot_product_attention}
    for node in nodes:
        if node.op == "call_module":
            if isinstance(network.get_submodule(str(node.target)), tuple(AVERAGES)):
                return True
        elif node.target in mixing or _MODULES.get(node.target) in AVERAGES:
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


def line_of(node: torch.fx.Node) -> str:
    """Return the line of the user's code that made a node, as the end of a sentence."""
    lines = (node.stack_trace or "").splitlines()
    for index in range(len(lines) - 2, -1, -1):
        is_frame = lines[index].lstrip().startswith("File ")
        if is_frame and "/torch/" not in lines[index]:
            return f" It is at {lines[index].strip()}: {lines[index + 1].strip()}."
    return ""
