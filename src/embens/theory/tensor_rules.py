"""Rules of functions and methods of tensors in a traced forward.

A rule takes the streams before an operation and returns the stream after it. Operations that act as
a module of torch, such as ``F.relu``, use the rule of that module.
"""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn import functional as F

from embens.networks import Abs, Cos, Erf, Sin
from embens.theory.axis_order import (
    FEATURES,
    HEADS,
    average_pixels,
    axis_names,
    permute,
    reshape,
    select_token,
)
from embens.theory.missing_rules import no_rule
from embens.theory.moments import MEASURE
from embens.theory.pixels import AVERAGES
from embens.theory.recursion import propagate
from embens.theory.scores import (
    Scores,
    Weights,
    add_mask,
    attend,
    attend_linearly,
    fill_mask,
    normalise_scores,
    score,
)
from embens.theory.streams import (
    Stream,
    add_streams,
    concatenate,
    multiply_streams,
    scale_kernels,
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
_FILL = {torch.masked_fill, "masked_fill", "masked_fill_"}
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


class InputPair(NamedTuple):
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
        after = self._apply(node, args, kwargs)
        if after is None:
            raise no_rule(node)
        return after

    def _apply(self, node: torch.fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Apply the rule of an operation; return None where it has none."""
        target: Any = node.target
        first: Any = args[0] if args else None
        if isinstance(first, Scores):
            return self._scores(node, args, kwargs)
        if isinstance(first, Weights):
            return self._weights(node, args, kwargs)
        if target in _MATMUL:
            return self._matmul(first, args[1])
        if target in _ADD or target in _MULTIPLY or target in _DIVIDE:
            return self._arithmetic(node, args)
        if target in _CONCATENATE:
            return self._concatenate(node, args, kwargs)
        if target is F.scaled_dot_product_attention:
            return self._scaled_attention(node, args, kwargs)
        if target is operator.getitem and isinstance(first, list):
            return first[args[1]]
        if not isinstance(first, Stream):
            return None  # a stream as a keyword argument, or in another place
        if target in _SPLIT:
            return self._split(node, first)
        if target is operator.getitem:
            return self._select(node, first, args[1])
        if target in _UNCHANGED or _is_idle_dropout(target, kwargs):
            return first
        if target in _RESHAPE:
            return self._reshape(node, first)
        if target in _TRANSPOSE:
            return self._transpose(node, first)
        if target in _MEAN:
            return self._mean(first, args, kwargs)
        if target is getattr or target in ("size", "dim"):
            return self._query(node, first, args)
        if target in _MODULES:
            return self._module(node, first, args, kwargs)
        return None

    def _module(
        self, node: torch.fx.Node, stream: Stream, args: list[Any], kwargs: dict[str, Any]
    ) -> Stream:
        """Apply the rule of the module of torch that acts as the function."""
        options = {name: value for name, value in kwargs.items() if name != "inplace"}
        module = _MODULES[node.target](*args[1:], **options)
        after = stream.map(lambda state: propagate(module, state.replace(path=node.name)))
        return Stream(after.parts, node.name).at(after.depth)

    def _matmul(self, queries: Any, keys: Any) -> Scores | None:
        if isinstance(queries, Stream) and isinstance(keys, Stream):
            return score(queries, keys)
        return None

    def _arithmetic(self, node: torch.fx.Node, args: list[Any]) -> Stream:
        target: Any = node.target
        first, second = args[0], args[1]
        if isinstance(first, InputPair) or isinstance(second, InputPair):
            raise TypeError(
                f"{node.name!r} combines a stream with the inputs, which have finitely many units. "
                f"Apply a Linear or a convolution to them first. {MEASURE}"
            )
        if isinstance(first, Stream) and isinstance(second, Stream):
            if target in _ADD:
                return add_streams(first, second)
            if target in _MULTIPLY:
                return multiply_streams(first, second)
            raise no_rule(node)
        stream, number = (first, second) if isinstance(first, Stream) else (second, first)
        if not isinstance(number, int | float) or target in _ADD:
            raise no_rule(node)
        if target in _DIVIDE:
            if stream is second:
                raise no_rule(node)
            number = 1 / number
        return stream.map(lambda state: scale_kernels(state, number**2))

    def _scores(self, node: torch.fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Apply the rule of scores: scaling, a mask, their softmax, or linear attention."""
        target: Any = node.target
        scores: Scores = args[0]
        second = _constant(args[1]) if len(args) > 1 else None
        if target in _MATMUL and isinstance(second, Stream):
            return attend_linearly(scores, second)
        if isinstance(second, int | float):
            if target in _MULTIPLY:
                return scores.scaled(second)
            if target in _DIVIDE:
                return scores.scaled(1 / second)
        if target in _SOFTMAX:
            axis = kwargs.get("dim", second)
            if axis in (-1, self._last_axis(node)):
                return normalise_scores(scores)
        if target in _ADD and isinstance(second, Tensor):
            return scores.masked(add_mask(second))
        if target in _FILL and isinstance(second, Tensor):
            value = kwargs.get("value", args[2] if len(args) > 2 else None)
            if isinstance(value, int | float):
                return scores.masked(fill_mask(second, value))
        raise no_rule(node)

    def apply_module(self, node: torch.fx.Node, module: nn.Module, value: Scores | Weights) -> Any:
        """Apply the rule of a module to scores or weights of attention.

        Args:
            node: The node of the graph.
            module: Its module.
            value: The value before it.

        Raises:
            TypeError: If the module has no rule there.
        """
        is_over_keys = isinstance(module, nn.Softmax) and module.dim in (-1, self._last_axis(node))
        if isinstance(value, Scores) and is_over_keys:
            return normalise_scores(value)
        is_idle = isinstance(module, nn.Dropout) and not (module.p and module.training)
        if is_idle or isinstance(module, nn.Identity):
            return value
        raise no_rule(node)

    def _last_axis(self, node: torch.fx.Node) -> int:
        return len(self.shapes[node]) - 1

    def _weights(self, node: torch.fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Apply the rule of the mean of values with weights of attention."""
        if node.target in _MATMUL and isinstance(args[1], Stream):
            return attend(args[0], args[1])
        if _is_idle_dropout(node.target, kwargs):
            return args[0]
        raise no_rule(node)

    def _scaled_attention(
        self, node: torch.fx.Node, args: list[Any], kwargs: dict[str, Any]
    ) -> Stream:
        """Apply the rule of ``F.scaled_dot_product_attention``."""
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
        options: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
        streams: list[Any] = [options.get(name) for name in names[:3]]
        queries, keys, values = streams
        known = set(options) <= set(names) and not options.get("dropout_p")
        if not known or not all(isinstance(value, Stream) for value in streams):
            raise no_rule(node)
        transposed = keys.map(lambda s: s.replace(features_last=not s.features_last))
        scores = score(queries, transposed)
        scale = options.get("scale")
        if scale is None:
            scale = scores.width**-0.5
        scores = scores.scaled(scale)
        mask = _constant(options.get("attn_mask"))
        if options.get("is_causal"):
            mask = torch.ones(scores.state.pixels * 2, dtype=torch.bool).tril()
        if isinstance(mask, Tensor) and mask.dtype is torch.bool:
            scores = scores.masked(fill_mask(~mask, -math.inf))
        elif isinstance(mask, Tensor):
            scores = scores.masked(add_mask(mask))
        elif mask is not None:
            raise no_rule(node)
        weights = normalise_scores(scores)
        return attend(weights, values.at(weights.depth))

    def _select(self, node: torch.fx.Node, stream: Any, index: Any) -> Stream | None:
        """Select one token, ``x[:, i]``."""
        is_token = isinstance(index, tuple) and len(index) == 2 and index[0] == slice(None)
        if not isinstance(stream, Stream) or not is_token or not isinstance(index[1], int):
            return None
        return select_token(stream, index[1])

    def _concatenate(self, node: torch.fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Stream:
        streams = list(args[0])
        axis = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        if not all(isinstance(stream, Stream) for stream in streams):
            raise TypeError(
                f"{node.name!r} joins streams with inputs or parameters, which have finitely many "
                f"units. {MEASURE}"
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
        names = ("batch", *axis_names(stream.parts[0].state))
        feature_axis = names.index(FEATURES)
        is_flat = stream.parts[0].state.flat
        if is_flat or HEADS in names or axis % len(names) != feature_axis:
            raise TypeError(
                f"{node.name!r} joins or splits axis {axis}; only that of features has a rule, "
                f"{feature_axis}. {MEASURE}"
            )

    def _reshape(self, node: torch.fx.Node, stream: Stream) -> Stream | None:
        return reshape(stream, self.shapes[node.all_input_nodes[0]], self.shapes[node])

    def _transpose(self, node: torch.fx.Node, stream: Stream) -> Stream | None:
        """Exchange two axes, or permute all."""
        axes: tuple[Any, ...] = node.args[1:]
        if axes and isinstance(axes[0], tuple | list):
            axes = tuple(axes[0])
        count = len(self.shapes[node])
        if not axes or not all(isinstance(axis, int) for axis in axes):
            return None
        axes = tuple(axis % count for axis in axes)
        if node.target in (torch.permute, "permute"):
            return permute(stream, axes)
        order = list(range(count))
        first, second = axes
        order[first], order[second] = second, first
        return permute(stream, tuple(order))

    def _mean(self, stream: Stream, args: list[Any], kwargs: dict[str, Any]) -> Stream | None:
        """Average over all pixels."""
        axes = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if axes is None or kwargs.get("keepdim", len(args) > 2 and args[2]):
            return None
        return average_pixels(stream, {axes} if isinstance(axes, int) else set(axes))

    def _query(self, node: torch.fx.Node, stream: Stream, args: list[Any]) -> Any:
        """Return a shape; sizes of the batch are those of the example and never matter."""
        shape = self.shapes[node.all_input_nodes[0]]
        if node.target == "dim" or args[1:] == ["ndim"]:
            return len(shape)
        if node.target == "size":
            return shape[args[1]] if len(args) > 1 else shape
        if args[1] == "shape":
            return shape
        raise no_rule(node)


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


def _constant(value: Any) -> Any:
    """Return a value of both sets of inputs as one where it does not depend on them."""
    if not isinstance(value, InputPair):
        return value
    first, second = value
    if isinstance(first, Tensor):
        is_equal = first.shape == second.shape and torch.equal(first, second)
    else:
        is_equal = first == second
    return first if is_equal else value


def _is_idle_dropout(target: Any, kwargs: dict[str, Any]) -> bool:
    return target in (F.dropout, F.dropout2d) and not kwargs.get("training", True)
