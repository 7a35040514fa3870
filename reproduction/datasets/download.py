"""Resumable downloads with checksums.

A download is written to ``<name>.part`` and renamed once its checksum is verified. If the
connection or the process ends early, the next attempt requests the remaining bytes. No more bytes
are accepted than the file has, and an HTTPS address is never redirected to one without.
"""

import hashlib
import shutil
import sys
import tarfile
import time
import zlib
from collections.abc import Collection
from http.client import HTTPException, IncompleteRead
from pathlib import Path
from ssl import SSLError
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from reproduction.storage import check_output, write_atomically

_NETWORK_ERRORS = (URLError, HTTPException, ConnectionError, TimeoutError, SSLError)
_TEMPORARY_CODES = (408, 425, 429)  # client errors that may succeed later; all 5xx codes may too
_BLOCK = 2**20


class _SafeRedirects(HTTPRedirectHandler):
    """Follow redirects, but not from HTTPS to an address without it."""

    def redirect_request(
        self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Request | None:
        if req.type == "https" and not newurl.lower().startswith("https:"):
            raise HTTPError(newurl, code, "redirected from HTTPS to an unsafe address", headers, fp)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def fetch(
    url: str,
    path: Path,
    *,
    sha256: str,
    size: int,
    attempts: int = 5,
    pause: float = 1.0,
    timeout: float = 30.0,
) -> Path:
    """Download a file unless it exists with the right checksum.

    Args:
        url: Address of the file.
        path: Where the file is kept. A file with another checksum is replaced.
        sha256: Expected SHA-256 in hexadecimal digits.
        size: Number of bytes of the file. A longer answer is refused, whatever the server says.
        attempts: Number of consecutive attempts without progress before giving up.
        pause: Seconds before the second attempt; doubles with each further attempt.
        timeout: Seconds to wait for the server.

    Returns:
        The path of the verified file.

    Raises:
        ConnectionError: If the server cannot be reached. Received bytes are kept.
        ValueError: If the downloaded file is too long or has another checksum. It is discarded.
        OSError: If no file can be written there, for example because it is a folder.
    """
    if path.is_file() and _sha256(path) == sha256:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    check_output(path)
    part = path.with_name(path.name + ".part")
    failures = 0
    most_bytes = _size(part)
    while True:
        start = _size(part)
        try:
            _receive(url, part, start, size, timeout)
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
        actual = f"SHA-256 {_sha256(part)}"
        if _size(part) > size:
            actual = "more bytes"
        if actual == f"SHA-256 {sha256}":
            return part.replace(path)
        part.unlink()
        # A resumed download may have continued a damaged part: try once from the start.
        if start == 0:
            raise ValueError(
                f"{url}: expected {size} bytes with SHA-256 {sha256}, got {actual}. The download "
                f"was discarded. Try again, or put the right file at {path} yourself."
            )


def _is_temporary(error: Exception) -> bool:
    code = getattr(error, "code", 500)
    return code >= 500 or code in _TEMPORARY_CODES


def _receive(url: str, part: Path, start: int, size: int, timeout: float) -> None:
    """Append the bytes of a file from ``start`` on to a partial download, one more than its size.

    The additional byte, if there is one, tells the caller that the answer is too long.
    """
    headers = {}
    if start:
        headers["Range"] = f"bytes={start}-"
    try:
        opener = build_opener(_SafeRedirects)
        response = opener.open(Request(url, headers=headers), timeout=timeout)
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
        length = _content_length(response)
        room = size + 1 - start
        received = 0
        mode = "ab" if start else "wb"
        with part.open(mode) as file:
            while received < room:
                block = response.read(min(_BLOCK, room - received))
                if not block:
                    break
                received += file.write(block)
                _show_progress(part.stem, start + received, start + length, length > 0)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    # A cut connection looks like the end of the file.
    if received < min(length, room):
        raise IncompleteRead(b"", length - received)


def _content_length(response: Any) -> int:
    """Return the number of bytes that a server announces, or -1."""
    text = response.headers.get("Content-Length", "")
    return int(text) if text.isdecimal() else -1


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


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, hashlib.sha256).hexdigest()
