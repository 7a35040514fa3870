"""Resumable downloads with checksums.

A download is written to ``<name>.part`` and renamed once its checksum is verified. If the
connection or the process ends early, the next attempt requests the remaining bytes.
"""

import hashlib
import shutil
import sys
import tarfile
import time
import zlib
from collections.abc import Collection
from functools import partial
from http.client import HTTPException, IncompleteRead
from pathlib import Path
from ssl import SSLError
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from reproduction.storage import write_atomically

_NETWORK_ERRORS = (URLError, HTTPException, ConnectionError, TimeoutError, SSLError)
_TEMPORARY_CODES = (408, 425, 429)  # client errors that may succeed later; all 5xx codes may too
_BLOCK = 2**20


def fetch(
    url: str, path: Path, *, md5: str, attempts: int = 5, pause: float = 1.0, timeout: float = 30.0
) -> Path:
    """Download a file unless it exists with the right checksum.

    Args:
        url: Address of the file.
        path: Where the file is kept. A file with another checksum is replaced.
        md5: Expected MD5 in hexadecimal digits.
        attempts: Number of consecutive attempts without progress before giving up.
        pause: Seconds before the second attempt; doubles with each further attempt.
        timeout: Seconds to wait for the server.

    Returns:
        The path of the verified file.

    Raises:
        ConnectionError: If the server cannot be reached. Received bytes are kept.
        ValueError: If the downloaded file has another checksum. It is discarded.
    """
    if path.is_file() and _md5(path) == md5:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    failures = 0
    most_bytes = _size(part)
    while True:
        start = _size(part)
        try:
            _receive(url, part, start, timeout)
        except _NETWORK_ERRORS as error:
            if _size(part) > most_bytes:
                failures = 0
            else:
                failures += 1
            most_bytes = max(most_bytes, _size(part))
            if failures >= attempts or not _is_temporary(error):
                raise ConnectionError(
                    f"{url} could not be downloaded, got {error!r} after {most_bytes} bytes. Check "
                    f"the connection and try again (received bytes are kept in {part}), or put "
                    f"the file at {path} yourself."
                ) from error
            time.sleep(min(pause * 2 ** max(failures - 1, 0), 30))
            continue
        actual_md5 = _md5(part)
        if actual_md5 == md5:
            return part.replace(path)
        part.unlink()
        # A resumed download may have continued a damaged part: try once from the start.
        if start == 0:
            raise ValueError(
                f"{url}: expected a file with md5 {md5}, got {actual_md5}. It was discarded. Try "
                f"again, or put the right file at {path} yourself."
            )


def _is_temporary(error: Exception) -> bool:
    code = getattr(error, "code", 500)
    return code >= 500 or code in _TEMPORARY_CODES


def _receive(url: str, part: Path, start: int, timeout: float) -> None:
    """Append the bytes of a file from ``start`` on to a partial download."""
    headers = {}
    if start:
        headers["Range"] = f"bytes={start}-"
    try:
        response = urlopen(Request(url, headers=headers), timeout=timeout)
    except HTTPError as error:
        with error:
            # 416: no bytes remain after `start`. The checksum decides whether the part is right.
            if error.code == 416 and start:
                return
            raise
    with response:
        content_range = response.headers.get("Content-Range", "")
        if not content_range.startswith(f"bytes {start}-"):
            start = 0  # the server ignored the range and sends the whole file
        length = int(response.headers.get("Content-Length", -1))
        received = 0
        mode = "ab" if start else "wb"
        with part.open(mode) as file:
            for block in iter(partial(response.read, _BLOCK), b""):
                received += file.write(block)
                _show_progress(part.stem, start + received, start + length, length > 0)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    # A cut connection looks like the end of the file.
    if length >= 0 and received != length:
        raise IncompleteRead(b"", length - received)


def _show_progress(name: str, done: int, total: int, total_is_known: bool) -> None:
    if not sys.stderr.isatty():
        return
    text = f"\r{name}: {done / 2**20:.0f} MB"
    if total_is_known:
        text += f", {done / total:.0%}"
    print(text, end="", file=sys.stderr, flush=True)


def unpack(archive: Path, folder: Path, names: Collection[str]) -> None:
    """Extract files of a ``tar.gz`` archive into a new folder.

    The archive has the files in a folder of the same name. Only regular files with the given names
    are extracted, so paths and links in the archive cannot lead elsewhere.

    Args:
        archive: The archive.
        folder: The folder to create. It appears when it is complete.
        names: Names of the files to extract.

    Raises:
        FileExistsError: If the folder exists.
        ValueError: If the archive is damaged or lacks a file.
    """
    if folder.exists():
        raise FileExistsError(
            f"{folder} exists but does not contain all required files. Move it away or complete it."
        )

    def extract(target: Path) -> None:
        target.mkdir()
        missing = {f"{folder.name}/{name}": name for name in sorted(names)}
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                if not member.isreg() or member.name not in missing:
                    continue
                source = tar.extractfile(member)
                assert source is not None  # regular files have content
                name = missing.pop(member.name)
                with source, (target / name).open("wb") as file:
                    shutil.copyfileobj(source, file)
        if missing:
            raise ValueError(
                f"{archive} does not contain {', '.join(missing)}. Replace it with the official "
                "archive."
            )

    try:
        write_atomically(folder, extract)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise ValueError(
            f"{archive} is not a complete tar.gz archive: {error}. Delete it and try again."
        ) from error


def _size(path: Path) -> int:
    if not path.is_file():
        return 0
    return path.stat().st_size


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, partial(hashlib.md5, usedforsecurity=False))
    return digest.hexdigest()
