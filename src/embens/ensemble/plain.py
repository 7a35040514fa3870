"""Out of an ensemble again: one member, the mean of all, or the network without its members."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import nn

from embens.ensemble.attention import ModulatedAttention
from embens.ensemble.layers import Modulated
from embens.ensemble.wrapping import Wrapper
from embens.reading import left_over


def plain(network: nn.Module, member: int | None) -> nn.Module:
    """Return a plain network with the weights of one member; None: the mean of all members'."""
    memo: dict[int, Any] = left_over(network)
    for module in reversed(list(network.modules())):
        if isinstance(module, Wrapper):
            memo[id(module)] = module.plain(member, memo)
    network = copy.deepcopy(network, memo)
    for module in network.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = _fast_activation(module.activation)
    return network


def _fast_activation(activation: Any) -> int:
    """Return torch's own code for the activations that its fast path knows."""
    if activation is nn.functional.relu or isinstance(activation, nn.ReLU):
        return 1
    if activation is nn.functional.gelu or isinstance(activation, nn.GELU):
        return 2
    return 0


def without_members(network: nn.Module) -> nn.Module:
    """Return the network without its modulations, in which layers have the reference's names.

    Parameters are not copied; where members have tensors of their own, these stay stacked.
    """
    memo: dict[int, object] = {**left_over(network), **{id(p): p for p in network.parameters()}}
    for module in reversed(list(network.modules())):
        if isinstance(module, Wrapper):
            memo[id(module)] = copy.deepcopy(module.inner(), memo)
    return copy.deepcopy(network, memo)


def walk(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules of an ensemble's network by the names that they have in the reference."""
    yield name, module
    inside: list[tuple[nn.Module | None, str]]
    if isinstance(module, Modulated):
        inside = [(module.layer, name), (module.pre, f"{name}.pre"), (module.post, f"{name}.post")]
    elif isinstance(module, ModulatedAttention):
        inside = [(module.attention, name)]
        for key, modulation in module.modulations.items():
            projection, _, kind = key.rpartition("_")
            inside.append((modulation, f"{name}.{projection}.{kind}"))
    elif isinstance(module, Wrapper):
        inside = [(module.inner(), name)]
    else:
        inside = [(child, f"{name}.{key}") for key, child in module.named_children()]
    for child, path in inside:
        if child is not None:
            yield from walk(child, path.lstrip("."))
