"""Rules of attention in a traced forward: scores, masks, softmax and mean over values.

The mathematics is in :mod:`embens.theory.scores`.
"""

from __future__ import annotations

import math
import operator
from typing import Any, TypeGuard

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn import functional as F

from embens.theory.input_pair import InputPair, constant_part
from embens.theory.missing_rules import no_rule
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
from embens.theory.streams import Stream

MATMUL = {operator.matmul, torch.matmul, torch.bmm, "matmul", "bmm"}
_ADD = {operator.add, operator.iadd, torch.add, "add", "add_"}
_MULTIPLY = {operator.mul, operator.imul, torch.mul, "mul", "mul_"}
_DIVIDE = {operator.truediv, torch.div, "div"}
_SOFTMAX = {torch.softmax, F.softmax, "softmax"}
_FILL = {torch.masked_fill, "masked_fill", "masked_fill_"}


def multiply(queries: Any, keys: Any) -> Scores | None:
    """Return the scores of a matrix product of two streams."""
    if isinstance(queries, Stream) and isinstance(keys, Stream):
        return score(queries, keys)
    return None


def apply(node: torch.fx.Node, args: list[Any], kwargs: dict[str, Any], axes: int) -> Any:
    """Apply the rule of a function of scores or weights of attention.

    Args:
        node: The node of the graph.
        args: Its arguments.
        kwargs: Its keyword arguments.
        axes: Number of axes of its result.

    Raises:
        TypeError: If the function has no rule.
    """
    first = args[0]
    if isinstance(first, Weights):
        if node.target in MATMUL and isinstance(args[1], Stream):
            return attend(first, args[1])
        if node.target is F.dropout and not kwargs.get("training", True):
            return first
    elif node.target is torch.where:
        return _choose(node, *args)
    elif isinstance(first, Scores):
        return _apply_to_scores(node, args, kwargs, axes)
    elif node.target in _ADD | _MULTIPLY:
        return _apply_to_scores(node, args[::-1], kwargs, axes)
    raise no_rule(node)


def _apply_to_scores(
    node: torch.fx.Node, args: list[Any], kwargs: dict[str, Any], axes: int
) -> Any:
    """Apply a rule of scores: a factor, a mask, a softmax, or their product with values."""
    target: Any = node.target
    scores: Scores = args[0]
    second = args[1] if len(args) > 1 else None
    number = constant_part(second)
    if target in MATMUL and isinstance(second, Stream):
        return attend_linearly(scores, second)
    if isinstance(number, int | float):
        if target in _MULTIPLY:
            return scores.scaled(number)
        if target in _DIVIDE:
            return scores.scaled(1 / number)
    if target in _SOFTMAX and kwargs.get("dim", number) in (-1, axes - 1):
        return normalise_scores(scores)
    if target in _ADD and _is_mask(second):
        return scores.masked(add_mask(second, scores))
    if target in _FILL and _is_mask(second):
        value = kwargs.get("value", args[2] if len(args) > 2 else None)
        if isinstance(value, int | float):
            return scores.masked(fill_mask(second, value, scores))
    raise no_rule(node)


def _choose(node: torch.fx.Node, condition: Any, first: Any, second: Any) -> Scores:
    """Apply the rule of ``torch.where`` with scores and a number."""
    if _is_mask(condition) and isinstance(first, Scores) and isinstance(second, int | float):
        return first.masked(fill_mask(_inverted(condition), second, first))
    if _is_mask(condition) and isinstance(second, Scores) and isinstance(first, int | float):
        return second.masked(fill_mask(condition, first, second))
    raise no_rule(node)


def apply_module(
    node: torch.fx.Node, module: nn.Module, value: Scores | Weights, axes: int
) -> Scores | Weights:
    """Apply the rule of a module to scores or weights of attention.

    Args:
        node: The node of the graph.
        module: Its module.
        value: The value before it.
        axes: Number of axes of the value.

    Raises:
        TypeError: If the module has no rule there.
    """
    is_over_keys = isinstance(module, nn.Softmax) and module.dim in (-1, axes - 1)
    if isinstance(value, Scores) and is_over_keys:
        return normalise_scores(value)
    is_idle = isinstance(module, nn.Dropout) and not (module.p and module.training)
    if is_idle or isinstance(module, nn.Identity):
        return value
    raise no_rule(node)


def scaled_attention(node: torch.fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Stream:
    """Apply the rule of ``F.scaled_dot_product_attention``.

    Args:
        node: The node of the graph.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Raises:
        TypeError: If an argument or the scale has no rule.
    """
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
    options: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
    queries, keys, values = (options.get(name) for name in names[:3])
    if not set(options) <= set(names) or options.get("dropout_p"):
        raise no_rule(node)
    if not isinstance(queries, Stream):
        raise no_rule(node)
    if not isinstance(keys, Stream) or not isinstance(values, Stream):
        raise no_rule(node)
    transposed = keys.map(lambda s: s.replace(features_last=not s.features_last))
    scores = score(queries, transposed)
    scale = constant_part(options.get("scale"))
    scores = scores.scaled(scores.width**-0.5 if scale is None else scale)
    scores = _masked(node, scores, options)
    weights = normalise_scores(scores)
    return attend(weights, values.at(weights.depth))


def _masked(node: torch.fx.Node, scores: Scores, options: dict[str, Any]) -> Scores:
    """Return scores with the mask of ``F.scaled_dot_product_attention``."""
    mask = options.get("attn_mask")
    if options.get("is_causal"):
        mask = torch.ones(scores.state.pixels * 2, dtype=torch.bool).tril()
    if mask is None:
        return scores
    if not _is_mask(mask):
        raise no_rule(node)
    if _is_boolean(mask):
        return scores.masked(fill_mask(_inverted(mask), -math.inf, scores))
    return scores.masked(add_mask(mask, scores))


def _is_mask(value: Any) -> TypeGuard[Tensor | InputPair]:
    return isinstance(value.first if isinstance(value, InputPair) else value, Tensor)


def _inverted(mask: Tensor | InputPair) -> Tensor | InputPair:
    """Return the mask that is True where a mask is False."""
    return mask.map(torch.logical_not) if isinstance(mask, InputPair) else mask.logical_not()


def _is_boolean(mask: Tensor | InputPair) -> bool:
    values = mask.first if isinstance(mask, InputPair) else mask
    return values.dtype is torch.bool
