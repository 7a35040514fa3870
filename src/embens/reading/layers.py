"""Parameter layers: what can be modulated, and how each kind holds its weight.

Known are Linear, Conv*, ConvTranspose*, Embedding, the projections of ``nn.MultiheadAttention``,
RNN, LSTM and GRU, each as a whole, and what :func:`register_layer` adds::

    embens.register_layer(MyLinear, lambda layer: (layer.n_in, layer.n_out))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from embens.checks import closest

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")
NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)

Channels = Callable[[Any], tuple[int | None, int]]


@dataclass(frozen=True)
class Kind:
    """How layers of one kind hold their channels.

    Attributes:
        channels: gives the channels that a layer takes (None: indices) and gives.
        weight: the axes of its weight: "out in", "in out", or "" where the weight can't be scaled
            to have the effect of modulations.
    """

    channels: Channels
    weight: str = ""


_KINDS: dict[type | str, Kind] = {
    nn.Linear: Kind(lambda m: (m.in_features, m.out_features), "out in"),
    _ConvTransposeNd: Kind(lambda m: (m.in_channels, m.out_channels), "in out"),
    _ConvNd: Kind(lambda m: (m.in_channels, m.out_channels), "out in"),
    nn.Embedding: Kind(lambda m: (None, m.embedding_dim), "in out"),
    nn.RNNBase: Kind(
        lambda m: (m.input_size, (m.proj_size or m.hidden_size) * (1 + m.bidirectional))
    ),
    "transformers.pytorch_utils.Conv1D": Kind(lambda m: tuple(m.weight.shape), "in out"),
}
"""By class, or by the full name of a class of a library that need not be installed."""


def register_layer(kind: type | str, channels: Channels, *, weight: str = "") -> None:
    """Make layers of a class known, so that they can be modulated.

    Args:
        kind: the class, or its full name ("package.module.Class").
        channels: a function of a layer that returns how many channels it takes and gives. They are
            the last axis of its input and output.
        weight: where the output is linear in ``layer.weight`` and ``layer.bias``: the order of the
            weight's axes, "out in" or "in out". Members taken out of an ensemble are then plain
            layers; without it they keep a small wrapper.

    Example:
        >>> class Swapped(nn.Module):  # x @ weight, as in GPT-2
        ...     def __init__(self, takes, gives):
        ...         super().__init__()
        ...         self.weight = nn.Parameter(torch.randn(takes, gives))
        ...
        ...     def forward(self, x):
        ...         return x @ self.weight
        >>> import torch
        >>> register_layer(Swapped, lambda layer: layer.weight.shape, weight="in out")
    """
    if weight not in ("", "out in", "in out"):
        raise ValueError(f"weight: unknown {weight!r}{closest(weight, ('out in', 'in out'))}")
    if not callable(channels):
        raise TypeError(f"channels must be a function of a layer; got {channels!r}")
    _KINDS[kind] = Kind(channels, weight)


def kind_of(module: nn.Module) -> Kind | None:
    """Return what is known of a layer; None if it is not a parameter layer."""
    for cls in type(module).__mro__:
        known = _KINDS.get(cls) or _KINDS.get(f"{cls.__module__}.{cls.__qualname__}")
        if known is not None:
            return known
    return None


def is_layer(module: nn.Module) -> bool:
    """Return whether a module is a parameter layer that can be modulated."""
    return kind_of(module) is not None


def is_attention(module: nn.Module) -> bool:
    """Return whether a module holds four projections that are sites of their own."""
    return isinstance(module, nn.MultiheadAttention)


def parameter_layers(root: nn.Module) -> dict[str, nn.Module]:
    """Return the parameter layers by name, in the order of registration, each once.

    The projections of an ``nn.MultiheadAttention`` named ``attn`` are ``attn.q_proj`` … and
    ``attn.out_proj``; they stand for the attention module itself.
    """
    found: dict[str, nn.Module] = {}
    for name, module in root.named_modules():
        if is_attention(module):
            found.update({f"{name}.{p}".lstrip("."): module for p in PROJECTIONS})
        elif name not in found and is_layer(module):
            found[name] = module
    return found


def unknown_layers(root: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that hold a weight of two axes or more, but are no known layers."""
    known = {id(m) for m in root.modules() if is_layer(m) or isinstance(m, NORMS)}
    known |= {id(part) for m in root.modules() if is_attention(m) for part in m.modules()}

    def weighs(module: nn.Module) -> bool:
        items = module._parameters.items()
        return any(n.startswith("weight") and p is not None and p.dim() > 1 for n, p in items)

    return {n: m for n, m in root.named_modules() if id(m) not in known and weighs(m)}


def channels(name: str, layer: nn.Module) -> tuple[int | None, int]:
    """Return the channels that a layer takes and gives; ``name`` tells projections apart."""
    if isinstance(layer, nn.MultiheadAttention):
        projection = name.rpartition(".")[2]
        takes = {"k_proj": layer.kdim, "v_proj": layer.vdim}.get(projection, layer.embed_dim)
        return takes, layer.embed_dim
    kind = kind_of(layer)
    if kind is None:
        raise TypeError(f"{type(layer).__name__} is not a parameter layer")
    return kind.channels(layer)


def spatial_axes(layer: nn.Module) -> int:
    """Return how many axes follow the channels in a layer's input and output."""
    return len(layer.kernel_size) if isinstance(layer, _ConvNd) else 0


def modulate_weight(
    layer: nn.Module, weight: Tensor, pre: Tensor | None, post: Tensor | None
) -> Tensor:
    r"""Return :math:`v u^\top \circ W` for the weight of any layer but attention.

    ``pre`` is :math:`v`, ``(…, out)``, ``post`` is :math:`u`, ``(…, in)``; leading axes, those of
    several members, become leading axes of the result.
    """
    kind = kind_of(layer)
    assert kind is not None
    groups = layer.groups if isinstance(layer, _ConvNd) else 1
    v = None if pre is None else pre.unflatten(-1, (groups, -1, 1))
    u = None if post is None else post.unflatten(-1, (groups, 1, -1))
    scale = v if u is None else u if v is None else v * u  # (…, group, out, in), small
    if scale is None:
        return weight
    if kind.weight == "in out":
        scale = scale.mT
    if groups > 1:
        sizes = (len(weight) // groups, weight.shape[1])
        scale = scale.expand(*scale.shape[:-2], *sizes)
    scale = scale.flatten(-3, -2)
    return weight * scale.reshape(*scale.shape, *(1,) * spatial_axes(layer))
