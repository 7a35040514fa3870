"""Locks between processes. A lock file contains the process that holds it."""

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from embens.files.atomic import remove_leftovers


@contextlib.contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold a lock for the duration of a ``with`` block.

    When the lock is taken, temporary files of dead writers in its folder are removed.

    Args:
        path: The lock file, which contains the process that holds the lock.
        what: Name of the resource, for the error message.

    Raises:
        BlockingIOError: If another process, or another call in this one, holds the lock.
        FileExistsError: If the file was not written by a lock.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with locked(folder / ".lock", "the folder"):
        ...     (folder / ".lock").read_text()
        'process ... on ...'
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path, timeout=0)
    owner = ""
    with contextlib.suppress(OSError):
        owner = path.read_text(errors="replace").strip()  # acquire() truncates the file
    if path.is_dir() or path.is_symlink() or (owner and not owner.startswith("process ")):
        raise FileExistsError(
            errno.EEXIST, f"{what} can't be locked: this is not a lock file. Move it", str(path)
        )
    try:
        lock.acquire()
    except Timeout:
        raise BlockingIOError(
            f"{what} is in use by {owner or 'another process'}. Wait until it ends, or choose "
            "another path."
        ) from None
    try:
        with contextlib.suppress(OSError):  # on a full disk the lock still works, without an owner
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        remove_leftovers(path.parent)
        yield
    finally:
        # Unlink before release: a process that acquires the lock in between sees that the file is
        # gone and creates it again. Some systems cannot remove an open file.
        with contextlib.suppress(OSError):
            path.unlink()
        lock.release()
