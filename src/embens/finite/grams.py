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

import math
from collections.abc import Iterable, Iterator
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
        weights: The uses of each weight with factored gradients.
        rows: All other gradients, ``(batch, class, entry)``.
    """

    weights: dict[int, list[WeightUse]] = field(default_factory=dict)
    rows: dict[int, Tensor] = field(default_factory=dict)

    def add_weight(self, parameter: Tensor, use: WeightUse) -> None:
        """Add a use of a weight."""
        self.weights.setdefault(id(parameter), []).append(use)

    def add_rows(self, parameter: Tensor, rows: Tensor) -> None:
        """Add to the gradients of a parameter, ``(batch, class, entry)``."""
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

    def factors(self, key: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield both factors of each member's gradients, the same inputs if members agree."""
        uses = [member.weights[key] for member in self.members]
        common = None
        if all(_same_inputs(uses[0], member_uses) for member_uses in uses[1:]):
            common = _join([use.inputs(self.batch) for use in uses[0]], axis=1)
        for member_uses in uses:
            inputs = common
            if inputs is None:
                inputs = _join([use.inputs(self.batch) for use in member_uses], axis=1)
            outputs = _join([use.outputs(self.batch) for use in member_uses], axis=2)
            yield inputs, outputs


def contract(
    key: int,
    row_gradients: SampleGradients,
    column_gradients: SampleGradients | None = None,
) -> Tensor:
    """Return the Gram matrix of one parameter's gradients.

    Args:
        key: The id of the parameter.
        row_gradients: Gradients for the rows of the matrix.
        column_gradients: Gradients for the columns; None: those of the rows.

    Returns:
        A matrix with rows and columns (member, sample, class).
    """
    sides = [row_gradients]
    if column_gradients is not None:
        sides.append(column_gradients)
    if key in row_gradients.members[0].rows:
        return gram(*(side.stacked_rows(key) for side in sides))
    uses = row_gradients.members[0].weights[key]
    if len(uses) == 1 and uses[0].positions(row_gradients.batch) == 1:
        matrix = _multiply_grams([list(side.factors(key)) for side in sides])
    else:
        matrix = _multiply_built(key, sides, uses[0])
    return matrix.mul_(parameter_scale(uses[0].layer, "weight") ** 2)


def gram(rows: Tensor, columns: Tensor | None = None) -> Tensor:
    """Return ``rows @ columns.T``; without ``columns`` each pair of rows is multiplied once.

    Args:
        rows: ``(row, feature)``.
        columns: ``(column, feature)``, or None for ``rows`` itself.
    """
    if columns is not None:
        return rows @ columns.mT
    count = len(rows)
    if count < 128 or rows.shape[1] < 512:
        return rows @ rows.mT
    block = max(64, math.ceil(count / 8))
    result = rows.new_empty(count, count)
    for start in range(0, count, block):
        stop = min(start + block, count)
        strip = rows[start:stop] @ rows[start:].mT
        result[start:stop, start:] = strip
        result[stop:, start:stop] = strip[:, stop - start :].mT
    return result


def _join(parts: list[Tensor], axis: int) -> Tensor:
    """Concatenate tensors, without a copy if there is only one."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, axis)


def _same_inputs(first_uses: list[WeightUse], second_uses: list[WeightUse]) -> bool:
    """Return True if two members give a weight the same inputs."""
    for first, second in zip(first_uses, second_uses, strict=True):
        if first.post is not None or second.post is not None:
            return False
        if first.value is not second.value and not torch.equal(first.value, second.value):
            return False
    return True


def _multiply_grams(sides: list[list[tuple[Tensor, Tensor]]]) -> Tensor:
    """Multiply the Gram matrices of both factors, which have one position.

    Args:
        sides: For the rows, and for the columns if they differ: the factors of each member.
    """
    # If all members have the same inputs, their Gram matrix is computed once.
    common = True
    for factors in sides:
        common = common and all(inputs is factors[0][0] for inputs, _ in factors)
    features = []
    gradients = []
    shapes = []
    for factors in sides:
        distinct = factors[:1] if common else factors
        features.append(torch.cat([inputs.flatten(1) for inputs, _ in distinct]))
        gradients.append(torch.cat([c.flatten(2).flatten(0, 1) for _, c in factors]))
        repeats = len(factors) if common else 1
        classes = factors[0][1].shape[1]
        shapes.append((repeats, len(features[-1]), classes))
    result = gram(*gradients)
    blocks = result.view(*shapes[0], *shapes[-1])  # (repeat, sample, class), twice
    blocks *= gram(*features)[None, :, None, None, :, None]
    return result


def _multiply_built(key: int, sides: list[SampleGradients], use: WeightUse) -> Tensor:
    """Build the gradients for some channels at a time, and add up their Gram matrices.

    Args:
        key: The id of the parameter.
        sides: Gradients of the rows, and of the columns if they differ.
        use: Any use of the parameter.
    """
    classes = len(use.gradient)
    channels = use.channels
    features = use.features
    rows = [classes * side.batch * len(side.members) for side in sides]
    tile = max(1, TILE_BYTES // (features * sum(rows) * use.gradient.element_size()))
    tiles = math.ceil(channels / tile)
    tile = math.ceil(channels / tiles)  # tiles of about the same size
    buffers = [use.gradient.new_empty(count * features * tile) for count in rows]
    factors = [side.factors(key) for side in sides]
    if tiles > 1:
        factors = [list(pairs) for pairs in factors]  # used once per tile
    total = None
    for start in range(0, channels, tile):
        part = slice(start, min(start + tile, channels))
        matrices = []
        for pairs, count, buffer in zip(factors, rows, buffers, strict=True):
            matrices.append(_build(pairs, part, count, buffer))
        product = gram(*matrices)
        total = product if total is None else total.add_(product)
    assert total is not None
    return total


def _build(
    factors: Iterable[tuple[Tensor, Tensor]],
    part: slice,
    rows: int,
    buffer: Tensor,
) -> Tensor:
    """Return the gradients of some channels, one row per (member, sample, class).

    Args:
        factors: The factors of each member's gradients.
        part: The channels to build.
        rows: The number of rows.
        buffer: Memory for the result.
    """
    position = 0
    for inputs, outputs in factors:
        batch, classes, _, _ = outputs.shape
        features = inputs.shape[2]
        channels = part.stop - part.start
        size = batch * classes * channels * features
        built = buffer[position : position + size]
        built = built.view(batch, classes * channels, features)
        by_position = outputs[..., part].transpose(1, 2).flatten(2)
        torch.bmm(by_position.mT, inputs, out=built)
        position += size
    return buffer[:position].view(rows, -1)
