"""Layers of which members have separate tensors, in the folded form.

Functions named ``write_…`` add a layer to the suffix of a folded network; the others are what the
suffix calls. Rows of the members are consecutive blocks of the first axis. If ``is_shared``, the
input has one block that stands for all members.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn import functional as F

from embens.graph.domains import Domain, Unfoldable, Value
from embens.sites import Layer

if TYPE_CHECKING:
    from embens.graph.folding import Rewriter


def write_member_layer(
    rewriter: "Rewriter", node: torch.fx.Node, module: nn.Module, layer: Layer, value: Value
) -> torch.fx.Node:
    """Write a layer with low-rank or separate weights; return its node in the suffix."""
    if not rewriter.is_plain(module) and type(module) is not nn.Embedding:
        raise Unfoldable(
            f"members have separate weights in {layer.name!r} ({type(module).__name__})"
        )
    is_shared = value.domain is Domain.SHARED
    x = rewriter.input_of(node.args[0], is_shared)
    if layer.name in rewriter.low_rank:
        site = rewriter.low_rank[layer.name]
        weight, bias = rewriter.weights_of(module, layer)
        left = rewriter.value_node(f"{layer.name}.left")
        right = rewriter.value_node(f"{layer.name}.right")
        if site.kind == "additive":
            left = rewriter.scaled(left, rewriter.forward_factors(module)[0])
        if isinstance(module, nn.Linear) and site.kind == "additive":
            arguments = (x, weight, bias, left, right, rewriter.count, is_shared)
            return rewriter.suffix.call_function(low_rank_linear, arguments)
        weights = rewriter.suffix.call_function(low_rank_weights, (weight, left, right, site.kind))
    else:
        if "weight" not in rewriter.per_member[layer.module]:
            raise Unfoldable(f"members share the weight of {layer.name!r}")
        weights, bias = rewriter.weights_of(module, layer, separate=True)
    arguments = (x, weights, bias, rewriter.count, is_shared)
    if isinstance(module, nn.Linear):
        return rewriter.suffix.call_function(member_linear, arguments)
    if isinstance(module, nn.Embedding):
        has_options = module.max_norm is not None or module.padding_idx is not None
        if has_options or module.sparse or module.scale_grad_by_freq:
            raise Unfoldable(f"the embedding {layer.name!r} has options")
        return rewriter.suffix.call_function(
            member_embedding, (x, weights, rewriter.count, is_shared)
        )
    return rewriter.suffix.call_function(
        member_convolution, (*arguments, *convolution_options(module))
    )


def write_batch_norm(rewriter: "Rewriter", node: torch.fx.Node, module: Any, name: str) -> Any:
    """Write a BatchNorm with statistics of each member; return its node in the suffix."""
    separate = rewriter.per_member.get(name, set())
    if module.running_mean is not None:
        if module.momentum is None:
            raise Unfoldable(f"{name!r} averages its statistics cumulatively")
        if "running_mean" not in separate:
            raise Unfoldable(f"members share the running statistics of {name!r}")
    tensors = []
    flags = []
    for tensor in ("running_mean", "running_var", "weight", "bias", "num_batches_tracked"):
        full_name = f"{name}.{tensor}".lstrip(".")
        if getattr(module, tensor) is None:
            tensors.append(None)
        elif tensor in separate:
            tensors.append(rewriter.value_node(full_name))
        else:
            tensors.append(rewriter.tensor_nodes(full_name)[1])
        flags.append(tensor in separate)
    x = rewriter.argument(node.args[0], Domain.MEMBER)
    uses_batch = module.training or module.running_mean is None
    options = (tuple(flags), uses_batch, module.momentum, module.eps)
    return rewriter.suffix.call_function(
        member_batch_norm, (x, rewriter.count, tuple(tensors), *options)
    )


def write_layer_norm(
    rewriter: "Rewriter", node: torch.fx.Node, module: nn.Module, name: str
) -> torch.fx.Node:
    """Write a LayerNorm with a scale and shift of each member; return its node."""
    if type(module) is not nn.LayerNorm or rewriter.per_member[name] != {"weight", "bias"}:
        raise Unfoldable(f"members have separate tensors in {name!r} ({type(module).__name__})")
    x = rewriter.argument(node.args[0], Domain.MEMBER)
    weight = rewriter.value_node(f"{name}.weight".lstrip("."))
    bias = rewriter.value_node(f"{name}.bias".lstrip("."))
    shape = list(module.normalized_shape)
    return rewriter.suffix.call_function(
        member_layer_norm, (x, weight, bias, shape, module.eps, rewriter.count)
    )


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


# Functions of the suffix


def member_rows(x: Tensor, count: int, is_shared: bool) -> Tensor:
    """Return ``(member, row, feature)`` for the rows of some members."""
    if is_shared:
        rows = x.reshape(-1, x.shape[-1])
        return rows.expand(count, *rows.shape)
    return x.reshape(count, -1, x.shape[-1])


def joined_rows(products: Tensor, x: Tensor, is_shared: bool) -> Tensor:
    """Return ``(member, row, feature)`` as blocks of rows with the axes of the input ``x``."""
    rows = products.flatten(0, 1)
    if torch.compiler.is_exporting():
        # The exporter does not know that a view of any number of rows is contiguous.
        rows = rows.clone(memory_format=torch.contiguous_format)
    if x.dim() == 2:
        return rows
    row_count = x.shape[0]
    if is_shared:
        row_count = row_count * products.shape[0]
    return rows.unflatten(0, (row_count, *x.shape[1:-1]))


def member_linear(
    x: Tensor, weights: Tensor, biases: Tensor | None, count: int, is_shared: bool
) -> Tensor:
    """Apply ``(member, out, in)`` weights and ``(member, out)`` or ``(out,)`` biases."""
    rows = member_rows(x, count, is_shared)
    if biases is None:
        products = torch.bmm(rows, weights.mT)
    else:
        if biases.dim() == 2:
            biases = biases.unsqueeze(1)
        biases = biases.expand(count, rows.shape[1], weights.shape[1])
        products = torch.baddbmm(biases, rows, weights.mT)
    return joined_rows(products, x, is_shared)


def low_rank_weights(weight: Tensor, left: Tensor, right: Tensor, kind: str) -> Tensor:
    r"""Return :math:`W \circ (1 + B_a A_a)` or :math:`W + B_a A_a`, members first."""
    delta = (left @ right).view(-1, *weight.shape)
    if kind == "multiplicative":
        return weight * (1 + delta)
    return weight + delta


def low_rank_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    left: Tensor,
    right: Tensor,
    count: int,
    is_shared: bool,
) -> Tensor:
    r"""Apply :math:`W + B_a A_a`.

    With few rows :math:`W x + B (A x)` is cheaper than building the weights of each member. The
    bound was measured on a CPU.
    """
    row_count = x.numel() // x.shape[-1]
    rows_per_member = row_count if is_shared else row_count // count
    if not torch.compiler.is_compiling() and rows_per_member > 2 * weight.shape[0]:
        weights = low_rank_weights(weight, left, right, "additive")
        return member_linear(x, weights, bias, count, is_shared)
    shared = member_rows(F.linear(x, weight, bias), count, is_shared)
    rows = member_rows(x, count, is_shared)
    products = torch.baddbmm(shared, rows @ right.mT, left.mT)
    return joined_rows(products, x, is_shared)


def member_embedding(x: Tensor, weights: Tensor, count: int, is_shared: bool) -> Tensor:
    """Look indices up in ``(member, index, feature)`` tables."""
    indices = x.expand(count, *x.shape) if is_shared else x.view(count, -1, *x.shape[1:])
    first = torch.arange(count, device=x.device) * weights.shape[1]
    indices = indices + first.view(-1, *(1,) * (indices.dim() - 1))
    return F.embedding(indices, weights.flatten(0, 1)).flatten(0, 1)


def blocks_of(x: Tensor, count: int, is_shared: bool) -> list[Tensor]:
    """Return the rows of each member."""
    if is_shared:
        return [x] * count
    return list(x.chunk(count)) if count > 1 else [x]


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


def member_batch_norm(
    x: Tensor,
    count: int,
    tensors: tuple[Tensor | None, ...],
    separate: tuple[bool, ...],
    uses_batch: bool,
    momentum: float | None,
    eps: float,
) -> Tensor:
    """Normalise the rows of each member by its statistics, and update them."""
    batches = tensors[4]
    if uses_batch and batches is not None:
        batches.add_(1)
    outputs = []
    for a, block in enumerate(blocks_of(x, count, is_shared=False)):
        chosen = []
        for tensor, is_separate in zip(tensors, separate, strict=True):
            chosen.append(tensor[a] if tensor is not None and is_separate else tensor)
        mean, variance, weight, bias, _ = chosen
        outputs.append(
            F.batch_norm(block, mean, variance, weight, bias, uses_batch, momentum or 0.0, eps)
        )
    return outputs[0] if count == 1 else torch.cat(outputs)


def member_layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, shape: list[int], eps: float, count: int
) -> Tensor:
    """Normalise the last axes and apply the scale and shift of each member."""
    normalised = F.layer_norm(x, shape, eps=eps).unflatten(0, (count, -1))
    middle = (1,) * (normalised.dim() - 1 - len(shape))
    weight = weight.view(count, *middle, *shape)
    bias = bias.view(count, *middle, *shape)
    return torch.addcmul(bias, normalised, weight).flatten(0, 1)
