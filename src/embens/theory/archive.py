"""Kernels in files, computed block by block in little memory, and resumed after an interruption.

While a file is computed, finished blocks are stored in a folder next to it, ``NAME.partial``, with
a fingerprint of everything that determines them. A second call with the same arguments continues
there. The finished file appears atomically and contains the fingerprint and a checksum. A lock
ensures that only one call at a time works on a file.
"""

import contextlib
import errno
import hashlib
import itertools
import json
import math
import os
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embens import files
from embens.checks import warn
from embens.ensemble import EmbeddedEnsemble
from embens.fields import Fields, refusal
from embens.files import Format, Refused
from embens.theory.blocks import Block, compute_blocks, plan_blocks
from embens.theory.kernel import Kernels
from embens.theory.limit import Limit

NAMES: tuple[str, ...] = (
    "nngp_same",
    "nngp_cross",
    "ntk_shared_same",
    "ntk_shared_cross",
    "ntk_individual_same",
)
"""Names of the arrays in a file, in the order of ``Kernels.blocks``."""

FORMAT = Format("embens kernels", 1)
PART = Format("part of embens kernels", 1)
_HEADER = "embens.json"
_BLOCK_NAME = re.compile(r"\d{8}\.safetensors")


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
    """Write the kernels of an infinitely wide ensemble to a file, resuming an interrupted call.

    Memory is that of a few blocks. The file holds the arrays ``nngp_same``, ``nngp_cross``,
    ``ntk_shared_same``, ``ntk_shared_cross`` and ``ntk_individual_same``. If the header of an
    existing file has the fingerprint of these kernels, the file is not written again;
    :func:`load_kernels` verifies its contents.

    Args:
        path: File to write, ``….npz``.
        ensemble: An ensemble, or a plain network.
        x1: Inputs, ``(n1, …)``.
        x2: Other inputs, ``(n2, …)``; None means ``x1``.
        dtype: ``torch.float64`` or ``torch.float32``.
        block: Number of inputs along the side of a block; None chooses one.
        progress: Show a progress bar, as in :func:`embens.theory.kernels`.

    Returns:
        The path.

    Raises:
        FileExistsError: If an unfinished file of other kernels is there, or other files are in
            the folder of the blocks.
        OSError: If no file can be written there, for example because it is a folder.

    Example:
        >>> import tempfile
        >>> from embens import networks
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = write_kernels(f"{folder}/k.npz", networks.mlp(2, 4, depth=1), torch.eye(2))
        ...     load_kernels(path).nngp.same.shape
        torch.Size([2, 2])
    """
    path = check_path(path)
    folder = path.with_name(path.name + ".partial")
    if path.parent.exists():
        files.check_output(path)
        _check_partial(folder)
    limit = Limit(ensemble, x1, x2, dtype=dtype)
    plan = plan_blocks(limit, block)
    versions = version("embens"), torch.__version__
    fingerprint = limit.fingerprint(plan[:2], len(plan), versions)
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.locked(path.with_name(f".{path.name}.lock"), str(path)):
        if not _is_complete(path, fingerprint):
            finished = _finished_blocks(folder, fingerprint, plan)
            missing = [index for index in range(len(plan)) if index not in finished]
            blocks = compute_blocks(limit, [plan[index] for index in missing], progress=progress)
            for index, (_, kernels) in zip(missing, blocks, strict=True):
                tensors = dict(zip(NAMES, kernels.blocks, strict=True))
                header = {"fingerprint": fingerprint, "block": index}
                files.write_tensors(_block_path(folder, index), PART, header, tensors)
            assembly = _Assembly(folder, plan, limit.shape, limit.symmetric, fingerprint)
            assembly.write(path)
        _remove_blocks(folder)
    return path


def load_kernels(path: str | os.PathLike[str]) -> Kernels:
    """Read kernels that :func:`write_kernels` wrote.

    Args:
        path: File to read, ``….npz``.

    Returns:
        The kernels.

    Raises:
        FileNotFoundError: If there is no such file.
        embens.files.Refused: If the file is damaged or was not written by embens.

    Example:
        >>> import tempfile
        >>> from embens import networks
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = write_kernels(f"{folder}/k.npz", networks.mlp(2, 4, depth=1), torch.eye(2))
        ...     kernels = load_kernels(path)
        >>> kernels.ntk_shared.same.dtype
        torch.float64
    """
    import numpy as np

    path = check_path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    with _open_archive(path) as (header, file):
        _check_members(path, file)
        digest = hashlib.sha256(header.text("fingerprint").encode())
        arrays = []
        for name in NAMES:
            array = _read_array(path, file, name)
            digest.update(_array_title(name, array.dtype, array.shape))
            digest.update(array.data)
            arrays.append(array)
            _check_array(path, name, array, arrays[0])
        if digest.hexdigest() != header.text("sha256"):
            raise Refused(
                f"{path.name} is damaged: it has another checksum. Delete it and write it again."
            )
    for name, array in zip(NAMES, arrays, strict=True):
        if not np.isfinite(array).all():
            warn(f"{path.name} was written with NaN or inf in {name}.")
    return Kernels.of_blocks([torch.from_numpy(array) for array in arrays])


def _check_members(path: Path, file: zipfile.ZipFile) -> None:
    """Raise unless an archive holds the header and the arrays, each once and uncompressed."""
    expected = sorted([_HEADER, *(f"{name}.npy" for name in NAMES)])
    if sorted(file.namelist()) != expected:
        raise refusal(f"{path.name}: the list of arrays", str(expected), sorted(file.namelist()))


def _read_array(path: Path, file: zipfile.ZipFile, name: str) -> Any:
    """Return an array of an archive, whose size is checked before memory is allocated."""
    import numpy as np

    with file.open(f"{name}.npy") as member:
        version = np.lib.format.read_magic(member)
        if version != (1, 0):
            raise refusal(f"{path.name}: the version of {name}", "(1, 0)", version)
        shape, is_transposed, dtype = np.lib.format.read_array_header_1_0(member)
        if is_transposed or dtype.str not in ("<f4", "<f8"):
            raise refusal(f"{path.name}: {name}", "in rows of float32 or float64", dtype)
        content = bytearray(member.read())
    if len(shape) not in (2, 3, 4) or min(shape) < 0:
        raise refusal(f"{path.name}: the shape of {name}", "that of kernels", shape)
    if math.prod(shape) * dtype.itemsize != len(content):
        expected = f"that of {len(content) // dtype.itemsize} values"
        raise refusal(f"{path.name}: the shape of {name}", expected, shape)
    return np.frombuffer(content, dtype).reshape(shape)


def check_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a kernel file.

    Raises:
        ValueError: If it does not end in ``.npz``.
    """
    path = Path(path)
    if path.suffix != ".npz":
        raise ValueError(f"a file of kernels ends in .npz; got {path.name!r}.")
    return path


def _check_array(path: Path, name: str, array: Any, first: Any) -> None:
    """Raise unless an array has the dtype and shape that the first one implies."""
    *members, n1, n2 = first.shape
    leading = members * 2 if name.endswith("cross") else members
    shape = (*leading, n1, n2)
    if len(members) > 1 or array.shape != shape or array.dtype != first.dtype:
        value = f"{array.dtype} {array.shape}"
        raise refusal(f"{path.name}: {name}", f"{first.dtype} {shape}, as {NAMES[0]}", value)


def _check_partial(folder: Path) -> None:
    """Raise unless the folder of the blocks is free or holds blocks only: it is removed later."""
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise FileExistsError(
            errno.EEXIST, "Blocks are stored in this folder, but it is a file. Move it", str(folder)
        )
    for path in folder.iterdir():
        if not _BLOCK_NAME.fullmatch(path.name) and not files.is_leftover(path):
            raise FileExistsError(
                errno.EEXIST,
                f"This folder is removed at the end, but it holds {path.name!r}. Move it, or write "
                "the kernels to another file",
                str(folder),
            )


def _remove_blocks(folder: Path) -> None:
    """Remove the blocks and their folder; files that were added in the meantime stay."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if _BLOCK_NAME.fullmatch(path.name) or files.is_leftover(path):
            files.remove_now(path)
    if any(folder.iterdir()):
        warn(f"{folder} holds other files and was not removed.")
    else:
        folder.rmdir()


def _block_path(folder: Path, index: int) -> Path:
    return folder / f"{index:08d}.safetensors"


def _finished_blocks(folder: Path, fingerprint: str, plan: list[Block]) -> set[int]:
    """Return the indices of finished blocks; damaged ones are computed again."""
    folder.mkdir(exist_ok=True)
    finished = set()
    for index, block in enumerate(plan):
        path = _block_path(folder, index)
        if not path.exists():
            continue
        try:
            header, tensors = files.read_tensors(path, PART)
            if header.get("fingerprint") != fingerprint:
                raise FileExistsError(
                    f"{folder} holds a part of other kernels (another network, inputs, dtype, "
                    "block size or version). Delete that folder, or write to another file."
                )
            _check_block(path, header, tensors, index, block)
        except Refused as error:
            warn(f"{error}; this block is computed again")
            continue
        finished.add(index)
    return finished


def _check_block(
    path: Path, header: dict[str, Any], tensors: dict[str, Tensor], index: int, block: Block
) -> None:
    """Raise unless a file holds the block of its name."""
    if header.get("block") != index:
        raise refusal(f"{path.name}: block", str(index), header.get("block"))
    if sorted(tensors) != sorted(NAMES):
        raise refusal(f"{path.name}: the list of arrays", str(sorted(NAMES)), sorted(tensors))
    rows, columns = block
    shape = (rows.stop - rows.start, columns.stop - columns.start)
    for name, tensor in tensors.items():
        if tuple(tensor.shape[-2:]) != shape:
            raise refusal(f"{path.name}: {name}", f"a block of shape {shape}", tensor)


@dataclass(frozen=True)
class _Assembly:
    """Finished blocks that become one file.

    Attributes:
        folder: Folder of the blocks.
        plan: Rows and columns of the blocks.
        shape: Number of inputs in rows and in columns.
        symmetric: True if blocks below the diagonal are mirror images.
        fingerprint: Hash of everything that determines the kernels.
    """

    folder: Path
    plan: list[Block]
    shape: tuple[int, int]
    symmetric: bool
    fingerprint: str

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        files.write_atomically(path, self._write_zip)

    def _write_zip(self, path: Path) -> None:
        import numpy as np

        digest = hashlib.sha256(self.fingerprint.encode())
        with zipfile.ZipFile(path, "w") as file:
            for name in NAMES:
                first = self._view(0, name)
                dtype = np.dtype({"F32": "<f4", "F64": "<f8"}[first.get_dtype()])
                shape = (*first.get_shape()[:-2], *self.shape)
                digest.update(_array_title(name, dtype, shape))
                description = {"descr": dtype.str, "fortran_order": False, "shape": shape}
                with file.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                    np.lib.format.write_array_header_1_0(member, description)
                    for band in self._bands(name, dtype, shape):
                        digest.update(band)
                        member.write(band)
            header = {
                "format": FORMAT.name,
                "version": FORMAT.version,
                "sha256": digest.hexdigest(),
                "fingerprint": self.fingerprint,
            }
            file.writestr(zipfile.ZipInfo(_HEADER), json.dumps(header))

    def _view(self, index: int, name: str) -> Any:
        """Return a lazy view of an array of a block; indexing it reads a part of the file."""
        from safetensors import safe_open

        with safe_open(_block_path(self.folder, index), framework="np") as file:
            return file.get_slice(name)

    def _bands(self, name: str, dtype: Any, shape: tuple[int, ...]) -> Iterator[Any]:
        """Yield all rows of an array, the rows of one block at a time."""
        import numpy as np

        row_slices = {rows.start: rows for rows, _ in self.plan}.values()
        member_ranges = [range(size) for size in shape[:-2]]
        for members in itertools.product(*member_ranges):
            for rows in row_slices:
                band = np.empty((rows.stop - rows.start, shape[-1]), dtype)
                for index, (block_rows, block_columns) in enumerate(self.plan):
                    if block_rows == rows:
                        block = self._view(index, name)[(*members, slice(None))]
                        band[:, block_columns] = block
                    elif self.symmetric and block_columns == rows:
                        # The mirror image of a block exchanges its members as well.
                        block = self._view(index, name)[(*members[::-1], slice(None))]
                        band[:, block_rows] = block.T
                yield band.data


@contextlib.contextmanager
def _open_archive(path: Path) -> Iterator[tuple[Fields, zipfile.ZipFile]]:
    """Open a file of kernels and read its header."""
    with files.refusing(path), zipfile.ZipFile(path) as file:
        if any(member.compress_type for member in file.infolist()):
            raise Refused(
                f"{path.name} is compressed, so it was not written by embens. Write it again."
            )
        header: Any = None
        if _HEADER in file.namelist():
            header = files.parse_json(file.read(_HEADER))
        files.check_header(path.name, header, FORMAT)
        names = ["format", "version", "sha256", "fingerprint"]
        yield Fields(header, f"{path.name}: {_HEADER}", names), file


def _is_complete(path: Path, fingerprint: str) -> bool:
    """Return True if a file of kernels has this fingerprint in its header."""
    try:
        with _open_archive(path) as (header, _):
            return header.text("fingerprint") == fingerprint
    except (OSError, Refused):
        return False


def _array_title(name: str, dtype: Any, shape: tuple[int, ...]) -> bytes:
    return f"\n{name} {dtype.str} {tuple(shape)}\n".encode()
