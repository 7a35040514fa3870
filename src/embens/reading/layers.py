"""Parameter layers: what can be modulated, and how each kind holds its weight.

Known are Linear (also as a projection of an attention), Conv*, ConvTranspose*, Embedding, the
input of RNN, LSTM and GRU, and what :func:`register_layer` adds::

    embens.register_layer(MyLinear, lambda layer: (layer.n_in, layer.n_out))
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from embens.checks import closest

NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)

Channels = Callable[[Any], tuple[int | None, int | None]]


@dataclass(frozen=True)
class Kind:
    """How layers of one kind hold their channels."""

    channels: Channels
    """Gives the channels that a layer takes (None: indices) and gives (None: a recurrent layer's,
    whose output is its state as well and has no modulation)."""
    weight: str = ""
    """The axes of its weight: "out in", "in out", or "" where scaling it is no modulation."""


_KINDS: dict[type | str, Kind] = {
    nn.Linear: Kind(lambda m: (m.in_features, m.out_features), "out in"),
    _ConvTransposeNd: Kind(lambda m: (m.in_channels, m.out_channels), "in out"),
    _ConvNd: Kind(lambda m: (m.in_channels, m.out_channels), "out in"),
    nn.Embedding: Kind(lambda m: (None, m.embedding_dim), "in out"),
    nn.RNNBase: Kind(lambda m: (m.input_size, None)),
    "transformers.pytorch_utils.Conv1D": Kind(lambda m: tuple(m.weight.shape), "in out"),
}
"""By class, or by the full name of a class of a library that need not be installed."""


def register_layer(kind: type | str, channels: Channels, *, weight: str = "") -> None:
    """Make layers of a class, or of a full name ("package.module.Class"), known.

    ``channels`` is a function of a layer that returns how many channels it takes and gives, the
    last axis of its input and output. Where the output is linear in ``layer.weight`` and
    ``layer.bias``, ``weight`` is the order of the weight's axes, "out in" or "in out": members
    taken out of an ensemble are then plain layers; without it they keep a small wrapper.

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


def parameter_layers(root: nn.Module) -> dict[str, nn.Module]:
    """Return the parameter layers by name, in the order of registration, each once."""
    return {name: module for name, module in root.named_modules() if is_layer(module)}


def unknown_layers(root: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that hold a weight of two axes or more, but are no known layers."""
    known = {id(m) for m in root.modules() if is_layer(m) or isinstance(m, NORMS)}

    def weighs(module: nn.Module) -> bool:
        items = module._parameters.items()
        return any(n.startswith("weight") and p is not None and p.dim() > 1 for n, p in items)

    return {n: m for n, m in root.named_modules() if id(m) not in known and weighs(m)}


def channels(layer: nn.Module) -> tuple[int | None, int | None]:
    """Return the channels that a layer takes and gives."""
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
    r"""Return :math:`v u^\top \circ W`, from ``pre``, ``(…, out)``, and ``post``, ``(…, in)``.

    Leading axes, those of several members, become leading axes of the result.
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
