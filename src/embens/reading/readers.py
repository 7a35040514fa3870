"""Two readers of a network's data flow, and what both may make of it.

:func:`read_symbolically` traces the code with torch.fx and needs no input; :func:`read_from_run`
watches one real call and takes any Python code.
"""

import inspect
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from embens.reading.attention import Attention
from embens.reading.flow import RANDOM, Flow, Reader, Step, Trail, copy_structure
from embens.reading.layers import is_layer
from embens.reading.samples import is_in_place

_TRACING = threading.Lock()
"""torch.fx replaces ``nn.Module.__call__`` while it traces, for all threads."""


class _SymbolicTracer(torch.fx.Tracer):
    def __init__(self, reader: Reader, opaque: set[str]):
        super().__init__()
        self.reader = reader
        self.opaque = opaque
        self.thread = threading.get_ident()
        held = (*reader.root.named_parameters(), *reader.root.named_buffers())
        self.held = {id(tensor): name for name, tensor in held}  # torch.fx goes through all of them

    def getattr(self, attr, attr_val, parameter_proxy_cache):
        name = self.held.get(id(attr_val)) if isinstance(attr_val, nn.Parameter) else None
        if name is None or threading.get_ident() != self.thread:  # it looks at all threads
            return attr_val
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy("get_attr", name, (), {})
        return parameter_proxy_cache[name]

    def create_arg(self, a):
        name = self.held.get(id(a)) if isinstance(a, Tensor) else None
        return super().create_arg(a) if name is None else self.create_node("get_attr", name, (), {})

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return (
            is_layer(m)
            or isinstance(m, Attention)
            or module_qualified_name in self.opaque
            or super().is_leaf_module(m, module_qualified_name)
        )

    def call_module(self, m, forward, args, kwargs):
        if threading.get_ident() != self.thread:
            return forward(*args, **kwargs)
        name = self.reader.names.get(id(m)) or self.path_of_module(m)
        trails = _trails_of((args, kwargs))
        leaf = self.is_leaf_module(m, self.path_of_module(m))
        index = self.reader.enter(name, trails, leaf=leaf)
        result = super().call_module(m, forward, args, kwargs)
        metas = [v.node.meta for v in tree_leaves(result) if isinstance(v, torch.fx.Proxy)]
        trails = self.reader.leave(index, [meta["trail"] for meta in metas])
        for meta, trail in zip(metas, trails, strict=True):
            meta["trail"] = trail
        return result

    def create_node(self, kind, target: Any, args, kwargs, name=None, type_expr=None):
        node = super().create_node(kind, target, args, kwargs, name, type_expr)
        trails = _trails_of((node.args, node.kwargs))
        if kind == "call_module":
            module = self.root.get_submodule(target)
            path = str(self.reader.names.get(id(module), target))
            node.meta["trail"] = self.reader.pass_leaf(module, path, trails)
            return node
        if kind in ("call_function", "call_method"):
            operation = target if isinstance(target, str) else target.__name__
            rest = tuple(node.args[1:]) + tuple(node.kwargs.values())
            node.meta["trail"] = self.reader.combine(operation, trails, rest)
            if is_in_place(operation) or node.kwargs.get("inplace"):
                self.reader.note("in_place_", clear=True)
                _overwrite(node.args[0], node.meta["trail"])
        else:
            node.meta["trail"] = Trail(rows="input" if kind == "placeholder" else "")
            if kind == "get_attr" and (owner := target.rpartition(".")[0]) in self.reader.layers:
                self.reader.flow.bypassed.add(owner)
        if kind == "output":
            self.reader.flow.outputs = trails
            self.reader.use(trails)
        return node


_VIEWS = frozenset(
    "getitem view view_as reshape flatten unflatten squeeze unsqueeze permute transpose t movedim "
    "swapaxes chunk split unbind select narrow expand expand_as detach contiguous getattr".split()
)


def _overwrite(target: Any, trail: Trail) -> None:
    """Give a value that was changed in place, and whatever it is a view of, its new trail."""
    while isinstance(target, torch.fx.Node):
        old = target.meta["trail"]
        upstream = old.upstream | trail.upstream
        target.meta["trail"] = replace(old, upstream=upstream, affine=frozenset())
        operation = target.target if isinstance(target.target, str) else target.target.__name__
        target = target.args[0] if operation in _VIEWS and target.args else None


def _trails_of(arguments: Any) -> list[Trail]:
    nodes = [v.node if isinstance(v, torch.fx.Proxy) else v for v in tree_leaves(arguments)]
    return [n.meta["trail"] for n in nodes if isinstance(n, torch.fx.Node)]


def read_symbolically(reference: nn.Module) -> Flow | None:
    """Read the flow with torch.fx; modules whose code can't be traced become black boxes.

    Code is read in training mode, where random modules and auxiliary layers show, and once more in
    evaluation mode for what else it may do. None: the outermost ``forward`` can't be traced.
    """
    flow = _trace(reference, training=True)
    if flow is not None:
        other = _trace(reference, training=False)
        unread = {Step("code of the evaluation mode", clear=False)}
        flow.steps |= unread if other is None else other.steps
    return flow


def _trace(reference: nn.Module, *, training: bool) -> Flow | None:
    opaque: set[str] = set()
    while True:
        root = copy_structure(reference).train(training)
        parameters = inspect.signature(root.forward).parameters.items()
        defaults = {name: p.default for name, p in parameters if p.default is not p.empty}
        reader = Reader(root)
        tracer = _SymbolicTracer(reader, opaque)
        try:
            with _TRACING:
                tracer.trace(root, concrete_args=defaults)
        except Exception:  # any code of the user's may fail on symbolic values
            failed = reader.flow.calls[reader.stack[-1]].name if reader.stack else ""
            if not failed or failed in opaque:
                return None
            opaque.add(failed)
            continue
        reader.flow.opaque = opaque
        return reader.flow


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
    if is_layer(module) or isinstance(module, (Attention, *RANDOM)):
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
