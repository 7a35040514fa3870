"""Stores: files that are whole or not there, that say what they are, and that have one writer.

Everything that is kept is kept in one way. A file or folder is written under another name beside
its place, synced and renamed; what a writer that was killed has left is removed by the next one.
Tensors, and trees of them, are safetensors with a JSON header and a checksum over both; nothing
read is executed. What is written over a long time has a lock, which names its owner and is free
when that is dead.

Not here: files that grow line by line (:mod:`embens.experiments.results`), and downloads
(:mod:`embens.data.download`).
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

_LEFTOVER = re.compile(r"\.(.+)\.([0-9a-f]{8})-(\d+)-[0-9a-f]{8}")
_DAY = 86_400
PathLike = str | os.PathLike[str]


class Refused(ValueError):
    """A file that is damaged, of another version, or of another kind."""


class Format(NamedTuple):
    """What a file with tensors says that it is, and the version that is written and read."""

    name: str
    version: int


@contextlib.contextmanager
def refusing(path: PathLike) -> Iterator[None]:
    """Turn whatever a file's content leads to into :class:`Refused`, with the file's name."""
    try:
        yield
    except Refused:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise  # the system's, not the content's
        reason = str(error) if type(error) is ValueError else repr(error)
        raise Refused(f"{Path(path).name} can't be read: {reason:.1000}") from error


def write_atomically(path: PathLike, content: str | bytes | Callable[[Path], object]) -> None:
    """Write a file so that whoever reads it sees the old one or the new one, whole.

    ``content`` is text, bytes, or a function that writes a file or makes a folder at the path it is
    given: one with another name in the same folder, synced to the disk and renamed at the end. The
    new file has the permissions of the old one; if ``path`` is a link, what it leads to is
    replaced. If anything fails, the old file stays as it was and nothing else is left.
    """
    path = Path(os.path.realpath(path))
    temporary, old = _beside(path), _beside(path)
    try:
        remove_leftovers(path.parent, path.name)
        if callable(content):
            content(temporary)
        else:
            temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        _sync(*temporary.rglob("*"), temporary)
        if path.is_file():
            temporary.chmod(path.stat().st_mode)
        if path.is_dir():  # it can't be replaced at once
            os.replace(path, old)
        os.replace(temporary, path)
    except BaseException as error:
        _remove(temporary)
        if isinstance(error, OSError) and error.errno and error.filename is None:
            error.filename = str(path)  # a full disk does not say where
        raise
    _remove(old)
    _sync(path.parent)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there, all at once."""
    if path.exists():
        os.replace(path, old := _beside(path))
        _remove(old)


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove what writers that were killed left in a folder, of all files or of one."""
    for path in folder.glob(".*"):
        match = _LEFTOVER.fullmatch(path.name)
        if match is None or name not in (None, match[1]):
            continue
        with contextlib.suppress(OSError):  # another writer may do the same
            dead = match[2] == _host() and not _is_alive(int(match[3]))
            if dead or time.time() - path.stat().st_mtime > _DAY:
                _remove(path)


@contextlib.contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold a lock: a file that has this process in it while it lasts.

    If another process, or another call in this one, holds it, that is a ``BlockingIOError`` which
    names ``what`` is in use and by whom. The lock of a process that died is free, and what it left
    in the folder of the lock is removed.
    """
    from filelock import FileLock, Timeout

    lock, owner = FileLock(path, timeout=0), ""
    with contextlib.suppress(OSError):
        owner = path.read_text(errors="replace").strip()  # before the attempt, which empties it
    try:
        lock.acquire()
    except Timeout:
        raise BlockingIOError(
            f"{what} is in use by {owner or 'another process'}; wait until it ends, or choose "
            "another place"
        ) from None
    try:
        with contextlib.suppress(OSError):  # a full disk is for what comes next
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        remove_leftovers(path.parent)
        yield
    finally:
        with contextlib.suppress(OSError):  # elsewhere an open file can't be removed
            path.unlink()  # before it is free: who waits for it sees that it is gone
        lock.release()


def write_tensors(
    path: PathLike, kind: Format, header: dict[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write tensors, and a header that JSON can hold, to one safetensors file with a checksum."""
    from safetensors.torch import save

    if not Path(path).parent.is_dir():
        raise FileNotFoundError(f"the folder {str(Path(path).parent)!r} does not exist")
    kept: dict[str, Tensor] = {}
    places: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise ValueError(f"{name!r} has no numbers to write: it is on the meta device")
        tensor = tensor.detach().cpu().contiguous()
        place = tensor.untyped_storage().data_ptr()
        kept[name] = tensor.clone() if place in places else tensor  # tied weights
        places.add(place)
    header = seal({"format": kind.name, "version": kind.version, **header}, kept)
    write_atomically(path, save(kept, {"embens": json.dumps(header)}))


def read_tensors(path: PathLike, kind: Format) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the header and the tensors of a file that :func:`write_tensors` wrote."""
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    with refusing(path):
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                metadata = file.metadata() or {}
        except SafetensorError as error:
            reason = f"(truncated, or another format): {error}"
            raise Refused(f"{path.name} is not a whole safetensors file {reason}") from None
        header = json.loads(metadata.get("embens", "{}"))
        check_header(path.name, header, kind)
        return unseal(path.name, header, tensors), tensors


def write_tree(path: PathLike, kind: Format, tree: dict[str, Any]) -> None:
    """Write a tree of dicts, lists, numbers, strings and tensors to one safetensors file."""
    tensors: dict[str, Tensor] = {}
    write_tensors(path, kind, {"tree": pack(tree, tensors)}, tensors)


def read_tree(path: PathLike, kind: Format) -> dict[str, Any]:
    """Return the tree in a file that :func:`write_tree` wrote."""
    header, tensors = read_tensors(path, kind)
    with refusing(path):
        return dict(unpack(header["tree"], tensors))


def pack(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """Return a tree as JSON can hold it; its tensors are added to ``tensors``."""
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    if isinstance(tree, Tensor):
        name = str(len(tensors))
        tensors[name] = tree.detach()
        return {"tensor": name}
    if hasattr(tree, "tolist"):  # of numpy
        return pack(tree.tolist(), tensors)
    if isinstance(tree, dict):
        kind = "counter" if isinstance(tree, Counter) else "dict"
        return {kind: [[pack(k, tensors), pack(v, tensors)] for k, v in tree.items()]}
    if isinstance(tree, (list, tuple)):
        if type(tree) is list and all(type(v) in (int, float, str) for v in tree):
            return tree
        return {"list" if isinstance(tree, list) else "tuple": [pack(v, tensors) for v in tree]}
    raise TypeError(
        f"a file holds tensors, numbers, strings, lists and dicts, no {type(tree).__name__} "
        f"({tree!r:.80})"
    )


def unpack(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the tree that was packed."""
    if not isinstance(tree, dict):
        return tree
    ((kind, value),) = tree.items()
    if kind == "tensor":
        return tensors[value]
    make = {"list": list, "tuple": tuple, "dict": dict, "counter": lambda v: Counter(dict(v))}[kind]
    if kind in ("list", "tuple"):
        return make(unpack(v, tensors) for v in value)
    return make([(unpack(k, tensors), unpack(v, tensors)) for k, v in value])


def check_header(name: str, header: Any, kind: Format) -> None:
    """Raise :class:`Refused` where a header is of another kind of file, or of another version."""
    found = header.get("format") if isinstance(header, dict) else None
    if found != kind.name:
        what = f"is an {found!r} file" if found else "has no embens header"
        raise Refused(f"{name} {what}; expected an {kind.name!r} file")
    version = header.get("version")
    if version != kind.version:
        newer = isinstance(version, int) and version > kind.version
        advice = "use a newer embens" if newer else "read it with the embens that wrote it"
        reads = f"this embens reads {kind.version}"
        raise Refused(f"{name} has format version {version}, {reads}; {advice}")


def seal(record: dict[str, Any], arrays: Mapping[str, Any] = {}) -> dict[str, Any]:
    """Return what JSON can hold with a checksum of it, and of arrays that belong to it."""
    return {**record, "sha256": checksum(json.dumps(record), arrays)}


def unseal(name: str, sealed: dict[str, Any], arrays: Mapping[str, Any] = {}) -> dict[str, Any]:
    """Return what was sealed, or raise :class:`Refused` if anything in it is not as it was."""
    record = {key: value for key, value in sealed.items() if key != "sha256"}
    if seal(record, arrays)["sha256"] != sealed.get("sha256"):
        raise Refused(f"{name} is damaged: its content has another checksum")
    return record


def checksum(text: str, arrays: Mapping[str, Any] = {}) -> str:
    """Return the SHA-256 of a text and of the names, types, shapes and values of arrays."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        array = torch.as_tensor(arrays[name])
        digest.update(f"\n{name} {array.dtype} {tuple(array.shape)}\n".encode())
        values = array.contiguous().as_strided((array.numel(),), (1,))
        digest.update(values.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _beside(path: Path) -> Path:
    writer = f"{_host()}-{os.getpid()}-{secrets.token_hex(4)}"
    return path.with_name(f".{path.name}.{writer}")


def _host() -> str:
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"


def _is_alive(process: int) -> bool:
    if os.name != "posix":
        return True  # who knows; the file is removed when it is old
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(*paths: Path) -> None:
    for path in paths:
        if path.is_file() or os.name == "posix":  # elsewhere a folder can't be opened
            handle = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
