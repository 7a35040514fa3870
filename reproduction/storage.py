"""Atomic writes and checksums for result files."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


class DamagedFileError(ValueError):
    """A file whose content does not match its checksum or format."""


def write_atomically(path: str | Path, content: str | bytes | Callable[[Path], object]) -> None:
    """Write a file or folder so that readers see either the old or the new version.

    The content is written under a temporary name in the same folder, synced to disk, and renamed.
    If writing fails, the old file stays and the temporary one is removed. One process may write a
    path at a time; a temporary file left by a killed process is overwritten by the next write.

    Args:
        path: The file or folder. A folder must not exist yet.
        content: Text, bytes, or a function that creates a file or folder at the path it gets.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> write_atomically(folder / "a.txt", "text")
        >>> [file.name for file in folder.iterdir()]
        ['a.txt']
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.part")
    _remove(temporary)
    try:
        if callable(content):
            content(temporary)
        elif isinstance(content, str):
            temporary.write_bytes(content.encode())
        else:
            temporary.write_bytes(content)
        for written in (*temporary.rglob("*"), temporary):
            _sync(written)
        os.replace(temporary, path)
    except BaseException:
        _remove(temporary)
        raise
    _sync(path.parent)


def checksum(text: str) -> str:
    """Return the SHA-256 of a text in hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def seal(record: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON record with its checksum added under ``"sha256"``.

    Example:
        >>> unseal("record", seal({"value": 1}))
        {'value': 1}
    """
    return {**record, "sha256": checksum(json.dumps(record))}


def unseal(name: str, sealed: dict[str, Any]) -> dict[str, Any]:
    """Return a sealed record without its checksum.

    Args:
        name: Name of the record in error messages.
        sealed: A record from :func:`seal`.

    Raises:
        DamagedFileError: If the record does not match its checksum.
    """
    record = {key: value for key, value in sealed.items() if key != "sha256"}
    if checksum(json.dumps(record)) != sealed.get("sha256"):
        raise DamagedFileError(f"{name} is damaged: its checksum does not match its content.")
    return record


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    # Windows cannot open folders, so only files are synced there.
    if path.is_dir() and os.name != "posix":
        return
    flags = os.O_RDWR if path.is_file() else os.O_RDONLY
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
