"""Results on disk: one line of JSON for each finished cell, in an append-only file.

A line is written at once, under a lock, and synced; it has a checksum, so that what a crash or a
full disk leaves of one is skipped, and the next writer starts a new line. Several runs may work in
one folder: each takes a lock on a cell before it starts it (:func:`embens.files.locked`), and reads
what others have added in the meantime.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from filelock import FileLock

from embens.files import locked, seal, unseal

Record = dict[str, Any]


class Results:
    """The results of one experiment in one folder, which is made if missing.

    Example:
        >>> import tempfile
        >>> results = Results(tempfile.mkdtemp())
        >>> results.add({"key": "a", "rows": [{"accuracy": 0.5}]})
        >>> Results(results.folder).records["a"]["rows"]
        [{'accuracy': 0.5}]
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / "results.jsonl"
        self.records: dict[str, Record] = {}
        self._position = 0
        self._lock = FileLock(self.folder / ".results.lock")
        self._claims: dict[str, AbstractContextManager[None]] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read what was added since the last time, by anyone."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self._position:
                self._position = 0  # someone took back what a full disk did not hold
            file.seek(self._position)
            content = file.read()
        whole = content.rfind(b"\n") + 1
        self._position += whole
        for record in _parse(content[:whole]):
            self._keep(record)

    def _keep(self, record: Record) -> None:
        """Keep the last record of a cell, but never a failure after a success."""
        known = self.records.get(record["key"])
        if known is None or "rows" in record or "rows" not in known:
            self.records[record["key"]] = record

    def add(self, record: Record) -> None:
        """Write a record; it is on the disk when this returns, or an ``OSError`` is raised."""
        line = json.dumps(seal(record)).encode() + b"\n"
        with self._lock, self.path.open("ab+", buffering=0) as file:  # no rest to write at closing
            start = end = file.seek(0, os.SEEK_END)
            if end:
                file.seek(end - 1)
                if file.read(1) != b"\n":
                    line = b"\n" + line
            try:
                while line:
                    line = line[file.write(line) or 0 :]
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):  # half a line is skipped by whoever reads it
                    os.truncate(self.path, start)
                raise
        self._keep(json.loads(json.dumps(record)))

    def borrow(self, keys: Iterable[str]) -> None:
        """Take over what other experiments in the same folder have measured of these cells."""
        missing = {key for key in keys if "rows" not in self.records.get(key, {})}
        others = self.folder.parent.parent.glob(f"*/{self.folder.name}/{self.path.name}")
        for path in others if missing else ():
            for record in _parse(path.read_bytes()):
                if record["key"] in missing and "rows" in record:
                    missing.discard(record["key"])
                    self.add(record)

    def alone(self) -> AbstractContextManager[Any]:
        """Return a context in which no other run writes here."""
        return self._lock

    def claim(self, key: str) -> bool:
        """Take a cell for this run; False if another run has it."""
        lock = locked(self.folder / "claims" / f"{key}.lock", f"the cell {key}")
        try:
            (self.folder / "claims").mkdir(exist_ok=True)
            lock.__enter__()
        except (BlockingIOError, FileNotFoundError):  # or a run that ended removed the folder
            return False
        self._claims[key] = lock
        return True

    def release(self, key: str) -> None:
        """Give a cell back."""
        if key in self._claims:
            self._claims.pop(key).__exit__(None, None, None)

    def release_all(self) -> None:
        """Give all cells back."""
        for key in list(self._claims):
            self.release(key)
        with contextlib.suppress(OSError):  # missing, or in use by another run
            (self.folder / "claims").rmdir()


def folder_of(out: str | Path, name: str, preset: str) -> Path:
    """Return the folder of an experiment's results."""
    return Path(out) / name / preset


def _parse(content: bytes) -> Iterator[Record]:
    for line in content.splitlines():
        try:
            record = unseal("the line", json.loads(line))
        except (ValueError, RecursionError, AttributeError, TypeError):
            continue
        if not isinstance(record.get("key"), str):
            continue
        if isinstance(record.get("rows"), list) or isinstance(record.get("error"), str):
            yield record
