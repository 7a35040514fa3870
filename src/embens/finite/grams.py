r"""Gram matrices of per-sample gradients, parameter by parameter and for all members at once.

Rows :math:`r` stand for (member, sample, class). Factored gradients (``factors``) have the scalar
products

.. math::
    \langle g_r, g_{r'} \rangle
    = \sum_{pq} (h_{rp} \cdot h_{r'q}) (c_{rp} \cdot c_{r'q}) .

With one position, as in a Linear layer, this is the elementwise product of two small Gram matrices.
With several, as in a convolution, the gradients themselves are built for some channels at a time,
which bounds the memory and repeats no work.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from embens.finite.factors import WeightUse, parameter_scale

TILE_BYTES = 2**25
"""Memory for the gradients of one parameter that are built at once."""


@dataclass
class MemberGradients:
    """Per-sample gradients of one member, by the id of the parameter.

    Attributes:
        weights: the uses of each weight with factored gradients.
        rows: all other gradients, ``(batch, class, number)``.
    """

    weights: dict[int, list[WeightUse]] = field(default_factory=dict)
    rows: dict[int, Tensor] = field(default_factory=dict)

    def add_weight(self, parameter: Tensor, use: WeightUse) -> None:
        """Add a use of a weight."""
        self.weights.setdefault(id(parameter), []).append(use)

    def add_rows(self, parameter: Tensor, rows: Tensor) -> None:
        """Add to the gradients of a parameter, ``(batch, class, number)``."""
        if id(parameter) in self.rows:
            rows = self.rows[id(parameter)] + rows
        self.rows[id(parameter)] = rows


@dataclass(frozen=True)
class SampleGradients:
    """Per-sample gradients of several members on the same ``batch`` samples."""

    batch: int
    members: list[MemberGradients]

    def member(self, a: int) -> SampleGradients:
        """Return the gradients of one member."""
        return SampleGradients(self.batch, [self.members[a]])

    def parameter_keys(self) -> list[int]:
        """Return the ids of all parameters."""
        first = self.members[0]
        return [*first.weights, *first.rows]

    def discard(self, key: int) -> None:
        """Free the memory of a parameter's gradients."""
        for member in self.members:
            member.weights.pop(key, None)
            member.rows.pop(key, None)

    def stacked_rows(self, key: int) -> Tensor:
        """Return explicit gradients, one row per (member, sample, class)."""
        return torch.cat([member.rows[key].flatten(0, 1) for member in self.members])

    def inputs(self, key: int) -> list[Tensor]:
        """Return the input factors of each member, one tensor for all if members agree."""
        uses = [member.weights[key] for member in self.members]
        if all(_same_inputs(uses[0], others) for others in uses[1:]):
            return [self._join_inputs(uses[0])] * len(uses)
        return [self._join_inputs(of_member) for of_member in uses]

    def _join_inputs(self, uses: list[WeightUse]) -> Tensor:
        return _join([use.inputs(self.batch) for use in uses], axis=1)

    def outputs(self, key: int) -> list[Tensor]:
        """Return the gradient factors of each member."""
        factors = []
        for member in self.members:
            uses = member.weights[key]
            factors.append(_join([use.outputs(self.batch) for use in uses], axis=2))
        return factors


def contract(key: int, left: SampleGradients, right: SampleGradients | None = None) -> Tensor:
    """Return the Gram matrix of one parameter's gradients.

    Args:
        key: the id of the parameter.
        left: gradients of the rows.
        right: gradients of the columns; None: the same as ``left``.

    Returns:
        A matrix whose rows and columns are (member, sample, class).
    """
    sides = [left]
    if right is not None:
        sides.append(right)
    if key in left.members[0].rows:
        return gram(*(side.stacked_rows(key) for side in sides))
    inputs = [side.inputs(key) for side in sides]
    outputs = [side.outputs(key) for side in sides]
    positions = inputs[0][0].shape[1]
    if positions == 1:
        matrix = _multiply_grams(inputs, outputs)
    else:
        matrix = _multiply_built(inputs, outputs)
    layer = left.members[0].weights[key][0].layer
    return matrix.mul_(parameter_scale(layer, "weight") ** 2)


def gram(left: Tensor, right: Tensor | None = None) -> Tensor:
    """Return ``left @ right.T``; without ``right`` each pair of rows is multiplied once.

    Args:
        left: ``(row, feature)``.
        right: ``(column, feature)``, or None for ``left`` itself.
    """
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


def _join(parts: list[Tensor], axis: int) -> Tensor:
    """Concatenate tensors, without a copy if there is only one."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, axis)


def _same_inputs(uses: list[WeightUse], others: list[WeightUse]) -> bool:
    """Return whether two members give a weight the same inputs."""
    for use, other in zip(uses, others, strict=True):
        if use.post is not None or other.post is not None:
            return False
        if use.value is not other.value and not torch.equal(use.value, other.value):
            return False
    return True


def _multiply_grams(inputs: list[list[Tensor]], outputs: list[list[Tensor]]) -> Tensor:
    """Multiply the Gram matrices of both factors, which have one position."""
    common = True  # whether all members have the same inputs: their Gram matrix is small then
    for factors in inputs:
        common = common and all(factor is factors[0] for factor in factors)
    features, gradients, shapes = [], [], []
    for side_inputs, side_outputs in zip(inputs, outputs, strict=True):
        distinct = side_inputs[:1] if common else side_inputs
        features.append(torch.cat([factor.flatten(1) for factor in distinct]))
        gradients.append(torch.cat([c.flatten(2).flatten(0, 1) for c in side_outputs]))
        repeats = len(side_outputs) if common else 1
        classes = side_outputs[0].shape[1]
        shapes.append((repeats, len(features[-1]), classes))
    result = gram(*gradients)
    blocks = result.view(*shapes[0], *shapes[-1])  # (repeat, sample, class), twice
    blocks *= gram(*features)[None, :, None, None, :, None]
    return result


def _multiply_built(inputs: list[list[Tensor]], outputs: list[list[Tensor]]) -> Tensor:
    """Build the gradients for some channels at a time, and add up their Gram matrices."""
    first = inputs[0][0]
    classes, channels = outputs[0][0].shape[1], outputs[0][0].shape[3]
    features = first.shape[2]
    rows = [classes * sum(len(factor) for factor in side) for side in inputs]
    tile = max(1, TILE_BYTES // (features * sum(rows) * first.element_size()))
    tiles = -(-channels // tile)
    tile = -(-channels // tiles)  # tiles of about the same size
    buffers = [first.new_empty(count * features * tile) for count in rows]
    total = None
    for start in range(0, channels, tile):
        stop = min(start + tile, channels)
        matrices = []
        for side_inputs, side_outputs, buffer in zip(inputs, outputs, buffers, strict=True):
            parts = [c[..., start:stop] for c in side_outputs]
            matrices.append(_build(side_inputs, parts, buffer))
        product = gram(*matrices)
        total = product if total is None else total.add_(product)
    assert total is not None
    return total


def _build(inputs: list[Tensor], outputs: list[Tensor], buffer: Tensor) -> Tensor:
    """Return the gradients of some channels, one row per (member, sample, class)."""
    batch, classes, _, channels = outputs[0].shape
    features = inputs[0].shape[2]
    shape = (len(inputs), batch, classes * channels, features)
    gradients = buffer[: torch.Size(shape).numel()].view(shape)
    for factor, c, built in zip(inputs, outputs, gradients, strict=True):
        by_feature = c.transpose(1, 2).flatten(2)  # (batch, position, class · channel)
        torch.bmm(by_feature.mT, factor, out=built)
    return gradients.view(len(inputs) * batch * classes, channels * features)
