"""Attention whose four projections are layers that are called.

``nn.MultiheadAttention`` reads the weights of its projections without calling them, so that nothing
could differ between members there. A reference is read and embedded with :class:`Attention` in its
place: four Linear layers, ``q_proj`` to ``out_proj``, and what torch does between them, written out
option by option. Members that are taken out have torch's own again.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


class Unfoldable(RuntimeError):
    """Several members can't run as one batch here; they can one by one."""


class Attention(nn.MultiheadAttention):
    """What an ``nn.MultiheadAttention`` does, by the calls of four Linear layers."""

    current: Any = None  # the ensemble's
    in_proj_bias = _qkv_same_embed_dim = None  # torch's layers look here for a way past the calls

    def __init__(self, attention: nn.MultiheadAttention):
        nn.Module.__init__(self)
        known = type(attention).forward is nn.MultiheadAttention.forward
        if not known or list(attention._modules) != ["out_proj"]:
            raise TypeError(
                f"a {type(attention).__name__} with a forward or a parametrization of its own "
                "can't be embedded: what it does with its projections is not known. Write it with "
                "four Linear layers that are called."
            )
        others = ("_parameters", "_modules", "_qkv_same_embed_dim")
        self.__dict__.update({n: v for n, v in vars(attention).items() if n not in others})
        weight: Any = attention.in_proj_weight
        weights = attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight
        weights = weights if weight is None else weight.split(self.embed_dim)
        bias = attention.in_proj_bias
        biases = (None,) * 3 if bias is None else bias.split(self.embed_dim)
        self.q_proj, self.k_proj, self.v_proj = map(_linear, weights, biases)
        self.out_proj = attention.out_proj
        self.bias_k, self.bias_v = attention.bias_k, attention.bias_v

    def __getattr__(self, name: str) -> Any:
        if name.startswith("in_proj") or name.endswith("_proj_weight"):
            raise AttributeError(
                f"the code reads the {name} of an nn.MultiheadAttention without calling it, which "
                "would leave modulations out: call it, or write it with four Linear layers"
            )
        return super().__getattr__(name)

    __setstate__ = nn.Module.__setstate__

    def _new(self, device: Any) -> nn.MultiheadAttention:
        return nn.MultiheadAttention(
            *(self.embed_dim, self.num_heads, self.dropout, self.q_proj.bias is not None),
            *(self.bias_k is not None, self.add_zero_attn, self.kdim, self.vdim),
            *(self.batch_first, device, self.q_proj.weight.dtype),
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all parameters by the law that torch's own has."""
        drawn = Attention(self._new(self.q_proj.weight.device))
        for ours, theirs in zip(self.parameters(), drawn.parameters(), strict=True):
            ours.copy_(theirs)

    def plain(self) -> nn.MultiheadAttention:
        """Return torch's own, with the parameters of this one."""
        parts = (self.q_proj, self.k_proj, self.v_proj)
        made: Any = self._new("meta")
        if made.in_proj_weight is None:
            made.q_proj_weight, made.k_proj_weight, made.v_proj_weight = (p.weight for p in parts)
        else:
            made.in_proj_weight = _joined([part.weight for part in parts])
        if made.in_proj_bias is not None:
            made.in_proj_bias = _joined([part.bias for part in parts])
        made.out_proj, made.bias_k, made.bias_v = self.out_proj, self.bias_k, self.bias_v
        made.__dict__.update({n: v for n, v in vars(self).items() if n.endswith("_hooks")})
        return made.train(self.training)

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
        """Return what ``nn.MultiheadAttention`` does."""
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal is a hint about attn_mask, which attention needs as well")
        alone = query.dim() == 2
        run = None if self.current is None else self.current.run
        if run is not None and run.count > 1 and (alone or not self.batch_first):
            raise Unfoldable("the batch is not the first axis of an attention")
        inputs = (query, key, value)
        if alone:
            inputs = tuple(x.unsqueeze(0) for x in inputs)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            inputs = tuple(x.transpose(0, 1) for x in inputs)
        q, k, v = self.q_proj(inputs[0]), self.k_proj(inputs[1]), self.v_proj(inputs[2])
        if self.bias_k is not None:
            k = torch.cat([k, self.bias_k.expand(len(k), -1, -1)], 1)
            v = torch.cat([v, self.bias_v.expand(len(v), -1, -1)], 1)  # type: ignore[union-attr]
        if self.add_zero_attn:
            k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        added = k.shape[1] - inputs[1].shape[1]
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        mask = _joint_mask(attn_mask, key_padding_mask, q, added)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = (q / math.sqrt(q.shape[-1])) @ k.mT
            weights = (scores if mask is None else scores + mask).softmax(-1)
            weights = F.dropout(weights, dropout) if dropout else weights
            result = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            causal = is_causal and key_padding_mask is None  # torch masks added keys too then
            result = F.scaled_dot_product_attention(
                *(q, k, v), None if causal else mask, dropout, is_causal=causal
            )
        result = self.out_proj(result.transpose(1, 2).flatten(2))
        if alone:
            return result.squeeze(0), None if weights is None else weights.squeeze(0)
        return result if self.batch_first else result.transpose(0, 1), weights


def _linear(weight: Any, bias: Tensor | None) -> nn.Linear:
    """Return a Linear layer on the memory of these tensors."""
    rows, columns = weight.shape
    linear = nn.Linear(columns, rows, bias is not None, device="meta", dtype=weight.dtype)
    linear.weight = nn.Parameter(weight.detach(), weight.requires_grad)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), bias.requires_grad)
    return linear


def _joined(parameters: list[Any]) -> nn.Parameter:
    return nn.Parameter(torch.cat([p.detach() for p in parameters]), parameters[0].requires_grad)


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
