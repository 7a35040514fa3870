"""``nn.MultiheadAttention`` in the folded form: four projections and what is between them.

The module of torch reads its packed weights without calling layers, so the projections of members
are written out here, option by option.
"""

import inspect
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn import functional as F

from embens.graph.domains import Domain, Unfoldable, Value
from embens.graph.members import apply_weights, merges_weights, modulated_linear

if TYPE_CHECKING:
    from embens.graph.folding import Rewriter

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


@dataclass(frozen=True)
class AttentionOptions:
    """Options of an attention and of one call of it."""

    heads: int
    add_zero: bool
    dropout: float
    need_weights: bool
    average_weights: bool
    is_causal: bool


def write_attention(
    rewriter: "Rewriter", node: torch.fx.Node, module: nn.MultiheadAttention, name: str
) -> None:
    """Add an attention to the folded network."""
    bound = inspect.signature(nn.MultiheadAttention.forward).bind(module, *node.args, **node.kwargs)
    bound.apply_defaults()
    call = bound.arguments
    parts = [f"{name}.{projection}".lstrip(".") for projection in PROJECTIONS]
    _check_attention(rewriter, node, name, call, parts)
    facts = [rewriter.facts[source] for source in node.all_input_nodes]
    is_member = any(fact.domain is Domain.MEMBER for fact in facts)
    is_member = is_member or any(rewriter.has_difference(part) for part in parts)
    is_member = is_member or (module.training and module.dropout > 0)
    if not is_member:
        rewriter.emit(node, Value(Domain.SHARED, 3, "tuple"))
        return
    rewriter.has_positions = True
    arguments = []
    for key in ("query", "key", "value", "key_padding_mask", "attn_mask"):
        source = call[key]
        is_node = isinstance(source, torch.fx.Node)
        arguments.append(rewriter.argument(source, Domain.MEMBER) if is_node else source)
    sources = [call["query"], call["key"], call["value"]]
    if sources[0] is sources[1] is sources[2] and _has_all_modulations(rewriter, module, parts[:3]):
        q, k, v = _write_joint_projections(rewriter, arguments[0], module, name)
    else:
        q, k, v = (
            _write_projection(rewriter, x, module, name, index)
            for index, x in enumerate(arguments[:3])
        )
    added = [_tensor(rewriter, module, name, key) for key in ("bias_k", "bias_v")]
    options = (
        module.num_heads,
        module.add_zero_attn,
        module.dropout if module.training else 0.0,
        bool(call["need_weights"]),
        bool(call["average_attn_weights"]),
        bool(call["is_causal"]),
    )
    write = rewriter.suffix.call_function
    attended = write(attend, (q, k, v, *arguments[3:], added, options))
    result, attention = (write(operator.getitem, (attended, index)) for index in range(2))
    output = _write_projection(rewriter, result, module, name, 3)
    rewriter.in_suffix[node] = write(pair, (output, attention))
    rewriter.facts[node] = Value(Domain.MEMBER, 3, "tuple")


def _check_attention(
    rewriter: "Rewriter",
    node: torch.fx.Node,
    name: str,
    call: dict[str, Any],
    parts: list[str],
) -> None:
    """Raise if an attention cannot be folded."""
    module = call["self"]
    if type(module) is not nn.MultiheadAttention or not module.batch_first:
        raise Unfoldable(f"the batch is not the first axis of the attention {name!r}")
    is_separate = name in rewriter.per_member or parts[-1] in rewriter.per_member
    if is_separate or any(part in rewriter.low_rank for part in parts):
        raise Unfoldable(f"members have separate weights in the attention {name!r}")
    for key in ("query", "key", "value"):
        source = call[key]
        if not isinstance(source, torch.fx.Node) or rewriter.facts[source].rank != 3:
            raise Unfoldable(f"the batch is not the first axis of the attention {name!r}")
        if rewriter.facts[source].domain is Domain.CONSTANT:
            raise Unfoldable(f"an input of the attention {name!r} has no batch axis")
    if not call["need_weights"]:
        for user in node.users:
            is_item = user.target is operator.getitem
            if not is_item or (user.args[1] != 0 and user.users):
                raise Unfoldable(f"its code may use weights that {name!r} does not return")
    mask = call["attn_mask"]
    if isinstance(mask, torch.fx.Node):
        fact = rewriter.facts[mask]
        if fact.rank != 2 or fact.domain is not Domain.CONSTANT:
            raise Unfoldable(f"the mask of the attention {name!r} depends on the batch")


def _has_all_modulations(
    rewriter: "Rewriter", module: nn.MultiheadAttention, projections: list[str]
) -> bool:
    """Return whether inputs and outputs of packed projections are modulated."""
    keys = [(projection, kind) for projection in projections for kind in ("pre", "post")]
    return module.in_proj_weight is not None and all(key in rewriter.sites for key in keys)


def _write_joint_projections(
    rewriter: "Rewriter", x: torch.fx.Node, module: nn.MultiheadAttention, name: str
) -> list[torch.fx.Node]:
    """Write the projections of one value to queries, keys and values."""
    layers = [rewriter.layers[f"{name}.{part}".lstrip(".")] for part in PROJECTIONS[:3]]
    rewriter.width = max(rewriter.width, module.embed_dim)
    weight = _tensor(rewriter, module, name, "in_proj_weight")
    bias = _tensor(rewriter, module, name, "in_proj_bias")
    pre, post = (
        [rewriter.value_node(rewriter.sites[layer.name, kind].key) for layer in layers]
        for kind in ("pre", "post")
    )
    arguments = (x, weight, bias, pre, post, rewriter.count)
    projected = rewriter.suffix.call_function(joint_projections, arguments)
    return [rewriter.suffix.call_function(operator.getitem, (projected, i)) for i in range(3)]


def _write_projection(
    rewriter: "Rewriter", x: torch.fx.Node, module: nn.MultiheadAttention, name: str, index: int
) -> torch.fx.Node:
    """Write one of the projections with the modulations of its layer."""
    layer = rewriter.layers[f"{name}.{PROJECTIONS[index]}".lstrip(".")]
    rewriter.width = max(rewriter.width, layer.inputs or 1)
    if index == 3:
        out_name = f"{name}.out_proj".lstrip(".")
        weight = _tensor(rewriter, module.out_proj, out_name, "weight")
        bias = _tensor(rewriter, module.out_proj, out_name, "bias")
    else:
        rows = slice(index * module.embed_dim, (index + 1) * module.embed_dim)
        weight = _tensor(rewriter, module, name, f"{PROJECTIONS[index]}_weight")
        if weight is None:
            packed = _tensor(rewriter, module, name, "in_proj_weight")
            weight = rewriter.suffix.call_function(operator.getitem, (packed, rows))
        bias = _tensor(rewriter, module, name, "in_proj_bias")
        if bias is not None:
            bias = rewriter.suffix.call_function(operator.getitem, (bias, rows))
    return rewriter.write_linear(x, weight, bias, layer)


def _tensor(rewriter: "Rewriter", module: nn.Module, name: str, tensor: str) -> Any:
    if getattr(module, tensor, None) is None:
        return None
    return rewriter.tensor_nodes(f"{name}.{tensor}".lstrip("."))[1]


# Functions of the suffix


def pair(first: Any, second: Any) -> tuple[Any, Any]:
    """Return two values as a tuple."""
    return first, second


def joint_projections(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pre: list[Tensor],
    post: list[Tensor],
    count: int,
) -> Sequence[Tensor]:
    """Return queries, keys and values of one value, by one product if weights are merged.

    Args:
        x: ``(member · batch, time, feature)``.
        weight: Packed weight ``(3 · feature, feature)``.
        bias: Packed bias or None.
        pre: Values of the outputs of the three projections, each ``(member, feature)``.
        post: Values of their inputs.
        count: Number of members.
    """
    if merges_weights(x, weight, count):
        scales = torch.stack(post, 2).unsqueeze(3) * torch.stack(pre, 1).unsqueeze(1)
        weights = weight.t().contiguous() * scales.flatten(2).to(weight.dtype)
        biases = None if bias is None else torch.cat(pre, 1) * bias
        return apply_weights(x, weights, biases, count).chunk(3, -1)
    biases = (None, None, None) if bias is None else bias.chunk(3)
    outputs = []
    for part, part_bias, outer, inner in zip(weight.chunk(3), biases, pre, post, strict=True):
        outputs.append(modulated_linear(x, part, part_bias, outer, inner, 1, count, False))
    return outputs


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    added: list,
    options: tuple,
) -> tuple[Tensor, Tensor | None]:
    """Return the mean values and the weights of an attention, for blocks of rows of the members.

    Args:
        q: Projected queries ``(member · batch, time, feature)``.
        k: Projected keys ``(member · batch, source, feature)``.
        v: Projected values ``(member · batch, source, feature)``.
        key_padding_mask: ``(member · batch, source)`` or None.
        attn_mask: ``(time, source)`` or None.
        added: ``bias_k`` and ``bias_v``, or None.
        options: See :class:`AttentionOptions`.
    """
    settings = AttentionOptions(*options)
    sources = k.shape[1]
    if added[0] is not None:
        k = torch.cat([k, added[0].expand(len(k), -1, -1)], 1)
        v = torch.cat([v, added[1].expand(len(v), -1, -1)], 1)
    if settings.add_zero:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    extra = k.shape[1] - sources
    q, k, v = (x.unflatten(-1, (settings.heads, -1)).transpose(1, 2) for x in (q, k, v))
    mask = _joint_mask(attn_mask, key_padding_mask, q, extra)
    attention = None
    if settings.need_weights:
        scores = (q / math.sqrt(q.shape[-1])) @ k.mT
        attention = (scores if mask is None else scores + mask).softmax(-1)
        if settings.dropout:
            attention = F.dropout(attention, settings.dropout)
        result = attention @ v
        attention = attention.mean(1) if settings.average_weights else attention
    else:
        # Like torch: with a padding mask the mask is explicit instead of a hint.
        causal = settings.is_causal and key_padding_mask is None
        result = F.scaled_dot_product_attention(
            q, k, v, None if causal else mask, settings.dropout, is_causal=causal
        )
    return result.transpose(1, 2).flatten(2), attention


def _joint_mask(
    attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, extra: int
) -> Tensor | None:
    """Return what is added to scores ``(batch, head, time, source)``, or None."""
    mask = None if attn_mask is None else _additive(attn_mask, q)
    if padding is not None:
        padding = _additive(padding, q)[:, None, None, :]
        mask = padding if mask is None else mask + padding
    if mask is not None and extra:
        mask = F.pad(mask, (0, extra))
    return mask


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype is torch.bool:
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -math.inf)
    return mask.to(like.dtype)
