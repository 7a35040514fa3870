"""A walk over the traced graph of a network: the limit of networks with a custom forward.

torch.fx traces the forward; every module with a rule of :func:`embens.theory.propagate` stays one
node. A value that does not depend on any layer is computed for both sets of inputs
(:class:`~embens.theory.input_pair.InputPair`). A value after a layer is a
:class:`~embens.theory.streams.Stream`, which holds kernels.

A graph is run twice. The first pass appends a record of each activation to a list; the second pass
reads them in the same order (:mod:`embens.theory.moments`). The *depth* of a value is the number of
records before it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from embens.theory.attention_rules import apply_module
from embens.theory.input_pair import InputPair
from embens.theory.missing_rules import line_of, line_of_error, require_no_parameters, with_line
from embens.theory.moments import MEASURE, Moments, State, describe
from embens.theory.recursion import has_rule, propagate, unknown_limit
from embens.theory.scores import Scores, Weights
from embens.theory.streams import Part, Stream, average_parts, pass_parts
from embens.theory.tensor_rules import Operations

ALL_PAIRS = 10**9
"""Value of ``State.poolings`` that is never used up, so that all pairs of pixels are kept."""


class _RuleTracer(torch.fx.Tracer):
    """Trace into modules without a rule; modules with a rule and modules of torch stay nodes."""

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
            raise TypeError(f"{unknown_limit(network, '')}{line_of_error(error)}") from error
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
        self.operations = Operations(self.shapes)

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
            raise TypeError(f"{unknown_limit(module, str(node.target))}{line_of(node)}")
        if any(module is used for _, used in self.layers) and list(module.parameters()):
            raise TypeError(
                f"{describe(module, str(node.target))} is used twice, so its outputs are "
                f"correlated in a way that has no rule.{line_of(node)} {MEASURE}"
            )

    def _find_shapes(
        self, graph: torch.fx.Graph, example: Tensor
    ) -> dict[torch.fx.Node, torch.Size]:
        """Run the network once, and return the shapes of all tensors."""
        shapes: dict[torch.fx.Node, torch.Size] = {}
        run: list[torch.fx.Node] = []

        class Shapes(torch.fx.Interpreter):
            def run_node(self, n: torch.fx.Node) -> Any:
                run.append(n)
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
                f"{tuple(example.shape)} ({str(error).splitlines()[0]}).{line_of(run[-1])}"
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
                values[node] = InputPair(*state.inputs)
                continue
            args = torch.fx.map_arg(node.args, values.__getitem__)
            kwargs = torch.fx.map_arg(node.kwargs, values.__getitem__)
            if node.op == "output":
                result = args[0]
                if not isinstance(result, Stream):
                    raise TypeError(
                        "the forward must return one tensor that depends on a layer; got "
                        f"{type(result).__name__}. {MEASURE}"
                    )
                return average_parts(result)
            try:
                values[node] = self._value(node, args, kwargs, state, depth)
            except (TypeError, ValueError, NotImplementedError) as error:
                raise with_line(error, node) from error
            if isinstance(values[node], Stream):
                values[node] = values[node].map(partial(_locate, node))
            for value in _flat([values[node]]):
                if isinstance(value, Stream | Scores | Weights):
                    depth = max(depth, value.depth)
        raise AssertionError("a graph ends in an output")

    def _value(self, node: torch.fx.Node, args: Any, kwargs: Any, start: State, depth: int) -> Any:
        """Return the value of a node of the graph, given the values of its arguments."""
        require_no_parameters(node, self.network)
        args = _renumbered(args, depth)
        kwargs = _renumbered(kwargs, depth)
        if node.op == "call_module":
            return self._module(node, args[0], start, depth)
        if any(isinstance(v, Stream | Scores | Weights) for v in _flat([*args, *kwargs.values()])):
            return self.operations.apply(node, list(args), kwargs)
        return self._compute(node, args, kwargs)

    def _module(self, node: torch.fx.Node, value: Any, start: State, depth: int) -> Any:
        """Apply the rule of a module, or the module itself before the first layer."""
        path = str(node.target)
        module = self.network.get_submodule(path)
        is_layer = isinstance(module, nn.Linear | _ConvNd | nn.Embedding)
        if isinstance(value, Scores | Weights):
            return apply_module(node, module, value, axes=len(self.shapes[node]))
        if isinstance(value, Tensor):  # does not depend on the inputs, such as positions
            assert start.inputs is not None
            value = InputPair(*[value.expand(len(x), *value.shape) for x in start.inputs])
        if isinstance(module, nn.Embedding) and isinstance(value, InputPair):
            value = _with_batch(value, start)
        if not isinstance(value, Stream) and not is_layer:
            if isinstance(module, _NormBase) or any(True for _ in module.parameters()):
                raise unknown_limit(module, path)
            return InputPair(*[module(part) for part in value])
        if not has_rule(module):
            raise unknown_limit(module, path)
        if not isinstance(value, Stream):
            state = start.replace(inputs=_in_dtype(value, start), depth=depth, path=path)
            after = propagate(module, state)
            return Stream((Part(after, self._width(node, after)),), path)
        if is_layer:
            if value.parts[0].state.heads:
                raise TypeError(
                    f"{describe(module, path)} acts on every head with the same weights, which has "
                    f"no rule. Join the heads before it. {MEASURE}"
                )
            after = propagate(module, average_parts(value).replace(path=path))
            return Stream((Part(after, self._width(node, after)),), path)
        if len(value.parts) > 1 and module.__class__.__name__.endswith("Norm"):
            raise TypeError(f"{describe(module, path)} of a concatenation has no rule. {MEASURE}")
        return pass_parts(
            value.at(depth), lambda state: propagate(module, state.replace(path=path)), path
        )

    def _width(self, node: torch.fx.Node, state: State) -> int:
        shape = self.shapes[node]
        return shape[-1] if state.features_last else shape[1]

    def _compute(self, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
        """Compute a value that depends on the inputs alone, for both sets of inputs."""

        def compute_for(index: int) -> Any:
            def choose(value: Any) -> Any:
                return value[index] if isinstance(value, InputPair) else value

            chosen_args = _map(args, choose)
            chosen_kwargs = _map(kwargs, choose)
            if node.op == "call_method":
                return getattr(chosen_args[0], str(node.target))(*chosen_args[1:], **chosen_kwargs)
            if node.op == "get_attr":
                return operator.attrgetter(str(node.target))(self.network)
            assert callable(node.target)
            return node.target(*chosen_args, **chosen_kwargs)

        if any(isinstance(value, InputPair) for value in _flat([*args, *kwargs.values()])):
            return InputPair(compute_for(0), compute_for(1))
        return compute_for(0)


def _locate(node: torch.fx.Node, state: State) -> State:
    """Let errors of the kernels between members, which are computed later, name the user's line."""
    compute = state.cross
    if compute is None:
        return state

    def cross() -> Moments:
        try:
            return compute()
        except (TypeError, ValueError) as error:
            raise with_line(error, node) from error

    return state.replace(cross=cache(cross))


def _with_batch(value: InputPair, start: State) -> InputPair:
    """Return positions ``(token,)``, which only depend on shapes, for each input."""
    if value.first.dim() != 1:
        return value
    assert start.inputs is not None
    repeated = [v.expand(len(x), -1) for v, x in zip(value, start.inputs, strict=True)]
    return InputPair(*repeated)


def _in_dtype(value: InputPair, start: State) -> tuple[Tensor, Tensor]:
    """Return both values of a pair, such as positions, in the dtype of kernels."""
    assert start.inputs is not None
    dtype = start.inputs[0].dtype
    return value.first.to(dtype), value.second.to(dtype)


def start_state(inputs: tuple[Tensor, Tensor], poolings: int, facts: Any) -> State:
    """Return the state that holds the inputs."""
    return State(Moments(None), inputs=inputs, poolings=poolings, facts=facts)


def _map(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to every leaf of nested tuples, lists and dictionaries."""
    if isinstance(value, InputPair):
        return function(value)
    if isinstance(value, tuple | list):
        return type(value)(_map(part, function) for part in value)
    if isinstance(value, dict):
        return {name: _map(part, function) for name, part in value.items()}
    return function(value)


def _flat(values: Any) -> list[Any]:
    """Return the leaves of nested tuples and lists."""
    flat = []
    for value in values:
        if isinstance(value, list | tuple) and not isinstance(value, InputPair):
            flat.extend(_flat(value))
        else:
            flat.append(value)
    return flat


def _renumbered(values: Any, depth: int) -> Any:
    """Return values in which the next record of every stream has the number ``depth``."""

    def renumber(value: Any) -> Any:
        return value.at(depth) if isinstance(value, Stream | Scores) else value

    return _map(values, renumber)
