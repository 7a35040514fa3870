"""Functions, operators and methods of tensors in the folded form.

Whether an operation treats rows independently is known from :mod:`embens.graph.rowwise`. Here it
is copied into the graph of its domain, unless it changes a value in place that is used elsewhere.
"""

import inspect
import operator
from collections.abc import Sequence
from dataclasses import replace
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch.fx
from torch.fx.node import map_arg

from embens.graph.domains import Domain, Unfoldable, Value
from embens.graph.members import squeezed, whole_blocks
from embens.graph.operations import (
    ALIASING,
    ALIASING_MODULES,
    RANDOM_FUNCTIONS,
    is_in_place,
    operation_name,
)
from embens.graph.rowwise import infer

if TYPE_CHECKING:
    from embens.graph.folding import Rewriter


def write_operation(rewriter: "Rewriter", node: torch.fx.Node) -> None:
    """Add a call of a function, an operator or a method to the folded network."""
    if is_in_place(operation_name(node.target)) and _is_number(rewriter, node.args[:1]):
        # Numbers such as sizes do not change, whatever the operator.
        node.target = getattr(operator, operation_name(node.target)[1:])
    full_name = operation_name(node.target)
    name = full_name.strip("_")
    if node.kwargs.get("out") is not None:
        raise Unfoldable(f"{name!r} writes its result into a tensor (out=)")
    is_changing = is_in_place(full_name) or bool(node.kwargs.get("inplace"))
    is_changing = is_changing or _is_in_place_by_position(node)
    if is_changing:
        check_in_place(rewriter, node)
    facts: Any = rewriter.facts
    args: Any = map_arg(node.args, lambda source: facts[source])
    kwargs: Any = map_arg(dict(node.kwargs), lambda source: facts[source])
    value = infer(name, list(args), dict(kwargs))
    is_random = name in RANDOM_FUNCTIONS
    if name == "dropout":
        training = args[2] if len(args) > 2 else kwargs.get("training", True)
        is_random = training is not False
    if name == "scaled_dot_product_attention":
        dropout = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
        is_random = dropout != 0.0
    if is_random:
        # Random values differ between members.
        rewriter.refuse_shared_change(node, is_changing)
        value = replace(value, domain=Domain.MEMBER)
    rewriter.emit(node, value)
    if name in ("view", "reshape") and value.domain is Domain.MEMBER:
        arguments = (rewriter.in_suffix[node], rewriter.count)
        rewriter.in_suffix[node] = rewriter.suffix.call_function(whole_blocks, arguments)
    if name == "squeeze":
        _check_rank(rewriter, node, value)


def _check_rank(rewriter: "Rewriter", node: torch.fx.Node, value: Value) -> None:
    """Let the graph check that an axis was removed, which depends on its size."""
    environments = (rewriter.in_prefix, rewriter.in_suffix)
    for graph, environment in zip((rewriter.prefix, rewriter.suffix), environments, strict=True):
        if node in environment:
            arguments = (environment[node], value.rank)
            environment[node] = graph.call_function(squeezed, arguments)


def _is_number(rewriter: "Rewriter", sources: Sequence[Any]) -> bool:
    """Return whether the first of some arguments is a size or another number."""
    source = sources[0] if sources else None
    return isinstance(source, torch.fx.Node) and rewriter.facts[source].kind in ("rows", "other")


def check_in_place(rewriter: "Rewriter", node: torch.fx.Node) -> None:
    """Refuse in-place operations on values that are used elsewhere.

    A value may be computed once and used by several chunks of members.
    """
    target = node.args[0] if node.args else None
    if not isinstance(target, torch.fx.Node) or target.op in ("placeholder", "get_attr"):
        raise Unfoldable("its code changes an input or a tensor in place")
    if len(target.users) > 1 or _may_alias(rewriter, target):
        raise Unfoldable("its code changes a value in place that is used elsewhere")
    domains = [rewriter.facts[source].domain for source in node.all_input_nodes]
    is_shared = target in rewriter.border and target not in rewriter.in_suffix
    if rewriter.facts[target].domain < max(domains) or is_shared:
        raise Unfoldable("its code changes a shared value in place")


def _may_alias(rewriter: "Rewriter", node: torch.fx.Node) -> bool:
    """Return whether a value may be, or share memory with, the input of its operation."""
    if node.op == "call_module":
        return isinstance(rewriter.root.get_submodule(str(node.target)), ALIASING_MODULES)
    return operation_name(node.target) in ALIASING


def _is_in_place_by_position(node: torch.fx.Node) -> bool:
    """Return whether a function of torch gets ``inplace=True`` without the name."""
    if not isinstance(node.target, FunctionType) or len(node.args) < 2:
        return False
    names = list(inspect.signature(node.target).parameters)
    if "inplace" not in names:
        return False
    index = names.index("inplace")
    return len(node.args) > index and node.args[index] is not False
