"""Reading the data flow by watching one real call; takes any Python code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from embens.dataflow.flow import (
    RANDOM,
    Flow,
    Reader,
    Trail,
    copy_structure,
    disable_fast_paths,
    is_layer,
)


class _RunWatcher(TorchFunctionMode):
    """Follows real tensors through one call."""

    def __init__(self, reader: Reader):
        super().__init__()
        self.reader = reader
        self.trails: dict[int, tuple[Tensor, Trail]] = {}
        self.leaf_depth = 0

    def of(self, arguments: Any) -> list[Trail]:
        values = [v for v in tree_leaves(arguments) if isinstance(v, Tensor)]
        return [self.trails[id(v)][1] for v in values if id(v) in self.trails]

    def mark(self, values: Any, trail: Trail) -> None:
        for value in tree_leaves(values):
            if isinstance(value, Tensor):
                self.trails[id(value)] = (value, trail)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if self.leaf_depth or name in ("__get__", "__set__"):
            return result
        trails = self.of((args, kwargs))
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, nn.Parameter) and id(value) in self.reader.weights:
                self.reader.flow.bypassed.add(self.reader.weights[id(value)])
        rest = tuple(args[1:]) + tuple((kwargs or {}).values())
        trail = self.reader.combine(name, trails, rest)
        self.reader.use(trails)
        if name == "__setitem__":
            self.mark(args[0], trail)
        self.mark(result, trail)
        return result

    @contextmanager
    def hooked(self, root: nn.Module) -> Iterator[None]:
        opened: list[tuple[int, bool, list[Trail]]] = []

        def enter(module, args, kwargs):
            if not self.leaf_depth:
                trails = self.of((args, kwargs))
                index = self.reader.enter(self.reader.names[id(module)], trails)
                leaf = _is_run_leaf(module)
                opened.append((index, leaf, trails))
            else:
                leaf = True
                opened.append((-1, True, []))
            self.leaf_depth += leaf

        def leave(module, args, kwargs, result):
            index, leaf, trails = opened.pop()
            self.leaf_depth -= leaf
            if index < 0:
                return
            values = [v for v in tree_leaves(result) if isinstance(v, Tensor)]
            if leaf:
                trail = self.reader.pass_leaf(module, self.reader.names[id(module)], trails)
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


def _is_run_leaf(module: nn.Module) -> bool:
    return (
        is_layer(module)
        or isinstance(module, (nn.MultiheadAttention, *RANDOM))
        or (
            type(module).__module__.startswith("torch.nn")
            and not any(is_layer(m) for m in module.modules())
            and not isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
        )
    )


def read_from_run(reference: nn.Module, example_input: Any) -> Flow:
    """Read the flow from one real call, on a copy in evaluation mode."""
    root = copy_structure(reference).eval()
    disable_fast_paths(root)
    reader = Reader(root)
    watcher = _RunWatcher(reader)
    arguments = example_input if isinstance(example_input, tuple) else (example_input,)
    named = dict(example_input) if isinstance(example_input, Mapping) else {}
    if named:
        arguments = ()
    for value in tree_leaves((arguments, named)):
        if isinstance(value, Tensor):
            image = value.is_floating_point() and value.dim() in (4, 5)
            watcher.mark(value, Trail(channels=value.shape[1] if image else None))
    try:
        with torch.no_grad(), watcher.hooked(root), watcher:
            result = root(*arguments, **named)
    except Exception as error:
        shapes = [tuple(v.shape) for v in tree_leaves((arguments, named)) if isinstance(v, Tensor)]
        raise ValueError(
            f"the reference could not be called on example_input (shapes {shapes}): {error}"
        ) from error
    reader.flow.outputs = watcher.of(result)
    reader.use(reader.flow.outputs)
    return reader.flow
