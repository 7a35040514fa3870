r"""Gram matrices of the gradients of samples, from their factors where that is cheaper.

Most parameters are used by layers whose output is linear in them. Then the gradient of sample
:math:`i` is known from what went into the layer, :math:`h`, and from the *cotangent* of what came
out, :math:`c = \partial f / \partial z`, which one backward pass gives for all samples at once:

.. math:: \nabla_W f(x_i) = \sum_p c_{ip} \otimes h_{ip}

with :math:`p` over the positions (pixels, times, repeated uses) at which the layer is applied; a
convolution has patches for :math:`h`, an embedding ones where its tokens are, and the scale of a
norm layer or a modulation keeps only the diagonal of the product. Rows :math:`r` (member, sample,
class) of such gradients have the scalar products

.. math::
    \langle g_r, g_{r'} \rangle
    = \sum_{pq} (h_{rp} \cdot h_{r'q}) (c_{rp} \cdot c_{r'q}) ,

the product of two small Gram matrices where there is one position, as in a Linear layer. With
several (convolutions) the gradients themselves are built for a tile of channels at a time, so that
memory stays bounded without any work being done twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

TILE_BYTES = 2**25  # of the gradients of one layer, or of a product over positions, at once

Key = tuple[str, int]  # the role and the id of a parameter
Factors = list[list[Tensor]]  # inputs or cotangents, by side and member


@dataclass(frozen=True)
class Term:
    """One use of parameters in a pass; here one whose gradients are known as they are.

    The batch is the first axis of ``value`` and of the cotangent, classes come before it.
    """

    parameters: dict[str, nn.Parameter]  # by role
    value: Tensor  # what the cotangent is multiplied with
    edge: Any  # where in the graph the cotangent arrives
    shape: torch.Size  # of the cotangent

    @property
    def size(self) -> int:
        """About how many numbers it takes to contract it."""
        return 2 * self.value.numel()

    def inputs(self, batch: int) -> Tensor:
        """Return :math:`h`, ``(batch, position, feature)``; here of a layer with channels last."""
        return self.value.reshape(batch, -1, self.value.shape[-1])

    def outputs(self, cotangent: Tensor, batch: int) -> Tensor:
        """Return :math:`c`, ``(batch, class, position, channel)``; here of such a layer."""
        return cotangent.reshape(len(cotangent), batch, -1, cotangent.shape[-1]).transpose(0, 1)

    def rows(self, role: str, cotangent: Tensor, batch: int) -> Tensor:
        """Return gradients that are short, ``(batch, class, number)``; here the cotangent is."""
        return cotangent


@dataclass(frozen=True)
class Affine(Term):
    """A Linear, convolution or Embedding, with the factors of its parameters in the forward pass.

    The ``value`` of an Embedding are its tokens, of which one may have no gradient.
    """

    layer: nn.Module
    scales: dict[str, float]

    @property
    def size(self) -> int:
        return super().size * getattr(self.layer, "num_embeddings", 1)

    def inputs(self, batch: int) -> Tensor:
        layer, value = self.layer, self.value
        if isinstance(layer, nn.Embedding):
            tokens = value.reshape(batch, -1).long()
            ones = F.one_hot(tokens, layer.num_embeddings).to(layer.weight.dtype)
            ignored = -1 if layer.padding_idx is None else layer.padding_idx
            return ones * (tokens != ignored).unsqueeze(-1)
        if not isinstance(layer, _ConvNd):
            return super().inputs(batch)
        images = value if value.dim() == len(layer.kernel_size) + 2 else value.unsqueeze(0)
        seen = patches(images, layer)
        return seen.reshape(batch, -1, seen.shape[-1])

    def outputs(self, cotangent: Tensor, batch: int) -> Tensor:
        axes = len(self.layer.kernel_size) if isinstance(self.layer, _ConvNd) else 0
        return super().outputs(cotangent.movedim(-1 - axes, -1), batch)

    def rows(self, role: str, cotangent: Tensor, batch: int) -> Tensor:
        axes = len(self.layer.kernel_size) if isinstance(self.layer, _ConvNd) else 0
        rows = sum_to(cotangent, (cotangent.shape[-1 - axes], *(1,) * axes), batch)
        return rows * self.scales[role]


@dataclass(frozen=True)
class Scale(Term):
    """Numbers of this shape, broadcast against a sample, that multiply ``value``; and a shift."""

    numbers: tuple[int, ...]
    repeat: int = 1  # so many consecutive numbers are one parameter

    def rows(self, role: str, cotangent: Tensor, batch: int) -> Tensor:
        product = cotangent if role == "bias" else cotangent * self.value
        rows = sum_to(product, self.numbers, batch)
        return rows.unflatten(-1, (-1, self.repeat)).sum(-1) if self.repeat > 1 else rows


def sum_to(values: Tensor, shape: tuple[int, ...], batch: int) -> Tensor:
    """Sum what broadcasting repeated: ``(class, row, …)`` to ``(batch, class, number)``."""
    first = values.dim() - len(shape)
    repeated = [first + i for i, size in enumerate(shape) if size == 1]
    values = values.sum(repeated) if repeated else values
    kept = int(torch.Size(shape).numel())
    return values.reshape(len(values), batch, -1, kept).sum(2).transpose(0, 1)


def patches(images: Tensor, layer: _ConvNd) -> Tensor:
    """Return what each position of a convolution sees, ``(image, position, feature)``.

    Channels are the last of a feature's axes, so that images in the format ``channels_last`` are
    copied in long pieces.
    """
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    windows = F.pad(images, layer._reversed_padding_repeated_twice, mode=mode).movedim(1, -1)
    axes = len(layer.kernel_size)
    for i in range(axes):
        reach = (layer.kernel_size[i] - 1) * layer.dilation[i] + 1
        windows = windows.unfold(1 + i, reach, layer.stride[i])[..., :: layer.dilation[i]]
    windows = windows.movedim(1 + axes, -1)
    return windows.reshape(len(images), windows.shape[1 : 1 + axes].numel(), -1)


Uses = list[tuple[Term, Tensor]]  # terms of a parameter in a member's pass; cotangents, class first


@dataclass
class Gradients:
    """The gradients of some members on ``batch`` samples: each parameter's terms, by member."""

    batch: int
    uses: list[dict[Key, Uses]]

    def of(self, a: int) -> Gradients:
        """Return those of one member."""
        return Gradients(self.batch, [self.uses[a]])

    def rows(self, key: Key) -> Tensor:
        """Return short gradients as they are, a row for each member, sample and class."""
        found = []
        for uses in self.uses:
            rows = sum(term.rows(key[0], c, self.batch) for term, c in uses[key])
            found.append(rows.flatten(0, 1))  # type: ignore[union-attr]
        return torch.cat(found)

    def inputs(self, key: Key) -> list[Tensor]:
        """Return what each member's cotangents are multiplied with; one tensor where all agree."""
        first = self.uses[0][key]
        common = all(
            term.value is other.value
            for uses in self.uses[1:]
            for (term, _), (other, _) in zip(uses[key], first, strict=True)
        )
        found = [
            torch.cat([term.inputs(self.batch) for term, _ in uses[key]], 1)
            for uses in (self.uses[:1] if common else self.uses)
        ]
        return found * len(self.uses) if common else found

    def outputs(self, key: Key) -> list[Tensor]:
        """Return the cotangents of each member."""
        return [
            torch.cat([t.outputs(c, self.batch) for t, c in uses[key]], 2) for uses in self.uses
        ]


def by_parameter(terms: Sequence[Term], cotangents: Sequence[Tensor]) -> dict[Key, Uses]:
    """Sort the terms of a pass by parameters."""
    found: dict[Key, Uses] = defaultdict(list)
    for term, cotangent in zip(terms, cotangents, strict=True):
        for role, parameter in term.parameters.items():
            found[role, id(parameter)].append((term, cotangent))
    return found


def contract(key: Key, left: Gradients, right: Gradients | None) -> Tensor:
    """Return the Gram matrix of a parameter's gradients, with rows (member, batch, class)."""
    sides = [left] if right is None else [left, right]
    term = left.uses[0][key][0][0]
    if not isinstance(term, Affine) or key[0] != "weight":
        return gram(*(side.rows(key) for side in sides))
    inputs: Factors = [side.inputs(key) for side in sides]
    outputs: Factors = [side.outputs(key) for side in sides]
    multiply = _multiply_grams if inputs[0][0].shape[1] == 1 else _build_rows
    return multiply(inputs, outputs).mul_(term.scales["weight"] ** 2)


def gram(left: Tensor, right: Tensor | None = None) -> Tensor:
    """Return ``left @ right.T``; without ``right`` every pair of rows is multiplied once."""
    if right is not None:
        return left @ right.mT
    count = len(left)
    if count < 128 or left.shape[1] < 512:
        return left @ left.mT
    block = max(64, -(-count // 8))
    result = left.new_empty(count, count)
    for start in range(0, count, block):
        stop = min(start + block, count)
        strip = left[start:stop] @ left[start:].mT
        result[start:stop, start:] = strip
        result[stop:, start:stop] = strip[:, stop - start :].mT
    return result


def _multiply_grams(inputs: Factors, outputs: Factors) -> Tensor:
    common = all(h is found[0] for found in inputs for h in found)
    rows, cotangents, shapes = [], [], []
    for found, c in zip(inputs, outputs, strict=True):
        rows.append(torch.cat([h.flatten(1) for h in (found[:1] if common else found)]))
        cotangents.append(torch.cat([one.flatten(2).flatten(0, 1) for one in c]))
        shapes.append((len(c) if common else 1, len(rows[-1]), c[0].shape[1]))
    result = gram(*cotangents)
    blocks = result.view(*shapes[0], *shapes[-1])  # member (if common), sample, class; twice
    blocks *= gram(*rows)[None, :, None, None, :, None]
    return result


def _build_rows(inputs: Factors, outputs: Factors) -> Tensor:
    """Build the gradients, a tile of channels at a time, and multiply them."""
    first = inputs[0][0]
    _, classes, _, channels = outputs[0][0].shape
    features = first.shape[-1]
    counts = [classes * sum(map(len, found)) for found in inputs]
    tile = max(1, TILE_BYTES // (features * sum(counts) * first.element_size()))
    tile = -(-channels // -(-channels // tile))  # all of them about equal
    buffers = [first.new_empty(count * features * tile) for count in counts]
    total: Tensor | None = None
    for start in range(0, channels, tile):
        part = slice(start, min(start + tile, channels))
        matrices = []
        for hs, cs, buffer in zip(inputs, outputs, buffers, strict=True):
            shape = (len(hs), len(hs[0]), classes, features * (part.stop - start))
            matrix = buffer[: torch.Size(shape).numel()].view(shape)
            for h, c, rows in zip(hs, cs, matrix, strict=True):
                c = c[..., part].transpose(1, 2).flatten(2)  # classes beside channels
                torch.bmm(c.mT, h, out=rows.view(len(h), -1, features))
            matrices.append(matrix.flatten(0, 2))
        product = gram(*matrices)
        total = product if total is None else total.add_(product)
    assert total is not None
    return total
