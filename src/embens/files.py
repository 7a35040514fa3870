"""Files that are written whole or not at all, and tensors in them, without pickle.

Not here: files that grow line by line (:mod:`embens.experiments.results`), and downloads
(:mod:`embens.data.download`).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor


def write_atomically(
    path: str | os.PathLike[str], content: str | bytes | Callable[[Path], object]
) -> None:
    """Write a file so that whoever reads it sees the old one or the new one, whole.

    ``content`` is text, bytes, or a function that writes a file at the path it is given: one with
    another name in the same folder, synced to the disk and renamed at the end. The new file has the
    permissions of the old one; if ``path`` is a link, the file that it leads to is replaced. If
    anything fails, the old file stays as it was and nothing else is left.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "note.txt"
        >>> write_atomically(path, "whole")
        >>> path.read_text()
        'whole'
    """
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.touch(exist_ok=False)
        mode = (path if path.exists() else temporary).stat().st_mode
        if callable(content):
            content(temporary)
        else:
            temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        _sync(temporary, os.O_RDWR)
        temporary.chmod(mode)  # a function may have put another file in its place
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # elsewhere a folder can't be opened
        _sync(path.parent, os.O_RDONLY)


def write_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: dict[str, str]
) -> None:
    """Write tensors, and text by name, to one safetensors file."""
    from safetensors.torch import save_file

    if not Path(path).parent.is_dir():
        raise FileNotFoundError(f"the folder {str(Path(path).parent)!r} does not exist")
    kept = {name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}
    write_atomically(path, lambda name: save_file(kept, name, metadata))


def read_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the text and the tensors in a safetensors file."""
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return file.metadata() or {}, tensors
    except SafetensorError as error:
        raise ValueError(
            f"{path.name} is not a whole safetensors file (truncated, or another format): {error}"
        ) from None


def _sync(path: Path, mode: int) -> None:
    handle = os.open(path, mode)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
