"""Kernels in files: written block by block, resumed after an interruption.

While they are computed, kernels lie in a folder beside the file, ``NAME.partial``: a memory-mapped
array each, a mark for every finished block, and a fingerprint of everything that determines them.
A second call with the same arguments goes on from there; the finished file appears all at once.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from embens.ensemble import EmbeddedEnsemble
from embens.files import write_atomically
from embens.theory.blocks import Block, compute_blocks, plan_blocks, put
from embens.theory.kernel import Kernels
from embens.theory.limit import Limit

if TYPE_CHECKING:
    import numpy as np

NAMES = ("nngp_same", "nngp_cross", "ntk_shared_same", "ntk_shared_cross", "ntk_individual_same")
SUFFIXES = (".npz", ".zarr")
_FLUSH_SECONDS = 5.0


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
    plan = plan_blocks(limit, block)
    partial = _Partial(path.with_name(path.name + ".partial"), fingerprint(limit, plan), len(plan))
    left = [i for i, done in enumerate(partial.done) if not done]
    found = compute_blocks(limit, [plan[i] for i in left], progress=progress)
    for i, (where, part) in zip(left, found, strict=True):
        pieces = [block.cpu().numpy() for block in part.blocks]
        partial.make_room(pieces, limit.shape)
        for whole, piece in zip(partial.arrays, pieces, strict=True):
            put(whole, piece, where, symmetric=limit.symmetric)
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


def fingerprint(limit: Limit, plan: list[Block]) -> str:
    """Return a hash of all that determines the kernels and their blocks."""
    digest = hashlib.sha256(str((limit.description(), plan[:2], len(plan))).encode())
    for tensor in limit.tensors():
        digest.update(str((tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


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
