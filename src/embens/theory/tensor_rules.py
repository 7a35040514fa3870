"""Rules of functions and methods of tensors in a traced forward.

A rule takes the streams before an operation and returns the stream after it. Operations that act as
a module of torch, such as ``F.relu``, use the rule of that module.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx
from torch import nn
from torch.nn import functional as F

from embens.networks import Abs, Cos, Erf, Sin
from embens.theory import attention_rules
from embens.theory.axis_order import (
    FEATURES,
    HEADS,
    average_pixels,
    axis_names,
    insert_pixel_axis,
    permute,
    reshape,
    select_token,
    weigh_pixels,
)
from embens.theory.input_pair import InputPair, constant_part
from embens.theory.missing_rules import no_rule
from embens.theory.moments import MEASURE
from embens.theory.pixels import AVERAGES
from embens.theory.recursion import propagate
from embens.theory.scores import Scores, Weights
from embens.theory.streams import (
    Stream,
    add_streams,
    concatenate,
    multiply_streams,
    pass_parts,
    scale_kernels,
    split_stream,
)

_ADD = {operator.add, operator.iadd, torch.add, "add", "add_"}
_MULTIPLY = {operator.mul, operator.imul, torch.mul, "mul", "mul_"}
_DIVIDE = {operator.truediv, torch.div, "div"}
_CONCATENATE = {torch.cat, torch.concat}
_SPLIT = {torch.chunk, torch.split, "chunk", "split"}
_RESHAPE = {torch.flatten, torch.reshape, torch.squeeze, "flatten", "reshape", "view", "squeeze"}
_UNSQUEEZE = {torch.unsqueeze, "unsqueeze"}
_TRANSPOSE = {torch.transpose, "transpose", "permute", torch.permute}
_UNCHANGED = {"contiguous", "clone", "float", "double", "to", "type_as"}
_MEAN = {torch.mean, "mean"}
_SUM = {torch.sum, "sum"}
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
    F.interpolate: nn.Upsample,
}
"""Functions and methods of tensors, with the modules whose rules apply to them."""


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
        if any(isinstance(value, Scores | Weights) for value in args):
            return attention_rules.apply(node, args, kwargs, axes=len(self.shapes[node]))
        if target in attention_rules.MATMUL:
            return attention_rules.multiply(first, args[1])
        if target in _ADD or target in _MULTIPLY or target in _DIVIDE:
            return self._arithmetic(node, args)
        if target in _CONCATENATE:
            return self._concatenate(node, args, kwargs)
        if target is F.scaled_dot_product_attention:
            return attention_rules.scaled_attention(node, args, kwargs)
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
        if target in _UNSQUEEZE:
            return self._unsqueeze(node, first)
        if target in _TRANSPOSE:
            return self._transpose(node, first)
        if target in _MEAN or target in _SUM:
            return self._reduce(node, first, args, kwargs)
        if target is getattr and args[1] == "mT":
            return self._exchange_last_axes(node, first)
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
        if node.target is F.interpolate and not options.pop("antialias", False):
            options.pop("recompute_scale_factor", None)  # it changes no integer scale
        module = _MODULES[node.target](*args[1:], **options)
        return pass_parts(
            stream, lambda state: propagate(module, state.replace(path=node.name)), node.name
        )

    def _arithmetic(self, node: torch.fx.Node, args: list[Any]) -> Stream:
        """Apply the rule of a sum, a product or a quotient."""
        target: Any = node.target
        first, second = constant_part(args[0]), constant_part(args[1])
        if isinstance(first, Stream) and isinstance(second, Stream):
            if target in _ADD:
                return add_streams(first, second)
            if target in _MULTIPLY:
                return multiply_streams(first, second)
            raise no_rule(node)
        is_swapped = isinstance(second, Stream)
        stream = second if is_swapped else first
        factor: Any = first if is_swapped else second
        if target in _DIVIDE and not is_swapped:
            factor = factor.map(torch.reciprocal) if isinstance(factor, InputPair) else 1 / factor
        elif target not in _MULTIPLY:
            if isinstance(factor, InputPair):
                raise self._mixes_inputs(node)
            raise no_rule(node)
        if isinstance(factor, int | float):
            return stream.map(lambda state: scale_kernels(state, factor**2))
        weighed = weigh_pixels(stream, factor)
        if weighed is None:
            raise self._mixes_inputs(node)
        return weighed

    def _mixes_inputs(self, node: torch.fx.Node) -> TypeError:
        return TypeError(
            f"{node.name!r} combines a stream with the inputs or a tensor of features, which have "
            "finitely many units. Apply a Linear or a convolution to them first. A factor must be "
            f"the same for all features. {MEASURE}"
        )

    def _select(self, node: torch.fx.Node, stream: Any, index: Any) -> Stream | None:
        """Select one token, ``x[:, i]``, or insert axes of one pixel, ``x[:, :, None]``."""
        if isinstance(stream, Stream) and isinstance(index, tuple) and None in index:
            return self._insert_axes(stream, index)
        is_token = isinstance(index, tuple) and len(index) == 2 and index[0] == slice(None)
        if not isinstance(stream, Stream) or not is_token or not isinstance(index[1], int):
            return None
        return select_token(stream, index[1])

    def _insert_axes(self, stream: Stream, index: tuple[Any, ...]) -> Stream | None:
        after: Stream | None = stream
        for axis, part in enumerate(index):
            if part is None and after is not None:
                after = insert_pixel_axis(after, axis)
            elif part is not None and part != slice(None):
                return None
        return after

    def _unsqueeze(self, node: torch.fx.Node, stream: Stream) -> Stream | None:
        axis: Any = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
        if not isinstance(axis, int):
            return None
        return insert_pixel_axis(stream, axis % len(self.shapes[node]))

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

    def _exchange_last_axes(self, node: torch.fx.Node, stream: Stream) -> Stream | None:
        axes = tuple(range(len(self.shapes[node])))
        return permute(stream, (*axes[:-2], axes[-1], axes[-2]))

    def _reduce(
        self, node: torch.fx.Node, stream: Stream, args: list[Any], kwargs: dict[str, Any]
    ) -> Stream | None:
        """Average or sum over all pixels."""
        axes = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if axes is None:
            return None
        keep = bool(kwargs.get("keepdim", len(args) > 2 and args[2]))
        chosen = {axes} if isinstance(axes, int) else set(axes)
        count = torch.Size(stream.parts[0].state.pixels).numel()
        averaged = average_pixels(stream, chosen, keep=keep)
        if averaged is None or node.target in _MEAN:
            return averaged
        return averaged.map(lambda state: scale_kernels(state, count**2))

    def _query(self, node: torch.fx.Node, stream: Stream, args: list[Any]) -> Any:
        """Return a shape. Its batch size is that of the example, which no rule uses."""
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
    mixing = {*_MEAN, *_SUM, *attention_rules.MATMUL, F.scaled_dot_product_attention}
    for node in nodes:
        if node.op == "call_module":
            if isinstance(network.get_submodule(str(node.target)), (*AVERAGES, nn.Upsample)):
                return True
        elif node.target in mixing or _MODULES.get(node.target) in (*AVERAGES, nn.Upsample):
            return True
    return False


def _is_idle_dropout(target: Any, kwargs: dict[str, Any]) -> bool:
    return target in (F.dropout, F.dropout2d) and not kwargs.get("training", True)
