"""Norm layers with statistics, scales and shifts of each member, in the folded form.

Functions named ``write_…`` add a layer to the suffix of a folded network; the others are what the
suffix calls.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn import functional as F

from embens.graph.domains import Domain, Unfoldable
from embens.graph.members import blocks_of

if TYPE_CHECKING:
    from embens.graph.folding import Rewriter


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
