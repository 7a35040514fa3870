"""The data flow of a network, read from one real call.

Python code of any kind can be followed this way. Values are followed through torch functions and
through calls of modules; the analysis is that of :mod:`embens.graph.reading`.
"""

import copy
import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from embens.graph.captures import memory_of
from embens.graph.operations import RANDOM_MODULES, changed_arguments
from embens.graph.reading import Flow, FlowReader, Trail, detached_state, read_flow
from embens.sites import is_layer


def watch_flow(reference: nn.Module, example_input: Any) -> Flow:
    """Read the data flow from one call on a copy of the network.

    The call is made in training mode, where layers that only training uses show. A batch that is
    too small for BatchNorm is tried in evaluation mode.

    Args:
        reference: Any module.
        example_input: A batch, a tuple of arguments or a dictionary of keyword arguments.

    Returns:
        The flow of this call.

    Raises:
        ValueError: If the network cannot be called on the example.
    """
    if is_layer(reference):
        return read_flow(reference)
    try:
        return _watch(_private_copy(reference).train(), example_input)
    except Exception:  # the user's code may raise anything on a batch that it cannot train on
        pass
    try:
        return _watch(_private_copy(reference).eval(), example_input)
    except Exception as error:
        leaves = tree_leaves(example_input)
        shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
        raise ValueError(
            f"the reference could not be called on example_input (shapes {shapes}): {error}. Pass "
            "a batch that it accepts."
        ) from error


def _private_copy(reference: nn.Module) -> nn.Module:
    """Return a copy that shares no tensor, as a call may change buffers and parameters."""
    return copy.deepcopy(reference, detached_state(reference))


def _watch(root: nn.Module, example_input: Any) -> Flow:
    reader = FlowReader(root)
    watcher = _Watcher(reader)
    example_input = tree_map_only(Tensor, Tensor.clone, example_input)
    for leaf in tree_leaves(example_input):
        if isinstance(leaf, Tensor):
            is_image = leaf.is_floating_point() and leaf.dim() in (4, 5)
            watcher.mark(leaf, Trail(channels=leaf.shape[1] if is_image else None))
    with torch.random.fork_rng(), torch.no_grad(), watcher.hooked(root), watcher:
        if isinstance(example_input, Mapping):
            result = root(**example_input)
        elif isinstance(example_input, tuple) and not isinstance(example_input, PackedSequence):
            result = root(*example_input)
        else:
            result = root(example_input)
    reader.flow.outputs = watcher.trails_of(result)
    return reader.flow


_TO_PYTHON = frozenset("numpy tolist item __array__ __float__ __dlpack__".split())
_FROM_PYTHON = frozenset("tensor as_tensor asarray from_numpy frombuffer from_dlpack".split())
"""Functions of torch with arrays or Python numbers as results or arguments."""


class _Watcher(TorchFunctionMode):
    """Follows tensors through one call."""

    def __init__(self, reader: FlowReader):
        super().__init__()
        self.reader = reader
        # Tensors that exist before the call do not depend on its inputs.
        self.constants: dict[int, Tensor] = {}
        for value in gc.get_objects():
            if issubclass(type(value), Tensor):
                self.constants[id(value)] = value
        # Layers whose outputs the code has converted to arrays or Python numbers.
        self.converted: frozenset[str] = frozenset()
        # Tensors are kept alive with their trails, so that no id is used twice.
        self.trails: dict[int, tuple[Tensor, Trail]] = {}
        self.leaf_depth = 0

    def trails_of(self, values: Any) -> list[Trail]:
        """Return the trails of the tensors in a nested value."""
        trails = []
        for tensor in _tensors(values):
            if id(tensor) in self.trails:
                trails.append(self.trails[id(tensor)][1])
            elif id(tensor) in self.reader.owners:
                trails.append(self.reader.read_weight(tensor))
            elif id(tensor) not in self.constants:
                trails.append(self._guess(tensor))
        return trails

    def _guess(self, tensor: Tensor) -> Trail:
        """Return a trail for the result of an operation that torch does not show.

        Compiled functions and transforms such as vmap have such results.
        """
        before = frozenset(self.reader.flow.upstream)
        if before and (tensor.is_floating_point() or tensor.is_complex()):
            self.reader.flow.guesses.append(
                "that a tensor which the code computes with a transform or a compiled function "
                "depends on all layers that were called before"
            )
        trail = Trail(before)
        self.mark(tensor, trail)
        return trail

    def mark(self, values: Any, trail: Trail) -> None:
        """Give the tensors in a nested value a trail."""
        for tensor in _tensors(values):
            self.trails[id(tensor)] = (tensor, trail)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if self.leaf_depth:
            return result
        if name == "__set__":  # such as ``x.data = y``
            for trail in self.trails_of(args[1:]):
                self.mark(args[0], trail)
            return result
        if name == "__get__":  # a property such as ``x.mT``
            name = func.__self__.__name__
        if name in _TO_PYTHON:
            for trail in self.trails_of(args):
                self.converted |= trail.upstream
        if name in _FROM_PYTHON:
            self.mark(result, Trail(self.converted))
            return result
        arguments = tuple(args[1:]) + tuple(kwargs.values())
        trail = self.reader.apply_operation(name, self.trails_of((args, kwargs)), arguments)
        for target in changed_arguments(name, args, kwargs):
            if isinstance(target, Tensor):
                self.overwrite(target, trail)
        self.mark(result, trail)
        return result

    def overwrite(self, target: Tensor, trail: Trail) -> None:
        """Give all values that share memory with a changed value a new trail."""
        memory = memory_of(target)
        for tensor, old in list(self.trails.values()):
            if tensor is target or (memory and memory_of(tensor) == memory):
                self.mark(tensor, Trail(old.upstream | trail.upstream, frozenset(), old.channels))

    @contextmanager
    def hooked(self, root: nn.Module) -> Iterator[None]:
        """Follow the calls of modules that are not looked into."""
        inputs: list[list[Trail]] = []

        def enter(module: nn.Module, args: tuple, kwargs: dict) -> None:
            if self.leaf_depth == 0:
                inputs.append(self._inputs_of(module, args, kwargs))
            self.leaf_depth += 1

        def leave(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            self.leaf_depth -= 1
            if self.leaf_depth:
                return
            trails = inputs.pop()
            name = self.reader.names.get(id(module))
            if name is None:  # a copy that the code has made
                self.mark(output, self.reader.apply_operation(type(module).__name__, trails, ()))
                return
            tensors = _tensors((args, kwargs))
            positions = any(tensor.dim() > 2 for tensor in tensors)
            trail = self.reader.apply_module(module, name, trails, positions=positions)
            self.mark(output, trail)

        hooks = []
        for module in root.modules():
            if _is_leaf(module):
                hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
                hooks.append(module.register_forward_hook(leave, with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _inputs_of(self, module: nn.Module, args: tuple, kwargs: dict) -> list[Trail]:
        if not isinstance(module, nn.MultiheadAttention):
            return self.trails_of((args, kwargs))
        values = [*args, *kwargs.values()][:3]
        trails = []
        for value in values:
            sources = self.trails_of(value)
            trails.append(sources[0] if sources else Trail())
        return trails


def _tensors(values: Any) -> list[Tensor]:
    """Return the tensors in a nested value, also those of packed sequences."""
    tensors = []
    for leaf in tree_leaves(values):
        if isinstance(leaf, PackedSequence):
            leaf = leaf.data
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
    return tensors


def _is_leaf(module: nn.Module) -> bool:
    """Return whether a module is followed as a whole."""
    if is_layer(module) or isinstance(module, RANDOM_MODULES):
        return True
    is_container = isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
    is_stock = type(module).__module__.startswith("torch.nn") and not is_container
    return is_stock and not any(is_layer(part) for part in module.modules())
