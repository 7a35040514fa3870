r"""Modulations, and shared layers between two of them.

.. math:: x = u \cdot \phi(v \cdot z), \qquad v \circ W (u \circ x) = (v u^\top \circ W)\, x

A :class:`Modulation` holds one site's numbers for all members, ``(member, channel)``. A
:class:`Modulated` layer multiplies its input by ``post`` (the paper's :math:`u` of the layer
before) and its output, bias included, by ``pre`` (:math:`v`). Activations are modulated, not
weights, save where the weights are much the smaller (a convolution over many positions, run one
member at a time). :class:`ModulatedAttention` modulates the four projections of an
``nn.MultiheadAttention`` through its weights, because torch's attention never calls them.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from embens.ensemble.run import Cursor, Individual, Once, Own, Wrapper
from embens.laws import Law
from embens.reading import PROJECTIONS

__all__ = ["Modulated", "ModulatedAttention", "Modulation", "Once", "Own", "Scaled", "Wrapper"]


class Modulation(Individual):
    """The numbers of one site.

    Args:
        law: their distribution.
        members: how many members.
        size: channels; one number each.
        repeat: how many consecutive features make one channel (a Linear after a Flatten).
        trailing: how many axes follow the channels.
        trainable: a parameter, or a fixed mask.
        fresh: drawn anew at every pass, from the global generator.
        like: gives the dtype and device.
        generator: draws the numbers.
    """

    def __init__(
        self,
        law: Law,
        members: int,
        size: int,
        *,
        repeat: int = 1,
        trailing: int = 0,
        trainable: bool = True,
        fresh: bool = False,
        like: Tensor,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        self.law = law
        self.members, self.size, self.repeat, self.trailing = members, size, repeat, trailing
        self.fresh = fresh
        if fresh:
            self.register_buffer("values", torch.empty(0, dtype=like.dtype, device=like.device))
            return
        values = law.sample((members, size), generator, dtype=like.dtype, device=like.device)
        if trainable:
            self.values = nn.Parameter(values)
        else:
            self.register_buffer("values", values)

    def stacks(self) -> list[Tensor]:
        """Return the numbers of all members, shaped to multiply a layer's input or output."""
        values = self.values
        if self.fresh:
            values = self.law.sample(
                (self.members, self.size), dtype=values.dtype, device=values.device
            )
        if self.repeat > 1:
            values = values.repeat_interleave(self.repeat, dim=1)
        if self.trailing:
            values = values.reshape(*values.shape, *(1,) * self.trailing)
        return [values]

    def of(self, member: int | None) -> Tensor:
        """Return one member's numbers, ``(feature,)``; None: of all members."""
        if self.fresh:
            raise ValueError("fresh masks are drawn anew at each pass: no member has its own")
        values = self.values.detach().repeat_interleave(self.repeat, dim=1)
        return values if member is None else values[member]

    def extra_repr(self) -> str:
        """Return the line that ``repr`` shows."""
        kind = "fresh" if self.fresh else "trainable" if self._parameters else "frozen"
        repeat = f", repeat={self.repeat}" if self.repeat > 1 else ""
        return f"{self.law!r}, members={self.members}, size={self.size}{repeat}, {kind}"


def channel_axes(layer: nn.Module) -> int:
    """Return how many axes follow the channels in a layer's input and output."""
    if isinstance(layer, _ConvNd):
        return len(layer.kernel_size)
    return 0


def channels(layer: nn.Module, projection: str = "") -> tuple[int | None, int]:
    """Return the channels that a layer takes and gives; None for indices."""
    if isinstance(layer, nn.MultiheadAttention):
        takes = {"k_proj": layer.kdim, "v_proj": layer.vdim}.get(projection, layer.embed_dim)
        return takes, layer.embed_dim
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    if isinstance(layer, _ConvNd):
        return layer.in_channels, layer.out_channels
    if isinstance(layer, nn.Embedding):
        return None, layer.embedding_dim
    raise TypeError(f"{type(layer).__name__} is not a parameter layer")


class Modulates(Wrapper):
    """What holds modulations: where the cursor has their numbers is set by ``connect``.

    Attributes:
        cursor: the ensemble's.
        slots: the places of ``pre`` and ``post`` in ``cursor.values``.
    """

    cursor: Cursor
    slots: tuple[int | None, int | None]
    pre: Modulation | None
    post: Modulation | None

    def connect(self, cursor: Cursor) -> None:
        """Look up the places of the modulations, once they have them."""
        self.cursor = cursor
        self.slots = tuple(None if m is None else m.slot.start for m in (self.pre, self.post))  # type: ignore[assignment]


def modulate_weight(
    layer: nn.Module, weight: Tensor, pre: Tensor | None, post: Tensor | None
) -> Tensor:
    r"""Return :math:`v u^\top \circ W` for the weight of any parameter layer."""
    if pre is None and post is None:
        return weight
    if isinstance(layer, (nn.Linear, nn.Embedding)):
        if isinstance(layer, nn.Embedding):
            return weight if pre is None else weight * pre
        scale = 1.0 if pre is None else pre[:, None]
        return weight * (scale if post is None else scale * post)
    assert isinstance(layer, _ConvNd)
    groups = layer.groups
    takes, gives = layer.in_channels // groups, layer.out_channels // groups
    v = 1.0 if pre is None else pre.reshape(groups, gives, 1)
    u = 1.0 if post is None else post.reshape(groups, 1, takes)
    scale = torch.as_tensor(v * u).expand(groups, gives, takes)
    if isinstance(layer, _ConvTransposeNd):
        scale = scale.transpose(1, 2)
    return weight * scale.reshape(*weight.shape[:2], *(1,) * len(layer.kernel_size))


def is_linear_in_parameters(layer: nn.Module) -> bool:
    """Return whether scaling the weight and bias of a layer scales its output and input.

    True for torch's own layers as they are, and for a subclass that says so by an attribute
    ``linear_in_parameters``; not where a hook or a parametrization does something with the weight.
    """
    kind = type(layer)
    stock = kind.forward in _STOCK and getattr(kind, "_conv_forward", kind.forward) in _STOCK
    hooked = layer._forward_hooks or layer._forward_pre_hooks
    renormalised = isinstance(layer, nn.Embedding) and layer.max_norm is not None
    return (
        (stock or getattr(layer, "linear_in_parameters", False))
        and "weight" in layer._parameters
        and not hooked
        and not renormalised
    )


_STOCK_LAYERS = (
    *(nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_STOCK = {cls.forward for cls in _STOCK_LAYERS} | {
    cls._conv_forward for cls in (_ConvNd, nn.Conv1d, nn.Conv2d, nn.Conv3d)
}


def multiply(x: Tensor, numbers: Tensor) -> Tensor:
    """Multiply by one member's numbers; they never change the dtype."""
    return x * numbers if numbers.dtype is x.dtype else x * numbers.to(x.dtype)


class Modulated(Modulates):
    r"""A shared layer between two modulations: :math:`v \circ \mathrm{layer}(u \circ x)`."""

    def __init__(self, layer: nn.Module, pre: Modulation | None, post: Modulation | None):
        super().__init__()
        self.layer = layer
        self.pre = pre
        self.post = post
        self._is_convolution = isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and (
            type(layer).forward in _STOCK or hasattr(layer, "effective_parameters")
        )
        self.train(layer.training)

    @property
    def plain_layer(self) -> nn.Module:
        """The layer itself, without what computes it once for all members."""
        return self.layer.module if isinstance(self.layer, Once) else self.layer

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the running member's output; input is the name in torch's own layers."""
        x = input
        values = self.cursor.values or self.cursor.missing()
        pre, post = self.slots
        if post is not None:
            if self._is_convolution and self._weights_are_cheaper(x):
                return self._through_weights(x, values)
            x = multiply(x, values[post])
        x = self.layer(x, *args, **kwargs)
        return x if pre is None else multiply(x, values[pre])

    def _weights_are_cheaper(self, x: Tensor) -> bool:
        layer = self.layer
        return (
            not self.cursor.folded
            and 2 * layer.weight.numel() < x.numel()  # type: ignore[operator]
            and x.dtype == layer.weight.dtype
            and is_linear_in_parameters(layer)
        )

    def _through_weights(self, x: Tensor, values: list[Tensor]) -> Tensor:
        layer = self.layer
        parameters = getattr(layer, "effective_parameters", None)
        kernel, bias = (layer.weight, layer.bias) if parameters is None else parameters()
        pre, post = (None if slot is None else values[slot].reshape(-1) for slot in self.slots)
        weight = modulate_weight(layer, kernel, pre, post)  # type: ignore[arg-type]
        if bias is not None and pre is not None:
            bias = bias * pre  # type: ignore[operator]
        return layer._conv_forward(x, weight, bias)  # type: ignore[operator]

    def inner(self) -> nn.Module:
        """Return the layer."""
        return self.plain_layer

    def _inner_attribute(self, name: str) -> Any:
        layer = self.plain_layer
        if name in layer._parameters:
            raise AttributeError(
                f"the code reads the {name} of a modulated {type(layer).__name__} without "
                "calling the layer, which would leave its modulations out. Leave this layer "
                "out of embed's sites, or call it."
            )
        return getattr(layer, name)

    def plain(self, member: int | None) -> nn.Module:
        """Return a plain layer with one member's weights; None: the mean of all members'."""
        layer = copy.deepcopy(self.plain_layer)
        pre = None if self.pre is None else self.pre.of(member)
        post = None if self.post is None else self.post.of(member)
        if not is_linear_in_parameters(layer):
            if member is None:
                raise ValueError(
                    f"a {type(layer).__name__} with hooks, a parametrization or a forward of its "
                    "own has no mean weight"
                )
            return Scaled(layer, pre, post)
        bias = getattr(layer, "bias", None)
        with torch.no_grad():
            if member is None:
                weight = _mean_weight(layer, pre, post)
                pre = None if pre is None else pre.mean(0)
            else:
                weight = modulate_weight(layer, layer.weight, pre, post)  # type: ignore[arg-type]
            layer.weight.copy_(weight)  # type: ignore[operator]
            if bias is not None and pre is not None:
                bias.mul_(pre)
        return layer


def _mean_weight(layer: nn.Module, pre: Tensor | None, post: Tensor | None) -> Tensor:
    if pre is None or post is None:
        pre = None if pre is None else pre.mean(0)
        post = None if post is None else post.mean(0)
        return modulate_weight(layer, layer.weight, pre, post)  # type: ignore[arg-type]
    members = zip(pre, post, strict=True)
    return sum(modulate_weight(layer, layer.weight, v, u) for v, u in members) / len(pre)  # type: ignore[arg-type,return-value]


class Scaled(nn.Module):
    """One member of a layer whose weights can't hold its modulations."""

    pre: Tensor | None
    post: Tensor | None

    def __init__(self, layer: nn.Module, pre: Tensor | None, post: Tensor | None):
        super().__init__()
        self.layer = layer
        shape = (-1, *(1,) * channel_axes(layer))
        self.register_buffer("pre", None if pre is None else pre.reshape(shape))
        self.register_buffer("post", None if post is None else post.reshape(shape))
        self.train(layer.training)

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the member's output."""
        x = input if self.post is None else multiply(input, self.post)
        x = self.layer(x, *args, **kwargs)
        return x if self.pre is None else multiply(x, self.pre)


class ModulatedAttention(Wrapper):
    """An ``nn.MultiheadAttention`` whose q, k, v and output projections are modulated."""

    def __init__(self, attention: nn.MultiheadAttention, modulations: dict[str, Modulation]):
        super().__init__()
        self.attention = attention
        self.modulations = nn.ModuleDict(modulations)  # keys like "q_proj_pre"
        self.train(attention.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the attention with the running member's weights."""
        mine = {k: m.mine()[0] for k, m in self.modulations.items()}  # type: ignore[operator]
        return torch.func.functional_call(
            self.attention, modulated_projections(self.attention, mine), args, kwargs
        )

    def inner(self) -> nn.Module:
        """Return the attention."""
        return self.attention

    def plain(self, member: int | None) -> nn.Module:
        """Return a plain attention with one member's weights."""
        if member is None:
            raise ValueError("attention has no mean weights: softmax is not linear")
        attention = copy.deepcopy(self.attention)
        mine = {k: m.of(member) for k, m in self.modulations.items()}  # type: ignore[operator]
        with torch.no_grad():
            for path, value in modulated_projections(attention, mine).items():
                attention.get_parameter(path).copy_(value)
        return attention


def modulated_projections(
    attention: nn.MultiheadAttention, mine: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return an attention's weights and biases, by name, with one member's modulations in them."""

    def scaled(weight: Tensor, projection: str) -> Tensor:
        pre, post = mine.get(f"{projection}_pre"), mine.get(f"{projection}_post")
        weight = weight if pre is None else weight * pre[:, None]
        return weight if post is None else weight * post

    def scaled_bias(bias: Tensor, projection: str) -> Tensor:
        pre = mine.get(f"{projection}_pre")
        return bias if pre is None else bias * pre

    inputs = PROJECTIONS[:3]
    result = {"out_proj.weight": scaled(attention.out_proj.weight, "out_proj")}
    if attention.out_proj.bias is not None:
        result["out_proj.bias"] = scaled_bias(attention.out_proj.bias, "out_proj")
    if attention._qkv_same_embed_dim:
        parts = attention.in_proj_weight.chunk(3)  # type: ignore[union-attr]
        result["in_proj_weight"] = torch.cat(
            [scaled(w, p) for w, p in zip(parts, inputs, strict=True)]
        )
    else:
        for projection in inputs:
            name = f"{projection}_weight"
            result[name] = scaled(getattr(attention, name), projection)
    if attention.in_proj_bias is not None:
        parts = attention.in_proj_bias.chunk(3)
        result["in_proj_bias"] = torch.cat(
            [scaled_bias(b, p) for b, p in zip(parts, inputs, strict=True)]
        )
    return result
