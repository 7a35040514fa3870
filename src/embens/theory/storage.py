"""Kernels in files, computed block by block in little memory, resumed where they were interrupted.

While a file is computed, its finished blocks lie in a folder beside it, ``NAME.partial``, with a
fingerprint of everything that determines them. A second call with the same arguments goes on from
there; the finished file appears all at once, and carries the fingerprint and a checksum. One call
at a time works on a file: it holds a lock.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import time
import warnings
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from embens import files
from embens.ensemble import EmbeddedEnsemble
from embens.files import Format, Refused
from embens.theory.blocks import Block, compute_blocks, plan_blocks
from embens.theory.kernel import Kernels
from embens.theory.limit.limit import Limit

if TYPE_CHECKING:
    import numpy as np

NAMES = ("nngp_same", "nngp_cross", "ntk_shared_same", "ntk_shared_cross", "ntk_individual_same")
SUFFIXES = (".npz", ".zarr")
FORMAT, PART = Format("embens kernels", 1), Format("part of embens kernels", 1)
_HEADER = "embens.json"
_FLUSH_SECONDS, _FLUSH_BYTES = 5.0, 2**26


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
    ``ntk_individual_same``. A file that holds these kernels already is left as it is. The other
    arguments are those of :func:`embens.theory.kernels`.
    """
    path = check_path(path)
    limit = Limit(ensemble, x1, x2, dtype=dtype)
    plan = plan_blocks(limit, block)
    versions = version("embens"), torch.__version__
    fingerprint = limit.fingerprint(plan[:2], len(plan), versions)
    folder = path.with_name(path.name + ".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.locked(path.with_name(f".{path.name}.lock"), str(path)):
        for name in (path.name, folder.name):
            files.remove_leftovers(path.parent, name)
        if not _holds(path, fingerprint):
            parts = _Parts(folder, fingerprint)
            left = [i for i in range(len(plan)) if i not in parts.places]
            found = compute_blocks(limit, [plan[i] for i in left], progress=progress)
            for i, (_, kernels) in zip(left, found, strict=True):
                parts.add(i, kernels)
            parts.flush()
            _publish(parts, plan, limit, path)
        files.remove(folder)
    return path


def load_kernels(path: str | os.PathLike[str]) -> Kernels:
    """Return the kernels that :func:`write_kernels` wrote; a file that is not whole is refused."""
    path = check_path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    with files.refusing(path):
        if path.suffix == ".npz":
            header, arrays = _read_npz(path)
        else:
            header, arrays = _read_zarr(path)
        files.check_header(path.name, header, FORMAT)
        digest = hashlib.sha256(header["fingerprint"].encode())
        for name in NAMES:
            digest.update(_title(name, arrays[name].dtype, arrays[name].shape))
            digest.update(arrays[name].data)
        if digest.hexdigest() != header["sha256"]:
            raise Refused(f"{path.name} is damaged or incomplete: it has another checksum")
        *members, n1, n2 = arrays["nngp_same"].shape
        for name, array in arrays.items():
            lead = members * 2 if name.endswith("cross") else members
            if array.shape != (*lead, n1, n2) or array.dtype != arrays["nngp_same"].dtype:
                raise Refused(f"{path.name}: {name} and nngp_same don't belong together")
        return Kernels.of_blocks([torch.from_numpy(arrays[name]) for name in NAMES])


def check_path(path: str | os.PathLike[str]) -> Path:
    """Return the path if its ending says a format that is known, and that is installed."""
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ValueError(f"a file of kernels ends in {' or '.join(SUFFIXES)}; got {path.name!r}.")
    if path.suffix == ".zarr":
        _zarr()
    return path


class _Parts:
    """Finished blocks in the folder of an unfinished file, several to a part."""

    def __init__(self, folder: Path, fingerprint: str):
        self.folder, self.fingerprint = folder, fingerprint
        self.places: dict[int, Path] = {}
        self._waiting: dict[int, list[Tensor]] = {}
        self._flushed = time.monotonic()
        folder.mkdir(exist_ok=True)
        files.remove_leftovers(folder)
        for path in sorted(folder.iterdir()):
            try:
                header, _ = files.read_tensors(path, PART)
            except Refused as error:
                warnings.warn(f"{error}; its blocks are computed again", stacklevel=3)
                continue
            if header["fingerprint"] != fingerprint:
                raise FileExistsError(
                    f"{folder} holds a part of other kernels (another network, inputs, dtype, "
                    "block size or version). Delete that folder, or write to another file."
                )
            self.places |= dict.fromkeys(header["blocks"], path)

    def add(self, block: int, kernels: Kernels) -> None:
        """Keep a block, on the disk after a while."""
        self._waiting[block] = kernels.blocks
        size = sum(t.numel() * t.element_size() for t in kernels.blocks) * len(self._waiting)
        if size > _FLUSH_BYTES or time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        tensors = {
            f"{block}.{name}": tensor
            for block, pieces in self._waiting.items()
            for name, tensor in zip(NAMES, pieces, strict=True)
        }
        if tensors:
            path = self.folder / f"{min(self._waiting):08d}.safetensors"
            header = {"fingerprint": self.fingerprint, "blocks": list(self._waiting)}
            files.write_tensors(path, PART, header, tensors)
            self.places |= dict.fromkeys(self._waiting, path)
        self._waiting.clear()
        self._flushed = time.monotonic()

    def view(self, block: int, name: str) -> Any:
        """Return an array of a block without reading it; an index reads a part."""
        from safetensors import safe_open

        with safe_open(self.places[block], framework="np") as file:
            return file.get_slice(f"{block}.{name}")


def _publish(parts: _Parts, plan: list[Block], limit: Limit, path: Path) -> None:
    """Turn the parts into the file, at once."""
    import numpy as np

    digest = hashlib.sha256(parts.fingerprint.encode())

    def header() -> dict[str, Any]:
        found = {"format": FORMAT.name, "version": FORMAT.version, "sha256": digest.hexdigest()}
        return {**found, "fingerprint": parts.fingerprint}

    def arrays() -> Iterator[tuple[str, Any, tuple[int, ...]]]:
        for name in NAMES:
            like = parts.view(0, name)
            dtype = np.dtype({"F32": "<f4", "F64": "<f8"}[like.get_dtype()])
            shape = (*like.get_shape()[:-2], *limit.shape)
            digest.update(_title(name, dtype, shape))
            yield name, dtype, shape

    def bands(name: str, dtype: Any, shape: tuple[int, ...]) -> Iterator[tuple[Any, np.ndarray]]:
        """Yield all rows of an array, some at a time, with their place."""
        for members in itertools.product(*map(range, shape[:-2])):
            for rows in {rows.start: rows for rows, _ in plan}.values():
                band = np.empty((rows.stop - rows.start, shape[-1]), dtype)
                for i, where in enumerate(plan):
                    if where[0] == rows:
                        band[:, where[1]] = parts.view(i, name)[(*members, slice(None))]
                    elif limit.symmetric and where[1] == rows:
                        mirrored = parts.view(i, name)[(*members[::-1], slice(None))]
                        band[:, where[0]] = mirrored.T
                digest.update(band.data)
                yield (*members, rows), band

    def write_npz(to: Path) -> None:
        with zipfile.ZipFile(to, "w") as file:
            for array in arrays():
                name, dtype, shape = array
                with file.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                    about = {"descr": dtype.str, "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(member, about)
                    for _, band in bands(*array):
                        member.write(band.data)
            file.writestr(zipfile.ZipInfo(_HEADER), json.dumps(header()))

    def write_zarr(to: Path) -> None:
        group = _zarr().open_group(str(to), mode="w", zarr_format=3)
        for array in arrays():
            name, dtype, shape = array
            chunks = (*(1 for _ in shape[:-2]), plan[0][0].stop, min(1024, shape[-1]))
            target = group.create_array(
                *(name,), shape=shape, dtype=dtype, chunks=chunks, compressors=None,
                config={"write_empty_chunks": True},
            )  # fmt: skip
            for place, band in bands(*array):
                target[place] = band
        group.attrs.update(header())

    files.write_atomically(path, write_npz if path.suffix == ".npz" else write_zarr)


def _title(name: str, dtype: Any, shape: tuple[int, ...]) -> bytes:
    return f"\n{name} {dtype.str} {tuple(shape)}\n".encode()


def _holds(path: Path, fingerprint: str) -> bool:
    """Return whether a file is there that has the kernels of a fingerprint, by its header."""
    try:
        with files.refusing(path):
            if path.suffix == ".zarr":
                header = json.loads((path / "zarr.json").read_text())["attributes"]
            else:
                with zipfile.ZipFile(path) as file:
                    header = _npz_header(file)
            return header["fingerprint"] == fingerprint
    except (OSError, Refused):
        return False


def _npz_header(file: zipfile.ZipFile) -> Any:
    if _HEADER not in file.namelist():
        return None
    with file.open(_HEADER) as member:
        return json.loads(member.read(10_000))


def _read_npz(path: Path) -> tuple[Any, dict[str, np.ndarray]]:
    import numpy as np

    arrays = {}
    with zipfile.ZipFile(path) as file:
        files.check_header(path.name, header := _npz_header(file), FORMAT)
        for name in NAMES:
            with file.open(f"{name}.npy") as member:
                if np.lib.format.read_magic(member) != (1, 0):
                    raise Refused(f"{path.name}: {name} is not as it was written")
                shape, _, dtype = np.lib.format.read_array_header_1_0(member)
                _check_size(path, name, shape, dtype, path.stat().st_size)
                arrays[name] = np.empty(shape, dtype)
                read: Any = member.readinto  # type: ignore[attr-defined]
                read(arrays[name].reshape(-1).data.cast("B"))
    return header, arrays


def _read_zarr(path: Path) -> tuple[Any, dict[str, np.ndarray]]:
    group = _zarr().open_group(str(path), mode="r", zarr_format=3)
    files.check_header(path.name, header := dict(group.attrs), FORMAT)
    arrays = {}
    for name in NAMES:
        array = group[name]
        if [type(codec).__name__ for codec in array.metadata.codecs] != ["BytesCodec"]:
            raise Refused(f"{path.name}: {name} is not as it was written")
        chunks = (file for file in (path / name / "c").rglob("*") if file.is_file())
        there = sum(chunk.stat().st_size for chunk in chunks)
        _check_size(path, name, array.shape, array.dtype, there)
        arrays[name] = array[...]
    return header, arrays


def _check_size(path: Path, name: str, shape: tuple[int, ...], dtype: Any, there: int) -> None:
    if dtype.str not in ("<f4", "<f8") or len(shape) < 2 or min(shape) < 1:
        raise Refused(f"{path.name}: {name} is {dtype} of shape {shape}, which no kernel is")
    if math.prod(shape) * dtype.itemsize > there:
        raise Refused(f"{path.name} is incomplete: {name} has shape {shape}, but fewer numbers")


def _zarr() -> Any:
    try:
        import zarr
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "a .zarr file needs zarr: pip install 'embens[zarr]', or write .npz"
        ) from None
    return zarr
