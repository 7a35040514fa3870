"""Modules with several parameter layers inside, in the data flow of a network.

The layers of an attention and of a recurrent module are known. Any other module that is not looked
into is a black box: its layers are taken in the order of their registration.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from embens.graph.misreadings import Untraceable
from embens.graph.operations import RANDOM_MODULES
from embens.sites import is_layer

if TYPE_CHECKING:
    from embens.graph.reading import Flow, FlowReader, Trail


def pass_attention(flow: "Flow", name: str, trails: list["Trail"], joint: "Trail") -> "Trail":
    """Return the trail of the output of an ``nn.MultiheadAttention``.

    Args:
        flow: The flow, to which the four projections are added.
        name: Name of the attention.
        trails: Trails of query, key and value, or one trail for all of them.
        joint: Trail of all inputs together.
    """
    projections = [f"{name}.{part}".lstrip(".") for part in ("q_proj", "k_proj", "v_proj")]
    sources = trails[:3] if len(trails) >= 3 else (trails * 3)[:3]
    for projection, source in zip(projections, sources, strict=False):
        flow.upstream.setdefault(projection, set()).update(source.upstream)
    out = f"{name}.out_proj".lstrip(".")
    before = joint.upstream.union(projections)
    flow.upstream.setdefault(out, set()).update(before)
    return joint.through(before | {out}, frozenset({out}))


def pass_recurrent(reader: "FlowReader", name: str, module: nn.RNNBase, inputs: "Trail") -> "Trail":
    """Return the trail of the output of a recurrent module.

    Its levels follow each other; each has one or two directions.
    """
    directions = 2 if module.bidirectional else 1
    names = [layer.name for layer in reader.layers.values() if layer.module == name]
    upstream = inputs.upstream
    for start in range(0, len(names), directions):
        level = names[start : start + directions]
        for layer_name in level:
            reader.flow.upstream.setdefault(layer_name, set()).update(upstream)
        upstream = upstream.union(level)
    return inputs.through(upstream, random=module.dropout > 0)


def pass_black_box(reader: "FlowReader", module: nn.Module, name: str, inputs: "Trail") -> "Trail":
    """Return the trail of the output of a module that is not looked into.

    Its layers are taken in the order of their registration.
    """
    parts = []
    inside_attention: set[int] = set()
    for part in module.modules():
        if isinstance(part, nn.MultiheadAttention):
            inside_attention |= {id(child) for child in part.children()}
        if is_layer(part) and id(part) not in inside_attention:
            parts.append(part)
    if len(parts) > 1 and not type(module).__module__.startswith("torch.nn"):
        place = repr(name) if name else "the reference"
        reader.flow.guesses.append(f"the order of the layers inside {place}")
    is_random = any(isinstance(part, RANDOM_MODULES) for part in module.modules())
    trail = inputs.through(inputs.upstream, random=is_random)
    for part in parts:
        trail = reader.apply_module(part, reader.names[id(part)], [trail])
        trail = replace(trail, affine=frozenset(), channels=None)
    for part_name, part in module.named_modules():
        if not is_layer(part) and any(True for _ in part.buffers(recurse=False)):
            full_name = f"{name}.{part_name}".strip(".")
            reader.note_buffers(full_name, trail)
    return trail


# Transformer encoders, traced without their checks of concrete values


def trace_encoder(
    encoder: nn.TransformerEncoder,
    src: Any,
    mask: Any = None,
    src_key_padding_mask: Any = None,
    is_causal: bool | None = None,
) -> Any:
    """Do what ``nn.TransformerEncoder`` does, without its checks of concrete values.

    Raises:
        Untraceable: If torch would do something else: it returns zeros at padded positions where
            no gradients are needed, and leaves masks to ``is_causal``.
    """
    needs_gradients = torch.is_grad_enabled() and any(p.requires_grad for p in encoder.parameters())
    if src_key_padding_mask is not None and not encoder.training and not needs_gradients:
        raise Untraceable("TransformerEncoder with a padding mask runs another kernel")
    if is_causal:
        raise Untraceable("TransformerEncoder is called with is_causal=True")
    for layer in encoder.layers:
        src = layer(src, src_mask=mask, src_key_padding_mask=src_key_padding_mask)
    if encoder.norm is not None:
        src = encoder.norm(src)
    return src


def trace_encoder_layer(
    layer: nn.TransformerEncoderLayer,
    src: Any,
    src_mask: Any = None,
    src_key_padding_mask: Any = None,
    is_causal: bool = False,
) -> Any:
    """Do what ``nn.TransformerEncoderLayer`` does, without its fused kernel."""
    if is_causal:
        raise Untraceable("TransformerEncoderLayer is called with is_causal=True")

    def attend(x: Any) -> Any:
        x, _ = layer.self_attn(
            x,
            x,
            x,
            attn_mask=src_mask,
            key_padding_mask=src_key_padding_mask,
            need_weights=False,
        )
        return layer.dropout1(x)

    def feed_forward(x: Any) -> Any:
        x = layer.linear2(layer.dropout(layer.activation(layer.linear1(x))))
        return layer.dropout2(x)

    if layer.norm_first:
        src = src + attend(layer.norm1(src))
        return src + feed_forward(layer.norm2(src))
    src = layer.norm1(src + attend(src))
    return layer.norm2(src + feed_forward(src))
