"""Convolutions with modulations or separate weights of members, in the folded form."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from embens.graph.members import blocks_of, scale_members


def convolution_options(module: Any) -> tuple[str, dict[str, Any]]:
    """Return the name of a convolution's function and its options."""
    name = type(module).__name__.replace("ConvTranspose", "conv_transpose").replace("Conv", "conv")
    options = {
        "stride": module.stride,
        "padding": module.padding,
        "dilation": module.dilation,
        "groups": module.groups,
    }
    if "transpose" in name:
        options["output_padding"] = module.output_padding
    return name, options


def modulated_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pre: Tensor,
    post: Tensor | None,
    repeat: int,
    count: int,
    is_shared: bool,
    transposed: bool,
    function: str,
    options: dict[str, Any],
) -> Tensor:
    """Apply a convolution with modulated outputs and, unless ``post`` is None, inputs.

    Weights are smaller than activations, so a single member's weights are merged.
    """
    convolve = getattr(F, function)
    spatial = x.dim() - 2
    # A compiled graph should be right for any number of rows, so it does not compare sizes.
    is_small = torch.compiler.is_compiling() or weight.numel() < x.numel()
    if count == 1 and is_small and (post is None or options["groups"] == 1):
        scale = pre.to(weight.dtype).mT
        if post is not None:
            scale = scale * post.to(weight.dtype)
        if transposed:
            scale = scale.mT
        weight = weight * scale.view(*scale.shape, *(1,) * spatial)
        if bias is not None:
            bias = bias * pre[0].to(bias.dtype)
        return convolve(x, weight, bias, **options)
    if post is not None:
        x = scale_members(x, post, count, spatial, repeat, is_shared)
        is_shared = False
    x = convolve(x, weight, bias, **options)
    return scale_members(x, pre, count, spatial, 1, is_shared)


def member_convolution(
    x: Tensor,
    weights: Tensor,
    biases: Tensor | None,
    count: int,
    is_shared: bool,
    function: str,
    options: dict[str, Any],
) -> Tensor:
    """Convolve the rows of each member with its weights."""
    convolve = getattr(F, function)
    outputs = []
    for a, block in enumerate(blocks_of(x, count, is_shared)):
        bias = biases[a] if biases is not None and biases.dim() == 2 else biases
        outputs.append(convolve(block, weights[a], bias, **options))
    return outputs[0] if count == 1 else torch.cat(outputs)
