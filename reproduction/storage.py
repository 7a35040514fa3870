"""Checksums of result files, and files that appear together."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from embens.files import check_output, sync_names, write_atomically

__all__ = [
    "DamagedFileError",
    "check_distinct",
    "check_output",
    "checksum",
    "finish_writing",
    "newest",
    "parse_json",
    "reading",
    "seal",
    "unseal",
    "write_atomically",
    "write_together",
]

PENDING = ".summary"
"""Folder of complete files that are not in their place yet."""


class DamagedFileError(ValueError):
    """A file whose content does not match its checksum or format."""


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert errors caused by the content of a file into :class:`DamagedFileError`.

    Args:
        path: The file or folder that is read; the message contains its name.

    Example:
        >>> with reading(Path("claims.json")):
        ...     json.loads("{")
        Traceback (most recent call last):
        reproduction.storage.DamagedFileError: claims.json is damaged: JSONDecodeError(...
    """
    try:
        yield
    except (DamagedFileError, OSError):
        raise
    except Exception as error:
        raise DamagedFileError(
            f"{path} is damaged: {error!r:.300}. Restore it from a copy, or run the experiment "
            "again."
        ) from error


def parse_json(text: str | bytes) -> Any:
    """Parse JSON without NaN and infinity, which pages cannot hold.

    Example:
        >>> parse_json("[NaN]")
        Traceback (most recent call last):
        ValueError: NaN is no JSON
    """

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def write_together(
    folder: Path, contents: Mapping[str, str | bytes | Callable[[Path], object]]
) -> None:
    """Write files to a folder so that readers see all of the old or all of the new ones.

    The files are completed in a hidden folder, which then gets its final name: from here on
    :func:`newest` finds them there. If the process ends before all of them have moved to their
    places, :func:`finish_writing` moves the rest. If writing fails, the old files stay.

    Args:
        folder: The folder.
        contents: Contents of the files by name: text, bytes, or a function that writes a file.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> write_together(folder, {"a.txt": "a", "b.txt": "b"})
        >>> sorted(path.name for path in folder.iterdir())
        ['a.txt', 'b.txt']
    """
    finish_writing(folder)
    for name in contents:
        check_output(folder / name)

    def fill(place: Path) -> None:
        place.mkdir()
        for name, content in contents.items():
            if callable(content):
                content(place / name)
            elif isinstance(content, str):
                (place / name).write_bytes(content.encode())
            else:
                (place / name).write_bytes(content)

    write_atomically(folder / PENDING, fill)
    finish_writing(folder)


def finish_writing(folder: Path) -> None:
    """Move files to their places that an interrupted :func:`write_together` completed.

    Args:
        folder: The folder.
    """
    pending = folder / PENDING
    if not pending.is_dir():
        return
    for path in pending.iterdir():
        os.replace(path, folder / path.name)
    pending.rmdir()
    sync_names(folder)


def newest(folder: Path, name: str) -> Path:
    """Return the path of a file of :func:`write_together`, which may not be in its place yet.

    Args:
        folder: The folder.
        name: The name of the file.
    """
    pending = folder / PENDING / name
    if pending.exists():
        return pending
    return folder / name


def check_distinct(path: Path, inputs: Iterable[Path]) -> None:
    """Raise if a file to write is one of the files that are read, also through a link.

    Args:
        path: The file to write.
        inputs: The files that are read.

    Raises:
        shutil.SameFileError: If they are the same file.
    """
    if not path.exists():
        return
    for source in inputs:
        if source.exists() and os.path.samefile(path, source):
            raise shutil.SameFileError(
                f"{path} is an input ({source}) and would be overwritten. Choose another path."
            )


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
