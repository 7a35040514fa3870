"""All kernels of many inputs, block by block, in memory or in a file; symmetric work is done once.

Blocks come one after another; torch's threads share the work inside each. They are large enough for
that to pay, and small enough that a dozen of them are little beside the kernels of many inputs.

While a file is computed, its kernels lie in a folder beside it, ``NAME.partial``: a memory-mapped
array each, a mark for every finished block, and a fingerprint of everything that determines them.
A second call with the same arguments goes on from there; the finished file appears all at once.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from embens.checks import check_whole
from embens.ensemble import EmbeddedEnsemble
from embens.files import write_atomically
from embens.theory.kernel import Kernels
from embens.theory.limit.limit import Limit

if TYPE_CHECKING:
    import numpy as np

NAMES = ("nngp_same", "nngp_cross", "ntk_shared_same", "ntk_shared_cross", "ntk_individual_same")
SUFFIXES = (".npz", ".zarr")
_FLUSH_SECONDS = 5.0
Block = tuple[slice, slice]
NUMBERS = {"cpu": 160_000, "cuda": 2**24}
"""Numbers in one kernel of a block, by device."""
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
    plan = _plan_blocks(limit, block)
    if len(plan) == 1:
        return limit.block()
    result: list[Tensor] = []
    for where, part in _compute_blocks(limit, plan, progress=progress):
        result = result or [_room(piece, limit.shape) for piece in part.blocks]
        for whole, piece in zip(result, part.blocks, strict=True):
            if not _is_one_number(whole):
                _put(whole, piece, where, symmetric=limit.symmetric)
    return Kernels.of_blocks(result)


def write_kernels(
    path: str | os.PathLike[str],
    ensemble: EmbeddedEnsemble | nn.Module,
    x1: Tensor,
    x2: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    block: int | None = None,
    progress: bool | None = None,
) -> Path:
    """Write the kernels of an infinitely wide ensemble to a file, resuming what was begun.

    Memory is that of a few blocks. The file, ``….npz`` or ``….zarr`` (needs zarr), holds the arrays
    ``nngp_same``, ``nngp_cross``, ``ntk_shared_same``, ``ntk_shared_cross`` and
    ``ntk_individual_same``. The other arguments are those of :func:`embens.theory.kernels`.
    """
    path = check_path(path)
    limit = Limit(ensemble, x1, x2, dtype=dtype)
    plan = _plan_blocks(limit, block)
    fingerprint = limit.fingerprint(plan[:2], len(plan))
    partial = _Partial(path.with_name(path.name + ".partial"), fingerprint, len(plan))
    left = [i for i, done in enumerate(partial.done) if not done]
    found = _compute_blocks(limit, [plan[i] for i in left], progress=progress)
    for i, (where, part) in zip(left, found, strict=True):
        pieces = [block.cpu().numpy() for block in part.blocks]
        partial.make_room(pieces, limit.shape)
        for whole, piece in zip(partial.arrays, pieces, strict=True):
            _put(whole, piece, where, symmetric=limit.symmetric)
        partial.finished(i)
    partial.flush()
    _publish(partial, path)
    return path


def load_kernels(path: str | os.PathLike[str]) -> Kernels:
    """Return the kernels that :func:`write_kernels` wrote."""
    import numpy as np

    path = check_path(path)
    if path.suffix == ".npz":
        with np.load(path) as file:
            return Kernels.of_blocks([torch.from_numpy(file[name]) for name in NAMES])
    group = _zarr().open_group(str(path), mode="r")
    return Kernels.of_blocks([torch.from_numpy(group[name][...]) for name in NAMES])


def check_path(path: str | os.PathLike[str]) -> Path:
    """Return the path if its ending says a format that is known, and that is installed."""
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ValueError(f"a file of kernels ends in {' or '.join(SUFFIXES)}; got {path.name!r}.")
    if path.suffix == ".zarr":
        _zarr()
    return path


def _plan_blocks(limit: Limit, block: int | None = None) -> list[Block]:
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


def _compute_blocks(
    limit: Limit, plan: list[Block], *, progress: bool | None = None
) -> Iterator[tuple[Block, Kernels]]:
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


class _Partial:
    """The folder of an unfinished file."""

    def __init__(self, folder: Path, fingerprint: str, blocks: int):
        from numpy.lib.format import open_memmap

        self.folder = folder
        self.arrays: list[np.ndarray] = []
        self._waiting: list[int] = []
        self._flushed = time.monotonic()
        marks, mine = folder / "done.npy", folder / "fingerprint"
        if folder.exists() and not (mine.exists() and mine.read_text() == fingerprint):
            raise FileExistsError(
                f"{folder} holds a part of other kernels (another network, inputs, dtype or "
                "block size). Delete that folder, or write to another file."
            )
        if not marks.exists():
            folder.mkdir(parents=True, exist_ok=True)
            open_memmap(marks, mode="w+", dtype=bool, shape=(blocks,))
            mine.write_text(fingerprint)
        self.done = open_memmap(marks, mode="r+")
        if self.done.any():
            self.arrays = [open_memmap(folder / f"{name}.npy", mode="r+") for name in NAMES]

    def make_room(self, like: list[Any], shape: tuple[int, int]) -> None:
        from numpy.lib.format import open_memmap

        for name, piece in zip(NAMES, like, strict=True) if not self.arrays else ():
            file, size = self.folder / f"{name}.npy", (*piece.shape[:-2], *shape)
            self.arrays.append(open_memmap(file, mode="w+", dtype=piece.dtype, shape=size))

    def finished(self, block: int) -> None:
        """Note that a block is there; its mark is written after its numbers."""
        self._waiting.append(block)
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        for array in self.arrays:
            array.flush()  # type: ignore[attr-defined]
        self.done[self._waiting] = True
        self.done.flush()  # type: ignore[attr-defined]
        self._waiting.clear()
        self._flushed = time.monotonic()


def _publish(partial: _Partial, path: Path) -> None:
    """Turn the folder into the file, at once."""
    import numpy as np

    arrays: dict[str, Any] = dict(zip(NAMES, partial.arrays, strict=True))

    def write(to: Path) -> None:
        with to.open("wb") as file:
            np.savez(file, **arrays)

    if path.suffix == ".npz":
        write_atomically(path, write)
    else:
        hidden = path.with_name(f".{path.name}.{os.getpid()}")
        group = _zarr().open_group(str(hidden), mode="w")
        for name, array in arrays.items():
            chunks = (*array.shape[:-2], *(min(1024, n) for n in array.shape[-2:]))
            group.create_array(name, data=array, chunks=chunks)
        shutil.rmtree(path, ignore_errors=True)
        os.replace(hidden, path)
    partial.arrays.clear()
    shutil.rmtree(partial.folder)


def _zarr() -> Any:
    try:
        import zarr
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "a .zarr file needs zarr: pip install 'embens[zarr]', or write .npz"
        ) from None
    return zarr
