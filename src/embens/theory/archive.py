"""Kernels in files, computed block by block in little memory, resumed where they were interrupted.

While a file is computed, its finished blocks lie in a folder beside it, ``NAME.partial``, with a
fingerprint of everything that determines them. A second call with the same arguments goes on from
there; the finished file appears all at once, and carries the fingerprint and a checksum. One call
at a time works on a file: it holds a lock.
"""

import contextlib
import hashlib
import itertools
import json
import os
import warnings
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embens import files
from embens.ensemble import EmbeddedEnsemble
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
FORMAT, PART = Format("embens kernels", 1), Format("part of embens kernels", 1)
_HEADER = "embens.json"


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

    Memory is that of a few blocks. The file, ``….npz``, holds the arrays ``nngp_same``,
    ``nngp_cross``, ``ntk_shared_same``, ``ntk_shared_cross`` and ``ntk_individual_same``.
    A file that holds these kernels already, by its header, is left as it is; :func:`load_kernels`
    checks all of it. The other arguments are those of :func:`embens.theory.kernels`.
    """
    path = check_path(path)
    limit = Limit(ensemble, x1, x2, dtype=dtype)
    plan = plan_blocks(limit, block)
    versions = version("embens"), torch.__version__
    fingerprint = limit.fingerprint(plan[:2], len(plan), versions)
    folder = path.with_name(path.name + ".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.locked(path.with_name(f".{path.name}.lock"), str(path)):
        if not _holds(path, fingerprint):
            done = _finished(folder, fingerprint)
            left = [i for i in range(len(plan)) if i not in done]
            found = compute_blocks(limit, [plan[i] for i in left], progress=progress)
            for i, (_, kernels) in zip(left, found, strict=True):
                tensors = dict(zip(NAMES, kernels.blocks, strict=True))
                files.write_tensors(_part(folder, i), PART, {"fingerprint": fingerprint}, tensors)
            _publish(folder, plan, limit, path, fingerprint)
        files.remove(folder)
    return path


def load_kernels(path: str | os.PathLike[str]) -> Kernels:
    """Return the kernels that :func:`write_kernels` wrote; a file that is not whole is refused."""
    import numpy as np

    path = check_path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    with _opened(path) as (header, file):
        digest = hashlib.sha256(header["fingerprint"].encode())
        arrays = []
        for name in NAMES:
            with file.open(f"{name}.npy") as member:
                array = np.lib.format.read_array(member, allow_pickle=False)
            digest.update(_title(name, array.dtype, array.shape))
            digest.update(array.data)
            arrays.append(array)
            *members, n1, n2 = arrays[0].shape
            lead = members * 2 if name.endswith("cross") else members
            kinds = array.dtype, arrays[0].dtype
            if array.shape != (*lead, n1, n2) or kinds[0] != kinds[1] or kinds[0].kind != "f":
                raise Refused(f"{path.name}: {name} and {NAMES[0]} don't belong together")
        if digest.hexdigest() != header["sha256"]:
            raise Refused(
                f"{path.name} is damaged: it has another checksum. Delete it and write it again."
            )
        return Kernels.of_blocks([torch.from_numpy(array) for array in arrays])


def check_path(path: str | os.PathLike[str]) -> Path:
    """Return the path if it is that of an npz file."""
    path = Path(path)
    if path.suffix != ".npz":
        raise ValueError(f"a file of kernels ends in .npz; got {path.name!r}.")
    return path


def _part(folder: Path, block: int) -> Path:
    return folder / f"{block:08d}.safetensors"


def _finished(folder: Path, fingerprint: str) -> set[int]:
    """Return the blocks in the folder of an unfinished file; one of other kernels is refused."""
    folder.mkdir(exist_ok=True)
    found = set()
    for path in sorted(folder.glob("*.safetensors")):
        try:
            header, _ = files.read_tensors(path, PART)
        except Refused as error:
            warnings.warn(f"{error}; this block is computed again", stacklevel=3)
            continue
        if header["fingerprint"] != fingerprint:
            raise FileExistsError(
                f"{folder} holds a part of other kernels (another network, inputs, dtype, block "
                "size or version). Delete that folder, or write to another file."
            )
        found.add(int(path.stem))
    return found


def _publish(folder: Path, plan: list[Block], limit: Limit, path: Path, fingerprint: str) -> None:
    """Turn the blocks into the file, at once."""
    import numpy as np
    from safetensors import safe_open

    def view(block: int, name: str) -> Any:
        with safe_open(_part(folder, block), framework="np") as file:
            return file.get_slice(name)  # an index reads a part

    def bands(name: str, dtype: Any, shape: tuple[int, ...]) -> Iterator[Any]:
        """Yield all rows of an array, some at a time."""
        for members in itertools.product(*map(range, shape[:-2])):
            for rows in {rows.start: rows for rows, _ in plan}.values():
                band = np.empty((rows.stop - rows.start, shape[-1]), dtype)
                for i, where in enumerate(plan):
                    if where[0] == rows:
                        band[:, where[1]] = view(i, name)[(*members, slice(None))]
                    elif limit.symmetric and where[1] == rows:
                        band[:, where[0]] = view(i, name)[(*members[::-1], slice(None))].T
                yield band.data

    def write(to: Path) -> None:
        digest = hashlib.sha256(fingerprint.encode())
        with zipfile.ZipFile(to, "w") as file:
            for name in NAMES:
                like = view(0, name)
                dtype = np.dtype({"F32": "<f4", "F64": "<f8"}[like.get_dtype()])
                shape = (*like.get_shape()[:-2], *limit.shape)
                digest.update(_title(name, dtype, shape))
                about = {"descr": dtype.str, "fortran_order": False, "shape": shape}
                with file.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                    np.lib.format.write_array_header_1_0(member, about)
                    for band in bands(name, dtype, shape):
                        digest.update(band)
                        member.write(band)
            header = {"format": FORMAT.name, "version": FORMAT.version}
            header |= {"sha256": digest.hexdigest(), "fingerprint": fingerprint}
            file.writestr(zipfile.ZipInfo(_HEADER), json.dumps(header))

    files.write_atomically(path, write)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[dict[str, Any], zipfile.ZipFile]]:
    """Open a file of kernels and read its header."""
    with files.refusing(path), zipfile.ZipFile(path) as file:
        if any(member.compress_type for member in file.infolist()):
            raise Refused(f"{path.name} is compressed, and was not written so by embens")
        header: Any = json.loads(file.read(_HEADER)) if _HEADER in file.namelist() else None
        files.check_header(path.name, header, FORMAT)
        yield header, file


def _holds(path: Path, fingerprint: str) -> bool:
    """Return whether a file is there that has the kernels of a fingerprint, by its header."""
    try:
        with _opened(path) as (header, _):
            return header["fingerprint"] == fingerprint
    except (OSError, Refused):
        return False


def _title(name: str, dtype: Any, shape: tuple[int, ...]) -> bytes:
    return f"\n{name} {dtype.str} {tuple(shape)}\n".encode()
