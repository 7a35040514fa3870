"""Files that appear whole or not at all.

A file is written under a temporary name in the same folder, synced to the disk and renamed, so that
readers see the old or the new file, never a part. Temporary files of killed writers are removed by
the next writer.
"""

import contextlib
import errno
import os
import re
import secrets
import shutil
import socket
import time
import zlib
from collections.abc import Callable
from pathlib import Path

PathLike = str | os.PathLike[str]

# Temporary names are ".<name>.<host>-<process>-<random>".
_TEMPORARY_NAME = re.compile(r"\.(.+)\.([0-9a-f]{8})-(\d+)-[0-9a-f]{8}")
_LONGEST_NAME = 200
"""Bytes of a name in a temporary name, which file systems limit to 255 bytes."""
_DAY = 86_400  # seconds


def check_output(path: PathLike) -> Path:
    """Check that a file can be written at a path, before the work of computing it.

    Args:
        path: File to write. An existing file may be replaced; symbolic links are followed.

    Returns:
        The path without symbolic links.

    Raises:
        IsADirectoryError: If ``path`` is a folder.
        FileNotFoundError: If its folder does not exist.
        NotADirectoryError: If its folder is a file.
        FileExistsError: If it is a device, a pipe or a link to itself.

    Example:
        >>> import tempfile
        >>> check_output(tempfile.mkdtemp())
        Traceback (most recent call last):
        IsADirectoryError: ... A folder is never replaced. Remove it or choose another path: '...'
    """
    path = Path(os.path.realpath(path))
    folder = path.parent
    if path.is_dir():
        raise IsADirectoryError(
            errno.EISDIR, "A folder is never replaced. Remove it or choose another path", str(path)
        )
    if os.path.lexists(path) and not path.is_file():
        raise FileExistsError(
            errno.EEXIST, "Only a regular file can be replaced. Choose another path", str(path)
        )
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(
            errno.ENOTDIR,
            "A file can't contain a file. Choose another path",
            str(path),
        )
    if not folder.exists():
        raise FileNotFoundError(
            f"the folder {str(folder)!r} does not exist. Create it, or choose another path."
        )
    return path


def write_atomically(path: PathLike, content: str | bytes | Callable[[Path], object]) -> None:
    """Write a file so that readers see either the old or the new content.

    If writing fails, the old file is unchanged and nothing else remains. A new file keeps the
    permissions of the old one. If ``path`` is a symbolic link, its target is replaced.

    Args:
        path: File to write. It may replace a file, but never a folder.
        content: Text, bytes, or a function that writes a file or creates a folder at the temporary
            path it receives.

    Raises:
        OSError: If no file can be written there; see :func:`check_output`.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "note.txt"
        >>> write_atomically(path, "text")
        >>> path.read_text()
        'text'
    """
    path = check_output(path)
    temporary = temporary_path(path)
    try:
        remove_leftovers(path.parent, path.name)
        if callable(content):
            content(temporary)
        elif isinstance(content, str):
            temporary.write_bytes(content.encode())
        else:
            temporary.write_bytes(content)
        sync(temporary)
        if path.is_file():
            temporary.chmod(path.stat().st_mode)
        os.replace(temporary, path)
    except BaseException as error:
        remove_now(temporary)
        name_target(error, temporary, path)
        raise
    sync_names(path.parent)


def name_target(error: BaseException, temporary: Path, path: Path) -> None:
    """Let an error of the system name the file or folder that the user wants to write.

    Args:
        error: The error. That of a full disk contains no path.
        temporary: The temporary file or folder.
        path: The file or folder that was to be written.
    """
    if not isinstance(error, OSError) or not error.errno:
        return
    if error.filename is None or error.filename == str(temporary):
        error.filename = str(path)
        del error.filename2  # None would be part of the message


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove temporary files of killed writers.

    A file is removed if its writer ran on this machine and is dead, or if it is older than a day.

    Args:
        folder: The folder to clean.
        name: The file whose temporary files are removed; None: of all files.
    """
    for path in folder.glob(".*"):
        match = _TEMPORARY_NAME.fullmatch(path.name)
        if match is None:
            continue
        target, host, process = match.groups()
        if name is not None and target != _shortened(name):
            continue
        with contextlib.suppress(OSError):  # another writer may remove it at the same time
            is_dead = host == _host() and not _is_alive(int(process))
            is_old = time.time() - path.stat().st_mtime > _DAY
            if is_dead or is_old:
                remove_now(path)


def is_leftover(path: Path) -> bool:
    """Return whether a file or folder has the name of a temporary one."""
    return _TEMPORARY_NAME.fullmatch(path.name) is not None


def temporary_path(path: Path) -> Path:
    """Return a new temporary name in the folder of a path."""
    writer = f"{_host()}-{os.getpid()}-{secrets.token_hex(4)}"
    return path.with_name(f".{_shortened(path.name)}.{writer}")


def _shortened(name: str) -> str:
    """Return a name, or its start and its checksum if a longer name would be too long."""
    encoded = os.fsencode(name)
    if len(encoded) <= _LONGEST_NAME:
        return name
    start = encoded[: _LONGEST_NAME // 2].decode(errors="ignore")
    return f"{start}~{zlib.crc32(encoded):08x}"


def _host() -> str:
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"


def _is_alive(process: int) -> bool:
    if os.name != "posix":
        return True  # signal 0 would end the process there; old files are removed by their age
    try:
        os.kill(process, 0)  # signal 0 only checks that the process exists
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def remove_now(path: Path) -> None:
    """Remove a file, a link or a folder with its content, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file, or a folder with its content, to the disk."""
    if path.is_file():
        _flush(path, os.O_RDWR)
        return
    for part in path.iterdir():
        sync(part)
    sync_names(path)


def sync_names(folder: Path) -> None:
    """Flush the names in a folder to the disk, which makes a renamed file durable."""
    if os.name == "posix":  # other systems can't open a folder
        _flush(folder, os.O_RDONLY)


def _flush(path: Path, mode: int) -> None:
    handle = os.open(path, mode)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
