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

TILE_BYTES = 2**25  # of the gradients of one layer, or of a product over positions, at once

Key = tuple[tuple[str, int], ...]  # a group of parameters: the role and the id of each
Uses = list[tuple[Term, Tensor]]  # terms of a group in a member's pass, and cotangents, class first
Factors = list[list[Tensor]]  # inputs or cotangents, by side and member


@dataclass
class Gradients:
    """The gradients of some members on ``batch`` samples: the terms of every group, by member.

    ``fold`` sums the scalar products of equal classes, instead of keeping all pairs.
    """

    batch: int
    uses: list[dict[Key, Uses]]
    fold: bool

    def of(self, a: int) -> Gradients:
        """Return those of one member."""
        return Gradients(self.batch, [self.uses[a]], self.fold)

    def rows(self, key: Key, role: str) -> Tensor:
        """Return short gradients as they are, a row for each member, sample and class."""
        found = []
        for uses in self.uses:
            rows = sum(term.rows(role, c, self.batch) for term, c in uses[key])
            found.append(rows.flatten(1) if self.fold else rows.flatten(0, 1))  # type: ignore[union-attr]
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
            _cat([term.inputs(self.batch) for term, _ in uses[key]])
            for uses in (self.uses[:1] if common else self.uses)
        ]
        return found * len(self.uses) if common else found

    def outputs(self, key: Key) -> list[Tensor]:
        """Return the cotangents; classes that are summed over act like further channels."""
        found = [_cat([t.outputs(c, self.batch) for t, c in uses[key]]) for uses in self.uses]
        return [c.movedim(1, -2).flatten(-2).unsqueeze(1) for c in found] if self.fold else found


def _cat(positions: list[Tensor]) -> Tensor:
    return positions[0] if len(positions) == 1 else torch.cat(positions, -2)


def group_uses(
    terms: Sequence[Term], cotangents: Sequence[Tensor], individual: set[int]
) -> dict[Key, Uses]:
    """Sort terms by parameters; weight and bias stay together if neither is used elsewhere."""
    keys: dict[int, set[Key]] = defaultdict(set)
    for term in terms:
        for _, p in term.key:
            keys[p].add(term.key)
    groups: dict[Key, Uses] = defaultdict(list)
    for term, cotangent in zip(terms, cotangents, strict=True):
        kinds = {p in individual for _, p in term.key}
        together = len(kinds) == 1 and all(len(keys[p]) == 1 for _, p in term.key)
        for part in [term.key] if together else [(one,) for one in term.key]:
            groups[part].append((term, cotangent))
    return groups


def contract(key: Key, left: Gradients, right: Gradients | None) -> Tensor:
    """Return the Gram matrix of a group's gradients, with rows (member, batch, class)."""
    sides = [left] if right is None else [left, right]
    term, roles = left.uses[0][key][0][0], dict(key)
    if isinstance(term, Lookup):
        return _contract_lookup(key, sides)
    if isinstance(term, Affine) and "weight" in roles:
        return _contract_affine(key, sides, term)
    return sum(gram(*(side.rows(key, role) for side in sides)) for role in roles)  # type: ignore[return-value]


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


def _contract_affine(key: Key, sides: list[Gradients], term: Affine) -> Tensor:
    inputs: Factors = [side.inputs(key) for side in sides]
    outputs: Factors = [side.outputs(key) for side in sides]
    weight, biased = term.scales["weight"] ** 2, "bias" in dict(key)
    _, groups, positions, features = inputs[0][0].shape
    channels = outputs[0][0].shape[-1]
    if groups == positions == 1:
        return _multiply_grams(inputs, outputs, weight, biased * term.scales["bias"] ** 2)
    if groups == 1 and 4 * positions**2 * (features + channels) < features * channels:
        joined = [torch.cat(found)[:, 0] for found in inputs]
        result = _multiply_over_positions(
            lambda part: torch.einsum("rpf,sqf->rpsq", joined[0][part], joined[-1]), outputs
        )
    else:
        result = _build_rows(inputs, outputs)
    result *= weight
    return result + gram(*(side.rows(key, "bias") for side in sides)) if biased else result


def _multiply_grams(inputs: Factors, outputs: Factors, weight: float, bias: float) -> Tensor:
    common = all(h is found[0] for found in inputs for h in found)
    rows, cotangents, shapes = [], [], []
    for found, c in zip(inputs, outputs, strict=True):
        rows.append(torch.cat([h.flatten(1) for h in (found[:1] if common else found)]))
        cotangents.append(torch.cat([one.flatten(2).flatten(0, 1) for one in c]))
        shapes.append((len(c) if common else 1, len(rows[-1]), c[0].shape[1]))
    coefficients = gram(*rows).mul_(weight).add_(bias)
    result = gram(*cotangents)
    blocks = result.view(*shapes[0], *shapes[-1])  # member (if common), sample, class; twice
    blocks *= coefficients[None, :, None, None, :, None]
    return result


def _multiply_over_positions(meet: Callable[[slice], Tensor], outputs: Factors) -> Tensor:
    # ``meet`` gives the scalar products of inputs of some rows with all, ``(row, p, row, q)``.
    cotangents = [torch.cat(found)[:, :, 0] for found in outputs]
    left, right = cotangents[0], cotangents[-1]
    one_row = 2 * left[0, ..., 0].numel() * right[..., 0].numel() * left.element_size()
    block = max(1, TILE_BYTES // max(1, one_row))
    result = []
    for start in range(0, len(left), block):
        part = slice(start, start + block)
        products = torch.einsum("rkpn,slqn->rkpslq", left[part], right)
        products *= meet(part)[:, None, :, :, None]
        result.append(products.sum((2, 5)).flatten(2).flatten(0, 1))
    return torch.cat(result)


def _contract_lookup(key: Key, sides: list[Gradients]) -> Tensor:
    tokens = [torch.cat(side.inputs(key)) for side in sides]

    def meet(part: slice) -> Tensor:
        mine = tokens[0][part, :, None]  # positions meet where their tokens are equal
        return (mine == tokens[-1][..., 0]) & (mine >= 0)

    return _multiply_over_positions(meet, [side.outputs(key) for side in sides])


def _build_rows(inputs: Factors, outputs: Factors) -> Tensor:
    """Build the gradients, a tile of groups or channels at a time, and multiply them."""
    first = inputs[0][0]
    _, classes, groups, _, channels = outputs[0][0].shape
    features = first.shape[-1]
    counts = [classes * sum(map(len, found)) for found in inputs]
    whole, piece = (groups, channels * features) if groups > 1 else (channels, features)
    tile = max(1, TILE_BYTES // (piece * sum(counts) * first.element_size()))
    tile = -(-whole // -(-whole // tile))  # all of them about equal
    buffers = [first.new_empty(count * piece * tile) for count in counts]
    total: Tensor | None = None
    for start in range(0, whole, tile):
        part = slice(start, min(start + tile, whole))
        matrices = []
        for hs, cs, buffer in zip(inputs, outputs, buffers, strict=True):
            shape = (len(hs), len(hs[0]), classes, piece * (part.stop - start))
            matrix = buffer[: torch.Size(shape).numel()].view(shape)
            for h, c, rows in zip(hs, cs, matrix, strict=True):
                if groups == 1:  # classes beside channels
                    c = c[:, :, 0, :, part].transpose(1, 2).flatten(2)
                    torch.bmm(c.mT, h[:, 0], out=rows.view(len(h), -1, features))
                else:
                    c, h = c[:, :, part].movedim(1, -2).flatten(-2), h[:, part]
                    rows.copy_((c.mT @ h).unflatten(2, (classes, -1)).transpose(1, 2).flatten(2))
            matrices.append(matrix.flatten(0, 2))
        product = gram(*matrices)
        total = product if total is None else total.add_(product)
    assert total is not None
    return total
