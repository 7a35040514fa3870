"""Files from the network, whole or not at all.

A download goes to ``<name>.part`` and gets its name when its checksum is right. If the connection
is cut, also by the end of the process, the next attempt asks the server for the rest: that is why
this is not left to a library (pooch begins again). A terminal shows how far it is.
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

from embens.files import write_atomically

_NETWORK_ERRORS = (URLError, HTTPException, ConnectionError, TimeoutError, SSLError)
_PASSING = (408, 425, 429)  # answers to a request that may succeed later, as do those from 500 on


def fetch(
    url: str, path: Path, *, md5: str, attempts: int = 5, pause: float = 1.0, timeout: float = 30.0
) -> Path:
    """Return the path of the file with this checksum, downloaded if it is not there yet.

    A file with another checksum is replaced. So many ``attempts`` in a row may bring nothing new;
    the ``pause`` between them doubles. Both pause and timeout are in seconds.
    """
    if path.is_file() and _md5(path) == md5:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part, failures = path.with_name(path.name + ".part"), 0
    most = _size(part)
    while True:
        start = _size(part)
        try:
            _receive(url, part, start, timeout)
        except _NETWORK_ERRORS as error:  # a full disk is none of them
            failures = 0 if _size(part) > most else failures + 1
            most, code = max(most, _size(part)), getattr(error, "code", 500)
            if failures >= attempts or (code < 500 and code not in _PASSING):
                raise ConnectionError(
                    f"{url}: expected a file, got {error!r} after {most} bytes; see that the "
                    f"address can be reached and try again (what came is kept in {part}), or "
                    f"put the file at {path} yourself"
                ) from error
            time.sleep(min(pause * 2 ** max(failures - 1, 0), 30))
            continue
        found = _md5(part)
        if found == md5:
            return part.replace(path)
        part.unlink()
        if not start:
            raise ValueError(
                f"{url}: expected a file with md5 {md5}, got {found}; it was discarded: try "
                f"again, or put the right file at {path} yourself"
            )


def _receive(url: str, part: Path, start: int, timeout: float) -> None:
    request = Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        response = urlopen(request, timeout=timeout)
    except HTTPError as error:
        with error:
            if error.code == 416 and start:  # nothing left to send; the checksum decides
                return
            raise
    with response:
        if not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            start = 0
        length = int(response.headers.get("Content-Length", -1))
        done = 0
        with part.open("ab" if start else "wb") as file:
            for block in iter(partial(response.read, 2**20), b""):
                done += file.write(block)
                if sys.stderr.isatty():
                    share = f", {(start + done) / (start + length):.0%}" if length > 0 else ""
                    text = f"\r{part.stem}: {(start + done) / 2**20:.0f} MB{share}"
                    print(text, end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if length >= 0 and done != length:  # a cut connection looks like the end of the file
        raise IncompleteRead(b"", length - done)


def unpack(archive: Path, folder: Path, names: Collection[str]) -> None:
    """Make a folder of these files of an archive, which has them in a folder of the same name.

    Nothing else is taken, no path is followed, and the folder appears when it is complete.
    """
    if folder.exists():
        lacking = "got one without all the files wanted; move it away or complete it"
        raise FileExistsError(f"{folder}: expected no such folder, {lacking}")
    wanted = {f"{folder.name}/{name}": name for name in sorted(names)}
    missing = wanted.copy()

    def fill(whole: Path) -> None:
        whole.mkdir()
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                source = tar.extractfile(member) if member.isreg() else None
                if source is not None and member.name in missing:
                    with source, (whole / missing.pop(member.name)).open("wb") as file:
                        shutil.copyfileobj(source, file)
        if missing:
            got = f"none of {', '.join(missing.values())}; it is another archive: replace it"
            raise ValueError(f"{archive}: expected {', '.join(wanted)}, got {got}")

    try:
        write_atomically(folder, fill)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        got = f"got {error}; delete it and try again"
        raise ValueError(f"{archive}: expected a whole tar.gz archive, {got}") from error


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, partial(hashlib.md5, usedforsecurity=False)).hexdigest()
