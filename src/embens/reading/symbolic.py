"""Reading the data flow by tracing the code with torch.fx; needs no input."""

from __future__ import annotations

import inspect
import threading
from dataclasses import replace
from typing import Any

import torch.fx
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from embens.reading.flow import Flow, Reader, Step, Trail, copy_structure
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
    evaluation mode for what else it may do. Returns None where the outermost ``forward`` itself
    can't be traced.
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
