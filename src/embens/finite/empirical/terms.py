r"""How parameters enter a network: the gradients of samples in factored form.

Most parameters are used by layers whose output is linear in them. Then the gradient of sample
:math:`i` is known from what went into the layer, :math:`h`, and from the *cotangent* of what came
out, :math:`c = \partial f / \partial z`, which one backward pass gives for all samples at once:

.. math:: \nabla_W f(x_i) = \sum_p c_{ip} \otimes h_{ip}

with :math:`p` over the positions (pixels, times, repeated uses) at which the layer is applied. A
convolution has patches for :math:`h`, a transposed one patches of :math:`c`, an embedding its
tokens; the scale of a norm layer and a modulation keep only the diagonal of the product.

A :class:`Term` is one such use in one pass, with the batch as the first axis of ``value`` and of
the cotangent. Axes of factors are ``inputs`` (batch, group, position, feature) and ``outputs``
(batch, class, group, position, channel).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd


@dataclass(frozen=True)
class Term:
    """One use of parameters in a pass; here one whose gradients are known as they are.

    Attributes:
        parameters: those whose gradients are asked for, by role.
        value: what the cotangent is multiplied with.
        edge: where in the graph the cotangent arrives.
        source: the node that ``value`` comes from; None for an input of the network.
        shape: of the cotangent.
    """

    parameters: dict[str, nn.Parameter]
    value: Tensor
    edge: Any
    source: Any
    shape: torch.Size

    @property
    def key(self) -> tuple[tuple[str, int], ...]:
        """The parameters' roles and ids."""
        return tuple((role, id(p)) for role, p in self.parameters.items())

    @property
    def form(self) -> Hashable:
        """What terms of one parameter must have in common for their gradients to be added."""
        return type(self).__name__

    def inputs(self, batch: int) -> Tensor:
        """Return :math:`h`; here of a layer with one group and its channels last."""
        return self.value.reshape(batch, 1, -1, self.value.shape[-1])

    def outputs(self, cotangent: Tensor, batch: int) -> Tensor:
        """Return :math:`c`; here of such a layer."""
        return cotangent.reshape(len(cotangent), batch, 1, -1, cotangent.shape[-1]).transpose(0, 1)

    def rows(self, role: str, cotangent: Tensor, batch: int) -> Tensor:
        """Return gradients that are short, ``(batch, class, number)``; here the cotangent is."""
        return cotangent


@dataclass(frozen=True)
class Affine(Term):
    """A Linear or convolution layer, with the factors of its parameters in the forward pass."""

    layer: nn.Module
    scales: dict[str, float]

    @property
    def form(self) -> Hashable:
        convolution = isinstance(self.layer, _ConvNd)
        groups = self.layer.groups if convolution else 1
        transposed = isinstance(self.layer, _ConvTransposeNd)
        return "affine", convolution, transposed, groups, tuple(self.scales.items())

    def inputs(self, batch: int) -> Tensor:
        layer, value = self.layer, self.value
        if not isinstance(layer, _ConvNd):
            return super().inputs(batch)
        images = value if value.dim() == len(layer.kernel_size) + 2 else value.unsqueeze(0)
        seen = by_group if isinstance(layer, _ConvTransposeNd) else patches
        return join_positions(seen(images, layer), batch)

    def outputs(self, cotangent: Tensor, batch: int) -> Tensor:
        layer, classes = self.layer, len(cotangent)
        if not isinstance(layer, _ConvNd):
            return super().outputs(cotangent, batch)
        images = cotangent.reshape(-1, *cotangent.shape[-1 - len(layer.kernel_size) :])
        seen = patches if isinstance(layer, _ConvTransposeNd) else by_group
        split = join_positions(seen(images, layer), classes * batch)
        return split.unflatten(0, (classes, batch)).transpose(0, 1)

    def rows(self, role: str, cotangent: Tensor, batch: int) -> Tensor:
        axes = len(self.layer.kernel_size) if isinstance(self.layer, _ConvNd) else 0
        rows = sum_to(cotangent, (cotangent.shape[-1 - axes], *(1,) * axes), batch)
        return rows * self.scales[role]


@dataclass(frozen=True)
class Lookup(Term):
    """An Embedding: ``value`` holds the tokens."""

    ignored: int | None = None

    @property
    def form(self) -> Hashable:
        return "lookup", self.ignored

    def inputs(self, batch: int) -> Tensor:
        """Return the tokens, -1 where there is no gradient."""
        tokens = self.value.reshape(batch, -1, 1)
        return tokens if self.ignored is None else tokens.masked_fill(tokens == self.ignored, -1)


@dataclass(frozen=True)
class Scale(Term):
    """Numbers of this shape, broadcast against a sample, that multiply ``value``; and a shift.

    ``repeat`` consecutive numbers are one parameter.
    """

    numbers: tuple[int, ...]
    repeat: int = 1

    def rows(self, role: str, cotangent: Tensor, batch: int) -> Tensor:
        product = cotangent if role == "bias" else cotangent * self.value
        rows = sum_to(product, self.numbers, batch)
        return rows.unflatten(-1, (-1, self.repeat)).sum(-1) if self.repeat > 1 else rows


def sum_to(values: Tensor, shape: tuple[int, ...], batch: int) -> Tensor:
    """Sum what broadcasting repeated: ``(class, row, …)`` to ``(batch, class, number)``."""
    first = values.dim() - len(shape)
    repeated = [first + i for i, size in enumerate(shape) if size == 1]
    values = values.sum(repeated) if repeated else values
    classes, numbers = len(values), values[0].numel() // batch
    kept = int(torch.Size(shape).numel())
    return values.reshape(classes, batch, numbers // kept, kept).sum(2).transpose(0, 1)


def patches(images: Tensor, layer: _ConvNd) -> Tensor:
    """Return what each position of a convolution sees, ``(image, group, position, feature)``.

    For a transposed one: what each position of its input contributes to. Channels are the last of a
    feature's axes, so that images in the format ``channels_last`` are copied in long pieces.
    """
    if isinstance(layer, _ConvTransposeNd):
        margins = [int(size) for size in reversed(layer.padding) for _ in range(2)]
    else:
        margins = layer._reversed_padding_repeated_twice
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    windows = F.pad(images, margins, mode=mode).movedim(1, -1)
    axes = len(layer.kernel_size)
    for i in range(axes):
        reach = (layer.kernel_size[i] - 1) * layer.dilation[i] + 1
        windows = windows.unfold(1 + i, reach, layer.stride[i])[..., :: layer.dilation[i]]
    windows = windows.movedim(1 + axes, -1).unflatten(-1, (layer.groups, -1)).movedim(-2, 1)
    return windows.reshape(*windows.shape[:2], windows.shape[2 : 2 + axes].numel(), -1)


def by_group(images: Tensor, layer: _ConvNd) -> Tensor:
    """Return the channels at each position, ``(image, group, position, channel)``."""
    return images.flatten(2).mT.unflatten(-1, (layer.groups, -1)).transpose(1, 2)


def join_positions(values: Tensor, batch: int) -> Tensor:
    """Make rows of one sample positions: ``(row, g, p, f)`` to ``(batch, g, position, f)``."""
    if len(values) == batch:
        return values
    return values.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3)
