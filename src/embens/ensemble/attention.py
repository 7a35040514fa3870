"""Attention whose four projections are modulated.

``nn.MultiheadAttention`` never calls its projections. One member runs as torch's own attention with
modulated weights. For several at once, what torch does with the projections is written out here,
option by option, so that members can differ by rows like everywhere else.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embens.ensemble.layers import Modulation
from embens.ensemble.own import call_with
from embens.ensemble.run import Run, Unfoldable
from embens.ensemble.wrapping import Wrapper
from embens.reading.layers import PROJECTIONS


class ModulatedAttention(Wrapper):
    """An ``nn.MultiheadAttention`` whose q, k, v and output projections are modulated."""

    def __init__(self, attention: nn.MultiheadAttention, modulations: dict[str, Modulation]):
        super().__init__()
        self.attention = attention
        self.modulations = nn.ModuleDict(modulations)  # keys like "q_proj_pre"
        self.train(attention.training)

    def inner(self) -> nn.Module:
        return self.attention

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return what ``nn.MultiheadAttention`` does, for the running members."""
        run, attention = self.current.get(), self.attention
        masks = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
        if run.count == 1 and run.index is None:
            options = {"need_weights": need_weights, "average_attn_weights": average_attn_weights}
            weights = self._weights(lambda numbers: numbers.now(run)[0])
            options |= {**masks, "is_causal": is_causal}
            return call_with(attention, weights, (query, key, value), options)
        options = (need_weights, attn_mask, average_attn_weights, is_causal)
        inputs = (query, key, value)
        return attend(
            attention, lambda x, p: self._project(run, x, p), inputs, key_padding_mask, *options
        )

    def _weights(self, take: Callable[[Modulation], Tensor]) -> dict[str, Tensor]:
        """Return all parameters by name, with the numbers of one member in them."""
        found: dict[str, tuple[Tensor, Tensor | None]] = {}
        for projection in PROJECTIONS:
            weight, bias = projection_parameters(self.attention, projection)
            pre, post = self._find(projection)
            if pre is not None:
                v = take(pre)
                weight, bias = weight * v[:, None], None if bias is None else bias * v
            if post is not None:
                weight = weight * take(post)
            found[projection] = weight, bias
        return join_projections(self.attention, found)

    def _project(self, run: Run, x: Tensor, projection: str) -> Tensor:
        pre, post = self._find(projection)
        if post is not None:
            x = run.scale(x, post.now(run), 0, common=False)
        x = F.linear(x, *projection_parameters(self.attention, projection))
        return x if pre is None else run.scale(x, pre.now(run), 0, common=False)

    def _find(self, projection: str) -> list[Modulation | None]:
        keys = (f"{projection}_pre", f"{projection}_post")
        return [self.modulations._modules.get(key) for key in keys]  # type: ignore[misc]

    def parts(self) -> list[tuple[str, nn.Module]]:
        named = [(".".join(k.rsplit("_", 1)), m) for k, m in self.modulations.items()]
        return [("", self.attention), *named]

    def plain(self, member: int | None, memo: dict[int, Any]) -> nn.Module:
        """Return a plain attention with one member's weights."""
        if member is None:
            raise ValueError("attention has no mean weights: softmax is not linear")
        attention = copy.deepcopy(self.attention)
        with torch.no_grad():
            for name, tensor in self._weights(lambda numbers: numbers.of(member)).items():
                attention.get_parameter(name).copy_(tensor)
        return attention


def attend(
    attention: nn.MultiheadAttention,
    project: Callable[[Tensor, str], Tensor],
    inputs: Sequence[Tensor],
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return what an attention does, with projections of one's own; the batch is the first axis."""
    if inputs[0].dim() != 3 or not attention.batch_first:
        raise Unfoldable("the batch is not the first axis of an attention")
    q, k, v = map(project, inputs, PROJECTIONS)
    if attention.bias_k is not None:
        k = torch.cat([k, attention.bias_k.expand(len(k), -1, -1)], 1)
        v = torch.cat([v, attention.bias_v.expand(len(v), -1, -1)], 1)  # type: ignore[union-attr]
    added = k.shape[1] - inputs[1].shape[1]
    if attention.add_zero_attn:
        k, v = (torch.cat([x, x.new_zeros(len(x), 1, x.shape[2])], 1) for x in (k, v))
        added += 1
    heads = attention.num_heads
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    mask = _joint_mask(attn_mask, key_padding_mask, q, added)
    dropout = attention.dropout if attention.training else 0.0
    weights = None
    if need_weights:
        scores = (q / math.sqrt(q.shape[-1])) @ k.mT
        weights = (scores if mask is None else scores + mask).softmax(-1)
        weights = F.dropout(weights, dropout) if dropout else weights
        result = weights @ v
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        causal = is_causal and key_padding_mask is None and not added
        result = F.scaled_dot_product_attention(
            *(q, k, v), None if causal else mask, dropout, is_causal=causal
        )
    return project(result.transpose(1, 2).flatten(2), "out_proj"), weights


def projection_parameters(
    attention: nn.MultiheadAttention, projection: str
) -> tuple[Tensor, Tensor | None]:
    """Return the weight and bias of one projection, as views of the attention's own.

    By ``narrow``: torch holds the interpreter while it indexes, and two threads that take the same
    parameter, one of them by an index, can wait for each other for ever.
    """
    if projection == "out_proj":
        return attention.out_proj.weight, attention.out_proj.bias
    place = PROJECTIONS.index(projection)
    rows = (0, place * attention.embed_dim, attention.embed_dim)
    bias = None if attention.in_proj_bias is None else attention.in_proj_bias.narrow(*rows)
    if attention.in_proj_weight is None:
        return getattr(attention, f"{projection}_weight"), bias
    return attention.in_proj_weight.narrow(*rows), bias


def join_projections(
    attention: nn.Module, projections: Mapping[str, tuple[Tensor, Tensor | None]]
) -> dict[str, Tensor]:
    """Return parameters of an attention by name from weights and biases, perhaps of members."""
    found: dict[str, list[Tensor]] = {}
    for projection, (weight, bias) in projections.items():
        packed = projection != "out_proj" and attention.in_proj_weight is not None
        name = "in_proj_weight" if packed else f"{projection}_weight"
        found.setdefault(name, []).append(weight)
        if bias is not None:
            name = "out_proj_bias" if projection == "out_proj" else "in_proj_bias"
            found.setdefault(name, []).append(bias)
    axis = {name: -2 if name.endswith("weight") else -1 for name in found}
    joined = {k: v[0] if len(v) == 1 else torch.cat(v, axis[k]) for k, v in found.items()}
    return {k.replace("out_proj_", "out_proj."): v for k, v in joined.items()}


def _joint_mask(
    attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, added: int
) -> Tensor | None:
    """Return what is added to the scores ``(batch, head, time, source)``; None: nothing."""
    mask = None if attn_mask is None else _additive(attn_mask, q)
    if mask is not None and mask.dim() == 3:
        mask = mask.unflatten(0, (-1, q.shape[1]))
    if padding is not None:
        padding = _additive(padding, q)[:, None, None, :]
        mask = padding if mask is None else mask + padding
    return F.pad(mask, (0, added)) if mask is not None and added else mask


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype is torch.bool:
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -math.inf)
    return mask.to(like.dtype)
