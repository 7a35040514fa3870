"""All kernels of many inputs, computed block by block; symmetric blocks are computed once.

Blocks are computed one after another, and torch's threads share the work inside each. A block is
large enough for that to pay, and small enough that a dozen of them are little compared with the
kernels of many inputs. :mod:`embens.theory.archive` writes kernels to files.
"""

import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from embens.checks import check_whole
from embens.ensemble import EmbeddedEnsemble
from embens.theory.kernel import Kernels
from embens.theory.limit import Limit

Block = tuple[slice, slice]

_ENTRIES = {"cpu": 160_000, "cuda": 2**24}  # entries of one kernel of a block, by device
_PIXEL_ENTRIES = 2**20  # the same for images: each pair of inputs has many entries


def kernels(
    ensemble: EmbeddedEnsemble | nn.Module,
    x1: Tensor,
    x2: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    block: int | None = None,
    progress: bool | None = None,
) -> Kernels:
    r"""Compute the kernels of an infinitely wide ensemble.

    Args:
        ensemble: An ensemble; the widths of its layers don't matter. A plain network counts as an
            ensemble of equal members.
        x1: Inputs, ``(n1, …)``; kernels are computed on their device.
        x2: Other inputs, ``(n2, …)``; None means ``x1``.
        dtype: ``torch.float64``, or ``torch.float32`` for half the memory and about six digits.
        block: Number of inputs along the side of a block; None chooses one that fits the cache.
        progress: Show a progress bar; None shows it on a terminal for many blocks.

    Returns:
        The kernels, with blocks ``(n1, n2)``. With input or output modulations they are
        conditional on the drawn values and have member axes.

    Raises:
        TypeError: If the limit of a module of the network is not known.
        ValueError: If inputs do not fit, or the limit does not exist.

    Example:
        A ReLU network with one hidden layer, for two orthogonal inputs:

        >>> from embens import networks
        >>> net = networks.mlp(inputs=2, width=8, depth=1, weight_std=2**0.5)
        >>> k = kernels(net, torch.eye(2))
        >>> [round(v, 6) for v in k.nngp.same.flatten().tolist()]  # σ²/2 (x·x), σ²/2 /π
        [1.0, 0.31831, 0.31831, 1.0]
    """
    limit = Limit(ensemble, x1, x2, dtype=dtype)
    plan = plan_blocks(limit, block)
    if len(plan) == 1:
        return limit.block()
    whole: list[Tensor] = []
    for place, part in compute_blocks(limit, plan, progress=progress):
        if not whole:
            whole = [_allocate(piece, limit.shape) for piece in part.blocks]
        for kernel, piece in zip(whole, part.blocks, strict=True):
            if not _is_one_value(kernel):
                _insert(kernel, piece, place, symmetric=limit.symmetric)
    return Kernels.of_blocks(whole)


def plan_blocks(limit: Limit, block: int | None = None) -> list[Block]:
    """Return the rows and columns of the blocks to compute.

    Args:
        limit: The limit on its inputs.
        block: Number of inputs along the side of a block; None chooses one.

    Returns:
        Pairs of slices. If both sets of inputs are equal, blocks below the diagonal are left out.
    """
    rows, columns = limit.shape
    if block is None:
        entries = _ENTRIES.get(limit.device.type, _ENTRIES["cuda"])
        if limit.pair_entries > 1:
            entries = max(entries, _PIXEL_ENTRIES)
        block = max(1, int((entries / limit.pair_entries) ** 0.5))
    side = check_whole("block", block)
    plan = []
    for row in range(0, rows, side):
        first_column = row if limit.symmetric else 0
        for column in range(first_column, columns, side):
            row_slice = slice(row, min(row + side, rows))
            column_slice = slice(column, min(column + side, columns))
            plan.append((row_slice, column_slice))
    return plan


def compute_blocks(
    limit: Limit,
    plan: list[Block],
    *,
    progress: bool | None = None,
) -> Iterator[tuple[Block, Kernels]]:
    """Yield the kernels of some blocks.

    Args:
        limit: The limit on its inputs.
        plan: The blocks.
        progress: Show a progress bar, as in :func:`kernels`.
    """
    if progress is None:
        terminal = sys.stderr is not None and sys.stderr.isatty()
        progress = terminal and len(plan) > 100
    steps: Iterable[Block] = plan
    if progress and find_spec("rich") is not None:
        from rich.console import Console
        from rich.progress import track

        steps = track(plan, "kernels", console=Console(file=sys.stderr))
    for rows, columns in steps:
        yield (rows, columns), limit.block(rows, columns)


def _insert(whole: Tensor, piece: Tensor, place: Block, *, symmetric: bool) -> None:
    """Write a block to its place, and to its mirror image if there is one."""
    rows, columns = place
    whole[..., rows, columns] = piece
    if not symmetric or rows == columns:
        return
    mirrored = piece.mT
    if piece.dim() > 3:  # (member, member, n1, n2)
        mirrored = mirrored.transpose(0, 1)
    whole[..., columns, rows] = mirrored


def _is_one_value(kernel: Tensor) -> bool:
    """Return True if all entries are one value in memory, such as 0 or the variance of a bias."""
    return not any(kernel.stride())


def _allocate(piece: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return an empty kernel for all inputs; one value for all entries takes no memory."""
    whole = (*piece.shape[:-2], *shape)
    if _is_one_value(piece):
        return piece.flatten()[:1].squeeze().expand(whole)
    return torch.empty(whole, dtype=piece.dtype, device=piece.device)
