r"""Gram matrices of gradients, from their factors where that is cheaper.

For one parameter, rows :math:`r` (member, sample, class) of gradients
:math:`\sum_p c_{rp} \otimes h_{rp}` have the scalar products

.. math::
    \langle g_r, g_{r'} \rangle
    = \sum_{pq} (h_{rp} \cdot h_{r'q}) (c_{rp} \cdot c_{r'q}) ,

the product of two small Gram matrices where there are few positions (a Linear layer has one). With
many positions (convolutions) the gradients themselves are smaller: they are built for a tile of
channels at a time, so that memory stays bounded without any work being done twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from embens.finite.empirical.terms import Affine, Lookup, Term

TILE_BYTES = 2**25
"""How large the gradients of one layer, or a product over positions, may get at once."""

Uses = list[tuple[Term, Tensor]]
"""The terms of one parameter group in one member's pass, with their cotangents (class first)."""


@dataclass
class Side:
    """The gradients of some members on one batch.

    Attributes:
        batch: how many samples.
        uses: for each member, the terms of every group.
        rows: for each member, the gradients without structure, ``(batch, class, number)``.
        fold: sum the scalar products of equal classes, instead of keeping all pairs.
    """

    batch: int
    uses: list[dict[tuple, Uses]]
    rows: list[dict[int, Tensor]]
    fold: bool

    def of(self, a: int) -> Side:
        """Return the side of one member."""
        return Side(self.batch, [self.uses[a]], [self.rows[a]], self.fold)

    def folded(self, rows: Tensor) -> Tensor:
        """Return rows ``(batch, class, number)`` as a matrix."""
        return rows.flatten(1) if self.fold else rows.flatten(0, 1)


def group_uses(
    terms: Sequence[Term], cotangents: Sequence[Tensor], individual: set[int]
) -> dict[tuple, Uses]:
    """Sort terms by the parameters whose gradients they make up.

    The weight and the bias of a layer stay together where neither is used elsewhere. A key is
    ``(role, id)`` for each parameter.
    """
    keys: dict[int, set[tuple]] = defaultdict(set)
    for term in terms:
        key = tuple((role, id(p)) for role, p in term.parameters.items())
        for _, p in key:
            keys[p].add(key)
    groups: dict[tuple, Uses] = defaultdict(list)
    for term, cotangent in zip(terms, cotangents, strict=True):
        key = tuple((role, id(p)) for role, p in term.parameters.items())
        kinds = {p in individual for _, p in key}
        together = len(kinds) == 1 and all(len(keys[p]) == 1 for _, p in key)
        for part in [key] if together else [(one,) for one in key]:
            groups[part].append((term, cotangent))
    return groups


def contract(key: tuple, left: Side, right: Side | None) -> Tensor:
    """Return the Gram matrix of the gradients of one group, over rows (member, batch, class).

    Args:
        key: of the group.
        left: the rows.
        right: the columns; None: the same, and the matrix is symmetric.
    """
    roles = {role for role, _ in key}
    term = left.uses[0][key][0][0]
    if isinstance(term, Affine):
        return _contract_affine(key, roles, left, right)
    if isinstance(term, Lookup):
        return _contract_lookup(key, left, right)
    return sum(_contract_rows(key, role, left, right) for role in roles)  # type: ignore[return-value]


def contract_rows(parameter: int, left: Side, right: Side | None) -> Tensor:
    """Return the Gram matrix of gradients without structure, which are used up."""
    sides = [torch.cat([s.folded(r.pop(parameter)) for r in s.rows]) for s in _both(left, right)]
    return gram(sides[0], sides[1] if right else None)


def gram(left: Tensor, right: Tensor | None = None) -> Tensor:
    """Return ``left @ right.T``; without ``right`` every pair of rows is multiplied once.

    Example:
        >>> gram(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        tensor([[ 5., 11.],
                [11., 25.]])
    """
    if right is not None:
        return left @ right.mT
    count = len(left)
    if count < 128 or left.shape[1] < 1024:
        return left @ left.mT
    block = max(64, -(-count // 4))
    result = left.new_empty(count, count)
    for start in range(0, count, block):
        stop = min(start + block, count)
        strip = left[start:stop] @ left[start:].mT
        result[start:stop, start:] = strip
        result[stop:, start:stop] = strip[:, stop - start :].mT
    return result


def _both(left: Side, right: Side | None) -> list[Side]:
    return [left] if right is None else [left, right]


def _contract_rows(key: tuple, role: str, left: Side, right: Side | None) -> Tensor:
    """Contract scales, or biases, whose gradients are short."""
    matrices = []
    for side in _both(left, right):
        rows = []
        for uses in side.uses:
            found = [
                term.bias_rows(cotangent, side.batch)
                if isinstance(term, Affine)
                else term.rows(role, cotangent, side.batch)  # type: ignore[attr-defined]
                for term, cotangent in uses[key]
            ]
            rows.append(side.folded(sum(found)))  # type: ignore[arg-type]
        matrices.append(torch.cat(rows))
    return gram(matrices[0], matrices[1] if right else None)


def _contract_affine(key: tuple, roles: set[str], left: Side, right: Side | None) -> Tensor:
    term = left.uses[0][key][0][0]
    assert isinstance(term, Affine)
    weight, bias = (term.scales[r] ** 2 if r in roles else 0.0 for r in ("weight", "bias"))
    if "weight" not in roles:
        return bias * _contract_rows(key, "bias", left, right)
    sides = _both(left, right)
    outputs = [[_outputs(uses[key], s) for uses in s.uses] for s in sides]
    inputs = _inputs(left.uses[0][key], left.batch)
    _, groups, features, positions = inputs.shape
    channels = outputs[0][0].shape[3]
    pays = 4 * positions**2 * (features + channels) < features * channels
    if groups == 1 and positions == 1:
        return _multiply_grams(key, sides, outputs, weight, bias)
    if groups == 1 and pays:
        joined = [torch.cat(_each_input(key, s))[:, 0] for s in sides]
        result = weight * _multiply_over_positions(
            lambda part: torch.einsum("rfp,sfq->rpsq", joined[0][part], joined[-1]), outputs
        )
    else:
        result = _build_rows(key, sides, outputs, inputs).mul_(weight)
    if bias:
        result += bias * _contract_rows(key, "bias", left, right)
    return result


def _inputs(uses: Uses, batch: int) -> Tensor:
    return _cat([term.inputs(batch) for term, _ in uses])  # type: ignore[attr-defined]


def _outputs(uses: Uses, side: Side) -> Tensor:
    found = _cat([term.outputs(c, side.batch) for term, c in uses])  # type: ignore[attr-defined]
    # Classes that are summed over act like further channels.
    return found.movedim(1, 2).flatten(2, 3).unsqueeze(1) if side.fold else found


def _cat(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, -1)


def _is_common(key: tuple, side: Side) -> bool:
    """Return whether all members have the same inputs, because nothing before them differs."""
    first = side.uses[0][key]
    return all(
        term.value is other.value
        for uses in side.uses[1:]
        for (term, _), (other, _) in zip(uses[key], first, strict=True)
    )


def _each_input(key: tuple, side: Side) -> list[Tensor]:
    if _is_common(key, side):
        return [_inputs(side.uses[0][key], side.batch)] * len(side.uses)
    return [_inputs(uses[key], side.batch) for uses in side.uses]


def _multiply_grams(
    key: tuple, sides: list[Side], outputs: list[list[Tensor]], weight: float, bias: float
) -> Tensor:
    """Return the Gram matrix of inputs times that of cotangents, for a single position."""
    common = all(_is_common(key, side) for side in sides)
    inputs, cotangents, shapes = [], [], []
    for side, found in zip(sides, outputs, strict=True):
        uses = side.uses[:1] if common else side.uses
        inputs.append(torch.cat([_inputs(u[key], side.batch).flatten(1) for u in uses]))
        cotangents.append(torch.cat([c.flatten(2).flatten(0, 1) for c in found]))
        shapes.append((len(found) if common else 1, len(inputs[-1]), found[0].shape[1]))
    first = gram(inputs[0], inputs[1] if len(sides) > 1 else None)
    coefficients = first.mul_(weight).add_(bias) if bias else first.mul_(weight)
    second = gram(cotangents[0], cotangents[1] if len(sides) > 1 else None)
    blocks = second.view(*shapes[0], *shapes[-1])  # member (if common), sample, class; twice
    blocks *= coefficients[None, :, None, None, :, None]
    return second


def _multiply_over_positions(
    meet: Callable[[slice], Tensor], outputs: list[list[Tensor]]
) -> Tensor:
    """Return the sum over pairs of positions, with rows of the left side in blocks.

    Args:
        meet: gives the scalar products of inputs of some rows with all, ``(row, p, row, q)``.
        outputs: cotangents ``(batch, class, 1, channel, position)`` by side and member.
    """
    cotangents = [torch.cat(found)[:, :, 0] for found in outputs]
    left, right = cotangents[0], cotangents[-1]
    columns = right.shape[0] * right.shape[1] * right.shape[3]
    one_row = 2 * left.shape[1] * left.shape[3] * columns * left.element_size()
    block = max(1, TILE_BYTES // max(1, one_row))
    result = []
    for start in range(0, len(left), block):
        part = slice(start, start + block)
        products = torch.einsum("rknp,slnq->rkpslq", left[part], right)
        products *= meet(part)[:, None, :, :, None]
        result.append(products.sum((2, 5)).flatten(2).flatten(0, 1))
    return torch.cat(result)


def _contract_lookup(key: tuple, left: Side, right: Side | None) -> Tensor:
    """Contract an embedding: two positions meet where their tokens are equal."""
    sides = _both(left, right)
    tokens = [
        torch.cat([_cat([t.tokens(s.batch) for t, _ in uses[key]]) for uses in s.uses])  # type: ignore[attr-defined]
        for s in sides
    ]
    outputs = [[_outputs(uses[key], s) for uses in s.uses] for s in sides]

    def meet(part: slice) -> Tensor:
        mine = tokens[0][part, :, None, None]
        return (mine == tokens[-1]) & (mine >= 0)

    return _multiply_over_positions(meet, outputs)


def _build_rows(
    key: tuple, sides: list[Side], outputs: list[list[Tensor]], inputs: Tensor
) -> Tensor:
    """Build the gradients, a tile of groups or channels at a time, and multiply them.

    Args:
        key: of the group.
        sides: one or two.
        outputs: cotangents by side and member.
        inputs: those of the first member.
    """
    _, classes, groups, channels, _ = outputs[0][0].shape
    features = inputs.shape[2]
    rows = classes * sum(s.batch * len(s.uses) for s in sides)
    whole, piece = (groups, channels * features) if groups > 1 else (channels, features)
    tile = min(whole, max(1, TILE_BYTES // (piece * rows * inputs.element_size())))
    patches = [_each_input(key, side) for side in sides]
    buffers = [inputs.new_empty(classes * s.batch * len(s.uses) * piece * tile) for s in sides]
    total: Tensor | None = None
    for start in range(0, whole, tile):
        part = slice(start, min(start + tile, whole))
        matrices = []
        for side, found, own, buffer in zip(sides, outputs, patches, buffers, strict=True):
            size = (part.stop - start, channels) if groups > 1 else (1, part.stop - start)
            shape = (len(side.uses), side.batch, classes, *size, features)
            matrix = buffer[: torch.Size(shape).numel()].view(shape)
            for a, h in enumerate(own):
                c = found[a][:, :, part] if groups > 1 else found[a][:, :, :, part]
                h = h[:, part] if groups > 1 else h
                rows_of_c = c.transpose(1, 2).flatten(2, 3)  # classes beside channels
                if groups == 1:
                    torch.matmul(rows_of_c, h.mT, out=matrix[a].view(side.batch, 1, -1, features))
                else:
                    product = torch.matmul(rows_of_c, h.mT).unflatten(2, (classes, channels))
                    matrix[a] = product.transpose(1, 2)
            matrices.append(matrix.flatten(3).flatten(0, 2))
        product = gram(matrices[0], matrices[1] if len(sides) > 1 else None)
        total = product if total is None else total.add_(product)
    assert total is not None
    return total
