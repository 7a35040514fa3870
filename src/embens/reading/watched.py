"""Reading the data flow by watching one real call; takes any Python code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from embens.reading.flow import RANDOM, Flow, Reader, Trail, copy_structure, disable_fast_paths
from embens.reading.layers import is_layer
from embens.reading.samples import is_in_place


class _RunWatcher(TorchFunctionMode):
    """Follows real tensors through one call."""

    def __init__(self, reader: Reader):
        super().__init__()
        self.reader = reader
        self.trails: dict[int, tuple[Tensor, Trail]] = {}
        self.leaf_depth = 0

    def of(self, arguments: Any) -> list[Trail]:
        return [self.trails[id(v)][1] for v in _tensors(arguments) if id(v) in self.trails]

    def mark(self, values: Any, trail: Trail) -> None:
        for value in _tensors(values):
            self.trails[id(value)] = (value, trail)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if self.leaf_depth:
            return result
        trails = self.of((args, kwargs))
        if name in ("__get__", "__set__"):
            self.reader.use(trails)
            if getattr(getattr(func, "__self__", None), "__name__", "") == "shape":
                self.reader.note("shape", clear=False)
            return result
        if name in ("size", "__len__", "numel") and trails:  # a number that leaves no trail
            self.reader.note(name, clear=False)
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, nn.Parameter) and id(value) in self.reader.weights:
                self.reader.flow.bypassed.add(self.reader.weights[id(value)])
        rest = tuple(args[1:]) + tuple((kwargs or {}).values())
        trail = self.reader.combine(name, trails, rest)
        if is_in_place(name) or (kwargs or {}).get("inplace"):
            self.reader.note("in_place_", clear=True)
            self.overwrite(args[0], trail)
        self.mark(result, trail)
        return result

    def overwrite(self, target: Tensor, trail: Trail) -> None:
        """Give all values that share a changed value's memory their new trail."""
        place = target.untyped_storage().data_ptr()
        for value, old in list(self.trails.values()):
            if value.untyped_storage().data_ptr() == place:
                upstream = old.upstream | trail.upstream
                self.mark(value, replace(old, upstream=upstream, affine=frozenset()))

    @contextmanager
    def hooked(self, root: nn.Module) -> Iterator[None]:
        opened: list[tuple[int, bool, list[Trail]]] = []

        def enter(module, args, kwargs):
            index, leaf, trails = -1, True, []
            if not self.leaf_depth:
                trails, leaf = self.of((args, kwargs)), _is_run_leaf(module)
                index = self.reader.enter(self.reader.names[id(module)], trails, leaf=leaf)
            opened.append((index, leaf, trails))
            self.leaf_depth += leaf

        def leave(module, args, kwargs, result):
            index, leaf, trails = opened.pop()
            self.leaf_depth -= leaf
            if index < 0:
                return
            values = _tensors(result)
            given = {id(v) for v in tree_leaves((args, kwargs))}
            self.reader.flow.calls[index].aliases = any(id(v) in given for v in values)
            if leaf:
                name = self.reader.names[id(module)]
                positions = any(v.dim() > 2 for v in _tensors((args, kwargs)))
                trail = self.reader.pass_leaf(module, name, trails, positions=positions)
                self.mark(values, trail)
            values = [v for v in values if id(v) in self.trails]
            for value, trail in zip(values, self.reader.leave(index, self.of(values)), strict=True):
                self.mark(value, trail)

        hooks = []
        for module in root.modules():
            hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            hooks.append(module.register_forward_hook(leave, with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _tensors(values: Any) -> list[Tensor]:
    """Return the tensors in a value, also those of packed sequences."""
    leaves = [v.data if isinstance(v, PackedSequence) else v for v in tree_leaves(values)]
    return [v for v in leaves if isinstance(v, Tensor)]


def _is_run_leaf(module: nn.Module) -> bool:
    if is_layer(module) or isinstance(module, (nn.MultiheadAttention, *RANDOM)):
        return True
    container = isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
    stock = type(module).__module__.startswith("torch.nn") and not container
    return stock and not any(map(is_layer, module.modules()))


def read_from_run(reference: nn.Module, example_input: Any) -> Flow:
    """Read the flow from one real call on a copy, if possible in training mode.

    Random modules and layers that only training uses show there; a batch too small for BatchNorm is
    read in evaluation mode.
    """
    try:
        return _watch(copy_structure(reference).train(), example_input)
    except Exception:  # any code of the user's may need another batch to train on
        pass
    try:
        return _watch(copy_structure(reference).eval(), example_input)
    except Exception as error:
        shapes = [tuple(v.shape) for v in tree_leaves(example_input) if isinstance(v, Tensor)]
        raise ValueError(
            f"the reference could not be called on example_input (shapes {shapes}): {error}"
        ) from error


def _watch(root: nn.Module, example_input: Any) -> Flow:
    disable_fast_paths(root)
    reader = Reader(root)
    watcher = _RunWatcher(reader)
    example_input = tree_map_only(Tensor, Tensor.clone, example_input)
    for value in (v for v in tree_leaves(example_input) if isinstance(v, Tensor)):
        image = value.is_floating_point() and value.dim() in (4, 5)
        watcher.mark(value, Trail(channels=value.shape[1] if image else None, rows="input"))
    named = dict(example_input) if isinstance(example_input, Mapping) else {}
    arguments = example_input if isinstance(example_input, tuple) else (example_input,)
    with torch.random.fork_rng(), torch.no_grad(), watcher.hooked(root), watcher:
        result = root(**named) if named else root(*arguments)
    reader.flow.outputs = watcher.of(result)
    reader.use(reader.flow.outputs)
    return reader.flow
