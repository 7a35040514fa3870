"""Checkpoints: one safetensors file each, written atomically, read without executing anything.

Two files are kept. A folder is used by one run at a time, which holds its lock.
"""

import json
import os
import re
import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from embens.files import Format, Refused, locked, read_tree, refusing, write_tree

FORMAT = Format("embens checkpoint", 4)
KEEP = 2
_NAME = re.compile(r"step-\d{10}(-[0-9a-f]{16})?\.safetensors")  # -…: of versions before


class Checkpoints:
    """The checkpoints of one run, in a folder of their own; those of another are an error."""

    def __init__(self, folder: str | os.PathLike[str], run: dict[str, Any]):
        self.folder = Path(folder)
        self.run = json.loads(json.dumps(run))
        self.refused: set[Path] = set()
        if self.folder.exists() and not self.folder.is_dir():
            raise NotADirectoryError(f"checkpoint: expected a folder; {str(folder)!r} is a file")
        self.folder.mkdir(parents=True, exist_ok=True)

    def alone(self) -> AbstractContextManager[None]:
        """Return a context in which no other run has the folder."""
        return locked(self.folder / ".lock", f"the checkpoint folder {str(self.folder)!r}")

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write a state, then remove all but the last two files."""
        path = self.folder / f"step-{step:010d}.safetensors"
        try:
            write_tree(path, FORMAT, {"run": self.run, "state": state})
        except TypeError as error:
            raise TypeError(
                f"checkpoint: {error}; it is in the state of the optimizer or of the schedule. Use "
                "others, or train without checkpoint="
            ) from None
        self.refused.discard(path)
        for old in [file for file in self._files() if file not in self.refused][KEEP:]:
            old.unlink(missing_ok=True)
        return path

    def load_last(self) -> dict[str, Any] | None:
        """Return the state of the last good file, or None; say which files were refused and why."""
        for path in self._files():
            try:
                content = read_tree(path, FORMAT)
                with refusing(path):
                    state, run = content["state"], dict(content["run"])
            except Refused as error:
                warnings.warn(f"checkpoint refused: {error}", stacklevel=5)
                self.refused.add(path)
                continue
            for key in {**self.run, **run}:
                values = run.get(key), self.run.get(key)
                if values[0] != values[1]:
                    theirs, mine = (f"{json.dumps(v):.200}" for v in values)
                    raise ValueError(
                        f"{path} is of a different run: {key} was {theirs}, now it is {mine}. Use "
                        "the same arguments to continue it, or another folder to start anew."
                    )
            return state
        return None

    def _files(self) -> list[Path]:
        """Return the files, last step first."""
        found = self.folder.glob("step-*.safetensors")
        return sorted((path for path in found if _NAME.fullmatch(path.name)), reverse=True)
