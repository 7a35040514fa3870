"""Files that are written whole or not at all. Not here: downloads (:mod:`embens.data.download`)."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path


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


def _sync(path: Path, mode: int) -> None:
    handle = os.open(path, mode)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
