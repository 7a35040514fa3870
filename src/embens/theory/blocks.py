"""All kernels of many inputs, block by block; symmetric work is done once.

Blocks come one after another; torch's threads share the work inside each. They are large enough for
that to pay, and small enough that a dozen of them are little beside the kernels of many inputs.

Not here: kernels in files (:mod:`embens.theory.storage`).
"""

import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from embens.checks import check_whole
from embens.ensemble import EmbeddedEnsemble
from embens.theory.kernel import Kernels
from embens.theory.limit.limit import Limit

Block = tuple[slice, slice]
NUMBERS = {"cpu": 160_000, "cuda": 2**24}  # numbers in one kernel of a block, by device
PIXEL_NUMBERS = 2**20
"""The same, at least, where each pair of inputs has many numbers, as images do."""


def kernels(
    ensemble: EmbeddedEnsemble | nn.Module,
    x1: Tensor,
    x2: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    block: int | None = None,
    progress: bool | None = None,
) -> Kernels:
    r"""Return the kernels of an infinitely wide ensemble.

    Args:
        ensemble: what ``embed`` and the families return; the widths of its layers don't matter. A
            plain network is an ensemble of equal members.
        x1: inputs, ``(n1, …)``; kernels are computed on their device.
        x2: other inputs; None: the same.
        dtype: float64, or float32 for half the memory and about six digits.
        block: how many inputs make the side of a block. None: what fits the cache.
        progress: show a bar. None: if the error stream is a terminal and there is much to do.

    Example:
        A ReLU network of one hidden layer, at an angle of 90°:

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
    result: list[Tensor] = []
    for where, part in compute_blocks(limit, plan, progress=progress):
        result = result or [_room(piece, limit.shape) for piece in part.blocks]
        for whole, piece in zip(result, part.blocks, strict=True):
            if not _is_one_number(whole):
                _put(whole, piece, where, symmetric=limit.symmetric)
    return Kernels.of_blocks(result)


def plan_blocks(limit: Limit, block: int | None = None) -> list[Block]:
    """Return the blocks to compute: where kernels are symmetric, those not below the diagonal."""
    n1, n2 = limit.shape
    if block is None:
        numbers = NUMBERS.get(limit.device.type, NUMBERS["cuda"])
        if limit.numbers > 1:
            numbers = max(numbers, PIXEL_NUMBERS)
        block = int((numbers / limit.numbers) ** 0.5) or 1
    side = check_whole("block", block)
    return [
        (slice(row, min(row + side, n1)), slice(column, min(column + side, n2)))
        for row in range(0, n1, side)
        for column in range(row if limit.symmetric else 0, n2, side)
    ]


def compute_blocks(
    limit: Limit, plan: list[Block], *, progress: bool | None = None
) -> Iterator[tuple[Block, Kernels]]:
    """Yield the kernels of some blocks; ``progress`` is as for :func:`kernels`."""
    terminal = sys.stderr is not None and sys.stderr.isatty()
    wanted = progress if progress is not None else terminal and len(plan) > 100
    steps: Iterable[Block] = plan
    if wanted and find_spec("rich") is not None:
        from rich.console import Console
        from rich.progress import track

        steps = track(plan, "kernels", console=Console(file=sys.stderr))
    for block in steps:
        yield block, limit.block(*block)


def _put(whole, piece, where: Block, *, symmetric: bool) -> None:
    """Write a block to its place, and to its mirror image where there is one."""
    rows, columns = where
    whole[..., rows, columns] = piece
    if symmetric and rows != columns:
        mirrored = piece.swapaxes(-1, -2)
        whole[..., columns, rows] = mirrored.swapaxes(0, 1) if piece.ndim > 3 else mirrored


def _is_one_number(kernel: Tensor) -> bool:
    return not any(kernel.stride())  # zero or a bias's, for all pairs of inputs


def _room(like: Tensor, shape: tuple[int, int]) -> Tensor:
    whole = (*like.shape[:-2], *shape)
    if _is_one_number(like):
        return like.flatten()[:1].squeeze().expand(whole)  # takes no memory
    return torch.empty(whole, dtype=like.dtype, device=like.device)
