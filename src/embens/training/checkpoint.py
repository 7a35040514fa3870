"""Checkpoints: one safetensors file each, written atomically, read without executing anything.

A state is a tree of dicts, lists, numbers, strings and tensors. Its tensors go into the file as
they are, all the rest as JSON into the file's header. The name of a file has the step and the
start of the SHA-256 of its content, so that a file that is damaged in any place, or was not
written here, is known as such. Two files are kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embens.files import read_tensors, write_atomically

FORMAT = "embens checkpoint"
VERSION = 2
"""2: gamma is a rate; runs of version 1 had it in the gradient, and can't be continued."""
KEEP = 2
_NAME = re.compile(r"step-(\d{10})-([0-9a-f]{16})\.safetensors")
_LEFTOVER = re.compile(r"\.step-\d{10}-[0-9a-f]{16}\.safetensors\..+")


class Refused(ValueError):
    """A file that is no checkpoint of ours, or not a whole one."""


class Checkpoints:
    """The checkpoints of one run, in a folder of their own; those of another are an error."""

    def __init__(self, folder: str | os.PathLike[str], run: dict[str, Any]):
        self.folder = Path(folder)
        self.run = json.loads(json.dumps(run))
        if self.folder.exists() and not self.folder.is_dir():
            raise NotADirectoryError(f"checkpoint: expected a folder; {str(folder)!r} is a file")
        self.folder.mkdir(parents=True, exist_ok=True)

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write a state, then remove all but the last two files."""
        from safetensors.torch import save

        tensors: dict[str, Tensor] = {}
        content = {"format": FORMAT, "version": VERSION, "run": self.run}
        content["state"] = pack(state, tensors)
        data = save(tensors, {"embens": json.dumps(content)})
        digest = hashlib.sha256(data).hexdigest()[:16]
        path = self.folder / f"step-{step:010d}-{digest}.safetensors"
        write_atomically(path, data)
        for old in self._files()[KEEP:]:
            old.unlink(missing_ok=True)
        return path

    def load_last(self) -> dict[str, Any] | None:
        """Return the state of the last good file, or None; say which files were refused and why."""
        for path in self._files(every=True):
            try:
                content = read(path)
            except Refused as error:
                warnings.warn(f"checkpoint refused: {error}", stacklevel=5)
                continue
            self._check_run(path, content["run"])
            return content["state"]
        return None

    def remove_leftovers(self) -> None:
        """Remove what a process that was killed while writing left behind."""
        for path in self.folder.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                path.unlink(missing_ok=True)

    def _files(self, every: bool = False) -> list[Path]:
        """Return the files, last step first; with ``every`` also those of other names."""
        found = [(_NAME.fullmatch(p.name), p) for p in self.folder.glob("*.safetensors")]
        ours = [(int(match[1]), p.stat().st_mtime_ns, p) for match, p in found if match]
        others = [p for match, p in found if every and not match]
        return [path for *_, path in sorted(ours, reverse=True)] + others

    def _check_run(self, path: Path, run: dict[str, Any]) -> None:
        for key in {**self.run, **run}:
            values = run.get(key), self.run.get(key)
            if values[0] != values[1]:
                theirs, mine = (f"{json.dumps(v):.200}" for v in values)
                raise ValueError(
                    f"{path} is of a different run: {key} was {theirs}, now it is {mine}. Use the "
                    "same arguments to continue it, or another folder to start anew."
                )


def read(path: Path) -> dict[str, Any]:
    """Return the run and the state in a file, or raise :class:`Refused`."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise Refused(f"{path.name} does not have a name that a checkpoint has")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if not digest.startswith(match[2]):
        raise Refused(f"{path.name} is damaged or half-written: its content has another checksum")
    try:
        metadata, tensors = read_tensors(path)
    except ValueError as error:
        raise Refused(str(error)) from None
    try:
        content = json.loads(metadata.get("embens", "null"))
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise Refused(f"{path.name} is a safetensors file, but not a checkpoint of embens")
        if content.get("version") != VERSION:
            found = content.get("version")
            raise Refused(f"{path.name} has format version {found}, this embens reads {VERSION}")
        return {"run": dict(content["run"]), "state": unpack(content["state"], tensors)}
    except Refused:
        raise
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise Refused(f"{path.name} has a damaged header: {error!r}") from None


def pack(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """Return a tree as JSON can hold it; its tensors are added to ``tensors``."""
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    if isinstance(tree, Tensor):
        name = str(len(tensors))
        tensors[name] = tree.detach().cpu().clone().contiguous()
        return {"tensor": name}
    if isinstance(tree, dict):
        kind = "counter" if isinstance(tree, Counter) else "dict"
        return {kind: [[pack(k, tensors), pack(v, tensors)] for k, v in tree.items()]}
    if isinstance(tree, list) and all(type(v) in (int, float, str) for v in tree):
        return tree
    if isinstance(tree, (list, tuple)):
        kind = "list" if isinstance(tree, list) else "tuple"
        return {kind: [pack(v, tensors) for v in tree]}
    if isinstance(tree, torch.dtype):
        return {"dtype": str(tree).removeprefix("torch.")}
    raise TypeError(
        f"a checkpoint holds tensors, numbers, strings, lists and dicts, no {type(tree).__name__} "
        f"({tree!r:.80}); it is in the state of the optimizer or of the schedule. Use others, or "
        "train without checkpoint="
    )


def unpack(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the tree that was packed."""
    if not isinstance(tree, dict):
        return tree
    ((kind, value),) = tree.items()
    if kind == "tensor":
        return tensors[value]
    if kind in ("dict", "counter"):
        items = {unpack(k, tensors): unpack(v, tensors) for k, v in value}
        return Counter(items) if kind == "counter" else items
    if kind in ("list", "tuple"):
        return {"list": list, "tuple": tuple}[kind](unpack(v, tensors) for v in value)
    if kind == "dtype" and isinstance(dtype := getattr(torch, value, None), torch.dtype):
        return dtype
    raise KeyError(kind)
