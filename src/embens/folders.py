"""Folders of several files that appear together.

A folder is written under a temporary name in the same directory, synced to the disk, and moved
there in one step. It replaces nothing but an empty folder or an earlier folder of the same kind.
"""

import contextlib
import ctypes
import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

from embens.files import (
    PathLike,
    is_leftover,
    name_target,
    remove_leftovers,
    remove_now,
    sync,
    sync_names,
    temporary_path,
)

# Constants of Linux for renameat2.
_CURRENT_FOLDER = -100
_EXCHANGE = 2


def write_folder(
    path: PathLike, fill: Callable[[Path], object], is_earlier: Callable[[Path], bool]
) -> None:
    """Write a folder so that readers see all of its old files or all of its new files.

    If writing fails, the old folder is unchanged and nothing else remains. Missing parents are
    created. If ``path`` is a symbolic link, its target is replaced. On systems that can't exchange
    two folders in one step (other than Linux), the old folder moves away before the new one takes
    its place.

    Args:
        path: The folder.
        fill: Writes the files into an empty folder.
        is_earlier: Returns whether an existing folder was written by an earlier call and holds
            nothing else, so that it may be replaced.

    Raises:
        NotADirectoryError: If ``path`` is a file.
        FileExistsError: If ``path`` is a folder with other files, or the current folder.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp()) / "folder"
        >>> write_folder(folder, lambda place: (place / "a").touch(), lambda earlier: False)
        >>> [file.name for file in folder.iterdir()]
        ['a']
    """
    path = Path(os.path.realpath(path))
    check_folder(path, is_earlier)
    missing_parents = _missing_parents(path)
    temporary = temporary_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent, path.name)
        temporary.mkdir()
        fill(temporary)
        sync(temporary)
        check_folder(path, is_earlier)  # files may have been added in the meantime
        _put(temporary, path)
    except BaseException as error:
        remove_now(temporary)
        for parent in missing_parents:
            with contextlib.suppress(OSError):  # another process may use it
                parent.rmdir()
        name_target(error, temporary, path)
        raise
    try:
        sync_names(path.parent)
    finally:
        remove_now(temporary)  # the earlier folder, if there was one


def check_folder(path: Path, is_earlier: Callable[[Path], bool]) -> None:
    """Raise unless a folder can be written at a path without a loss for the user.

    Args:
        path: The folder, without symbolic links.
        is_earlier: As in :func:`write_folder`.

    Raises:
        NotADirectoryError: If ``path`` is a file.
        FileExistsError: If ``path`` is a folder with other files, or the current folder.
    """
    if not os.path.lexists(path):
        return
    if not path.is_dir():
        raise NotADirectoryError(
            errno.ENOTDIR, "A file is never replaced by a folder. Choose another path", str(path)
        )
    if path == Path.cwd():
        raise FileExistsError(
            errno.EEXIST, "The current folder can't be replaced. Choose another path", str(path)
        )
    files = [part for part in path.iterdir() if not is_leftover(part)]
    if files and not is_earlier(path):
        names = ", ".join(sorted(part.name for part in files)[:3])
        raise FileExistsError(
            errno.EEXIST,
            f"The folder holds other files ({names}) and is never replaced. Choose another path",
            str(path),
        )


def _missing_parents(path: Path) -> list[Path]:
    """Return the parents of a path that do not exist, innermost first."""
    missing = []
    for parent in path.parents:
        if parent.is_dir():
            break
        if parent.exists():
            raise NotADirectoryError(
                errno.ENOTDIR, "A file can't contain a folder. Choose another path", str(parent)
            )
        missing.append(parent)
    return missing


def _put(temporary: Path, path: Path) -> None:
    """Move a folder to its place; an earlier folder there then has the temporary name."""
    if not path.exists():
        os.rename(temporary, path)
        return
    temporary.chmod(path.stat().st_mode)
    if _exchange(temporary, path):
        return
    earlier = temporary_path(path)
    os.rename(path, earlier)
    try:
        os.rename(temporary, path)
    except BaseException:
        os.rename(earlier, path)
        raise
    os.rename(earlier, temporary)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two folders in one step; return False where the system can't."""
    if sys.platform != "linux":
        return False
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "renameat2"):
        return False
    paths = os.fsencode(first), os.fsencode(second)
    result = library.renameat2(_CURRENT_FOLDER, paths[0], _CURRENT_FOLDER, paths[1], _EXCHANGE)
    if result == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EXDEV):  # not on this file system
        return False
    raise OSError(code, os.strerror(code), str(second))
