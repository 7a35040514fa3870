r"""How parameters enter a network: the gradients of samples in factored form.

Most parameters are used by layers whose output is linear in them. Then the gradient of sample
:math:`i` is known from what went into the layer, :math:`h`, and from the *cotangent* of what came
out, :math:`c = \partial f / \partial z`, which one backward pass gives for all samples at once:

.. math:: \nabla_W f(x_i) = \sum_p c_{ip} \otimes h_{ip}

with :math:`p` over the positions (pixels, times, repeated uses) at which the layer is applied. A
convolution is this with patches for :math:`h`; a transposed one with patches of :math:`c`; an
embedding with indicators of its tokens; the scale of a norm layer and a modulation keep only the
diagonal of the product.

A :class:`Term` is one such use in one pass. The batch is the first axis of ``value`` and of the
cotangent, with a fixed number of rows for each sample. Axes of factors are ``inputs`` (batch,
group, feature, position) and ``outputs`` (batch, class, group, channel, position).
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
    """One use of parameters in a pass.

    Attributes:
        parameters: the parameters, by role; the gradient of the others is not asked for.
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
    def form(self) -> Hashable:
        """What terms of one parameter must have in common for their gradients to be added."""
        raise NotImplementedError


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
        """Return :math:`h`, ``(batch, group, feature, position)``."""
        layer, value = self.layer, self.value
        if not isinstance(layer, _ConvNd):
            return value.reshape(batch, 1, -1, value.shape[-1]).mT
        if isinstance(layer, _ConvTransposeNd):
            return _by_group(_with_batch(value, layer), layer.groups, batch)
        return join_positions(patches(_with_batch(value, layer), layer), batch)

    def outputs(self, cotangent: Tensor, batch: int) -> Tensor:
        """Return :math:`c`, ``(batch, class, group, channel, position)``."""
        layer, classes = self.layer, len(cotangent)
        if not isinstance(layer, _ConvNd):
            rows = cotangent.reshape(classes, batch, 1, -1, cotangent.shape[-1])
            return rows.mT.transpose(0, 1)
        images = cotangent.reshape(-1, *cotangent.shape[-1 - len(layer.kernel_size) :])
        if isinstance(layer, _ConvTransposeNd):
            split = join_positions(patches(images, layer), classes * batch)
        else:
            split = _by_group(images, layer.groups, classes * batch)
        return split.unflatten(0, (classes, batch)).transpose(0, 1)

    def bias_rows(self, cotangent: Tensor, batch: int) -> Tensor:
        """Return the gradients of the bias, ``(batch, class, channel)``."""
        axes = len(self.layer.kernel_size) if isinstance(self.layer, _ConvNd) else 0  # type: ignore[arg-type]
        return sum_to(cotangent, (cotangent.shape[-1 - axes], *(1,) * axes), batch)


@dataclass(frozen=True)
class Lookup(Term):
    """An Embedding: ``value`` holds the tokens."""

    ignored: int | None = None

    @property
    def form(self) -> Hashable:
        return "lookup", self.ignored

    def tokens(self, batch: int) -> Tensor:
        """Return the tokens, ``(batch, position)``; -1 where there is no gradient."""
        tokens = self.value.reshape(batch, -1)
        return tokens if self.ignored is None else tokens.masked_fill(tokens == self.ignored, -1)

    def outputs(self, cotangent: Tensor, batch: int) -> Tensor:
        """Return the cotangents, ``(batch, class, 1, channel, position)``."""
        classes, channels = len(cotangent), cotangent.shape[-1]
        return cotangent.reshape(classes, batch, 1, -1, channels).mT.transpose(0, 1)


@dataclass(frozen=True)
class Scale(Term):
    """Numbers of the given shape that multiply ``value`` elementwise, with a shift beside them.

    Attributes:
        numbers: their shape, as they are broadcast against a sample.
        repeat: how many consecutive numbers are one parameter.
    """

    numbers: tuple[int, ...]
    repeat: int = 1

    @property
    def form(self) -> Hashable:
        return "scale"

    def rows(self, role: str, cotangent: Tensor, batch: int) -> Tensor:
        """Return the gradients, ``(batch, class, number)``."""
        product = cotangent if role == "bias" else cotangent * self.value
        rows = sum_to(product, self.numbers, batch)
        return rows.unflatten(-1, (-1, self.repeat)).sum(-1) if self.repeat > 1 else rows


def sum_to(values: Tensor, shape: tuple[int, ...], batch: int) -> Tensor:
    """Sum what broadcasting repeated: ``(class, row, …)`` to ``(batch, class, number)``.

    Example:
        >>> sum_to(torch.ones(1, 4, 3, 5), (3, 1), batch=2)
        tensor([[[10., 10., 10.]],
        <BLANKLINE>
                [[10., 10., 10.]]])
    """
    first = values.dim() - len(shape)
    repeated = [first + i for i, size in enumerate(shape) if size == 1]
    values = values.sum(repeated) if repeated else values
    classes, numbers = len(values), values[0].numel() // batch
    kept = int(torch.Size(shape).numel())
    return values.reshape(classes, batch, numbers // kept, kept).sum(2).transpose(0, 1)


def patches(images: Tensor, layer: nn.Module) -> Tensor:
    """Return what each position of a convolution sees, ``(image, group, feature, position)``.

    For a transposed convolution: what each position of its input contributes to.
    """
    assert isinstance(layer, _ConvNd)
    if isinstance(layer, _ConvTransposeNd):
        margins = [int(size) for size in reversed(layer.padding) for _ in range(2)]
    else:
        margins = layer._reversed_padding_repeated_twice
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    windows = F.pad(images, margins, mode=mode)
    axes = len(layer.kernel_size)
    for i in range(axes):
        reach = (layer.kernel_size[i] - 1) * layer.dilation[i] + 1
        windows = windows.unfold(2 + i, reach, layer.stride[i])[..., :: layer.dilation[i]]
    order = (0, 1, *range(2 + axes, 2 + 2 * axes), *range(2, 2 + axes))
    windows = windows.permute(order)
    positions = windows.shape[-axes:].numel()
    return windows.reshape(len(images), layer.groups, -1, positions)


def join_positions(values: Tensor, batch: int) -> Tensor:
    """Make rows of one sample positions: ``(row, g, f, p)`` to ``(batch, g, f, position)``."""
    if len(values) == batch:
        return values
    return values.unflatten(0, (batch, -1)).movedim(1, -2).flatten(-2)


def _by_group(images: Tensor, groups: int, batch: int) -> Tensor:
    return join_positions(images.flatten(2).unflatten(1, (groups, -1)), batch)


def _with_batch(images: Tensor, layer: _ConvNd) -> Tensor:
    return images if images.dim() == len(layer.kernel_size) + 2 else images.unsqueeze(0)
