"""Atomic, checksummed files and locks.

- A file is written under a temporary name in the same folder, synced to the disk and renamed, so
  that readers see the old or the new file, never a part. Temporary files of killed writers are
  removed by the next writer.
- Tensors, and nested containers of them, are stored as safetensors with a JSON header and a
  checksum of both. Reading a file never executes code.
- A lock file contains the process that holds it; the lock of a dead process is free.
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

PathLike = str | os.PathLike[str]

# Temporary names are ".<name>.<host>-<process>-<random>".
_TEMPORARY_NAME = re.compile(r"\.(.+)\.([0-9a-f]{8})-(\d+)-[0-9a-f]{8}")
_DAY = 86_400  # seconds


class Refused(ValueError):
    """A file is damaged, has another version, or is of another kind."""


class Format(NamedTuple):
    """Kind of a file with tensors.

    Attributes:
        name: name of the format, stored in the header.
        version: the version that is written and the only one that is read.
    """

    name: str
    version: int


@contextlib.contextmanager
def refusing(path: PathLike) -> Iterator[None]:
    """Convert errors caused by the content of a file into :class:`Refused`.

    Errors of the operating system, such as missing permissions, pass unchanged.

    Args:
        path: the file that is read; the message contains its name.

    Example:
        >>> with refusing("settings.json"):
        ...     json.loads("{")
        Traceback (most recent call last):
        embens.files.Refused: settings.json can't be read: JSONDecodeError(...)
    """
    try:
        yield
    except Refused:
        raise
    except Exception as error:
        # Parsers raise OSError without an errno, or with EINVAL for an invalid seek.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        reason = str(error) if type(error) is ValueError else repr(error)
        raise Refused(f"{Path(path).name} can't be read: {reason:.1000}") from error


# --- Atomic writing ------------------------------------------------------------------------------


def check_output(path: PathLike) -> Path:
    """Check that a file can be written at a path, before the work of computing it.

    Args:
        path: file to write. An existing file may be replaced; symbolic links are followed.

    Returns:
        The path without symbolic links.

    Raises:
        IsADirectoryError: if ``path`` is a folder.
        FileNotFoundError: if its folder does not exist.
        NotADirectoryError: if its folder is a file.
        FileExistsError: if it is a device, a pipe or a link to itself.

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
        path: file to write. It may replace a file, but never a folder.
        content: text, bytes, or a function that writes a file or creates a folder at the temporary
            path it receives.

    Raises:
        OSError: if no file can be written there; see :func:`check_output`.

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
        # The error of a full disk does not contain a path.
        if isinstance(error, OSError) and error.errno and error.filename is None:
            error.filename = str(path)
        raise
    sync_names(path.parent)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it exists, in one step.

    Args:
        path: the file or folder. It disappears at once, even if the removal of its content is
            interrupted.
    """
    if path.exists():
        temporary = temporary_path(path)
        os.replace(path, temporary)
        remove_now(temporary)


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove temporary files of killed writers.

    A file is removed if its writer ran on this machine and is dead, or if it is older than a day.

    Args:
        folder: the folder to clean.
        name: the file whose temporary files are removed; None: of all files.
    """
    for path in folder.glob(".*"):
        match = _TEMPORARY_NAME.fullmatch(path.name)
        if match is None:
            continue
        target, host, process = match.groups()
        if name is not None and target != name:
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
    return path.with_name(f".{path.name}.{writer}")


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


# --- Locks ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold a lock for the duration of a ``with`` block.

    When the lock is taken, temporary files of dead writers in its folder are removed.

    Args:
        path: the lock file, which contains the process that holds the lock.
        what: name of the resource, for the error message.

    Raises:
        BlockingIOError: if another process, or another call in this one, holds the lock.
        FileExistsError: if the file was not written by a lock.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with locked(folder / ".lock", "the folder"):
        ...     (folder / ".lock").read_text()
        'process ... on ...'
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path, timeout=0)
    owner = ""
    with contextlib.suppress(OSError):
        owner = path.read_text(errors="replace").strip()  # acquire() truncates the file
    if path.is_dir() or (owner and not owner.startswith("process ")):
        raise FileExistsError(
            errno.EEXIST, f"{what} can't be locked: this is not a lock file. Move it", str(path)
        )
    try:
        lock.acquire()
    except Timeout:
        raise BlockingIOError(
            f"{what} is in use by {owner or 'another process'}. Wait until it ends, or choose "
            "another path."
        ) from None
    try:
        with contextlib.suppress(OSError):  # on a full disk the lock still works, without an owner
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        remove_leftovers(path.parent)
        yield
    finally:
        # Unlink before release: a process that acquires the lock in between sees that the file is
        # gone and creates it again. Some systems cannot remove an open file.
        with contextlib.suppress(OSError):
            path.unlink()
        lock.release()


# --- Tensors -------------------------------------------------------------------------------------


def write_tensors(
    path: PathLike, kind: Format, header: dict[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write tensors and a header to one safetensors file with a checksum.

    Args:
        path: file to write.
        kind: format of the file.
        header: values that JSON can represent.
        tensors: tensors by name; they may share memory.

    Raises:
        OSError: if no file can be written there; see :func:`check_output`.
        ValueError: if a tensor is on the meta device.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "x.safetensors"
        >>> write_tensors(path, Format("example", 1), {"note": "text"}, {"x": torch.zeros(2)})
        >>> header, tensors = read_tensors(path, Format("example", 1))
        >>> header["note"], tensors["x"]
        ('text', tensor([0., 0.]))
    """
    from safetensors.torch import save

    check_output(path)
    stored: dict[str, Tensor] = {}
    addresses: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise ValueError(f"{name!r} has no values to write: it is on the meta device")
        tensor = tensor.detach().cpu().contiguous()
        address = tensor.untyped_storage().data_ptr()
        if address in addresses:
            tensor = tensor.clone()  # safetensors rejects shared memory, as of tied weights
        addresses.add(address)
        stored[name] = tensor
    header = {"format": kind.name, "version": kind.version, **header}
    write_atomically(path, save(stored, {"embens": json.dumps(seal(header, stored))}))


def read_tensors(path: PathLike, kind: Format) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a file of :func:`write_tensors`.

    Args:
        path: file to read.
        kind: expected format.

    Returns:
        The header and the tensors.

    Raises:
        FileNotFoundError: if there is no such file.
        Refused: if the file is damaged, or has another format or version.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    with refusing(path):
        try:
            with safe_open(path, framework="pt") as file:
                # The tensors of safetensors are views of the file: without a copy, a later write
                # to the file would change them.
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
                metadata = file.metadata() or {}
        except SafetensorError as error:
            raise Refused(
                f"{path.name} is not a whole safetensors file (truncated, or another format): "
                f"{error}. Restore it from a copy, or write it again"
            ) from None
        header = parse_json(metadata.get("embens", "{}"))
        check_header(path.name, header, kind)
        return unseal(path.name, header, tensors), tensors


def parse_json(text: str | bytes) -> Any:
    """Parse JSON, in which no name may occur twice.

    Example:
        >>> parse_json('{"a": 1, "a": 2}')
        Traceback (most recent call last):
        ValueError: the name 'a' occurs twice
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = Counter(name for name, _ in pairs)
        for name, count in names.items():
            if count > 1:
                raise ValueError(f"the name {name!r} occurs twice")
        return dict(pairs)

    return json.loads(text, object_pairs_hook=unique)


def is_format(path: Path, kind: Format) -> bool:
    """Return whether a file has a header of a format, of any version; its content may be damaged.

    Args:
        path: the file.
        kind: the format of :func:`write_tensors`.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            header = parse_json((file.metadata() or {}).get("embens", "{}"))
    except (OSError, SafetensorError, ValueError, RecursionError):
        return False
    return isinstance(header, dict) and header.get("format") == kind.name


def check_header(name: str, header: Any, kind: Format) -> None:
    """Check the format and the version in the header of a file.

    Args:
        name: name of the file, for the error message.
        header: the header.
        kind: expected format.

    Raises:
        Refused: if the format or the version differ.
    """
    file_format = header.get("format") if isinstance(header, dict) else None
    if not file_format:
        raise Refused(f"{name} has no embens header; expected an {kind.name!r} file")
    if file_format != kind.name:
        raise Refused(f"{name} is an {file_format!r} file; expected an {kind.name!r} file")
    version = header.get("version")
    if version == kind.version:
        return
    if isinstance(version, int) and version > kind.version:
        advice = "use a newer embens"
    else:
        advice = "read it with the embens that wrote it"
    raise Refused(
        f"{name} has format version {version}, this embens reads {kind.version}; {advice}"
    )


# --- Trees ---------------------------------------------------------------------------------------


def write_tree(path: PathLike, kind: Format, tree: dict[str, Any]) -> None:
    """Write a nested container of scalars, strings and tensors to one safetensors file.

    Args:
        path: file to write.
        kind: format of the file.
        tree: dicts, lists and tuples of scalars, strings, None and tensors.
    """
    tensors: dict[str, Tensor] = {}
    packed = pack(tree, tensors)
    write_tensors(path, kind, {"tree": packed}, tensors)


def read_tree(path: PathLike, kind: Format) -> dict[str, Any]:
    """Read a file of :func:`write_tree`.

    Args:
        path: file to read.
        kind: expected format.

    Returns:
        The nested container.
    """
    header, tensors = read_tensors(path, kind)
    with refusing(path):
        tree = unpack(header["tree"], tensors)
        if not isinstance(tree, dict):
            raise ValueError(f"the tree must be a dict, got {tree!r:.80}")
        return tree


def pack(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """Convert a nested container to values that JSON can represent.

    A container becomes a dict of one entry, whose key is its type. Lists of plain floats, integers
    and strings are kept.

    Args:
        tree: the container.
        tensors: the tensors of the container are added to this dict.

    Returns:
        The converted container, for :func:`unpack`.

    Raises:
        TypeError: if the container holds anything else.

    Example:
        >>> tensors = {}
        >>> pack({"rates": (0.1, torch.zeros(2))}, tensors)
        {'dict': [['rates', {'tuple': [0.1, {'tensor': '0'}]}]]}
        >>> list(tensors)
        ['0']
    """
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    if isinstance(tree, Tensor):
        name = str(len(tensors))
        tensors[name] = tree.detach()
        return {"tensor": name}
    if hasattr(tree, "tolist"):  # an array or a scalar of numpy
        return pack(tree.tolist(), tensors)
    if isinstance(tree, dict):
        kind = "counter" if isinstance(tree, Counter) else "dict"
        return {kind: [[pack(k, tensors), pack(v, tensors)] for k, v in tree.items()]}
    if type(tree) is list and all(type(value) in (int, float, str) for value in tree):
        return tree
    if isinstance(tree, (list, tuple)):
        kind = "list" if isinstance(tree, list) else "tuple"
        return {kind: [pack(value, tensors) for value in tree]}
    raise TypeError(
        "a file holds tensors, numbers, strings, lists and dicts, got "
        f"{type(tree).__name__} ({tree!r:.80})"
    )


def unpack(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """Convert the result of :func:`pack` back.

    Args:
        tree: the converted container.
        tensors: the tensors of the container.

    Returns:
        The container.

    Raises:
        ValueError: if ``tree`` is not a result of :func:`pack`.
    """
    if not isinstance(tree, dict):
        return tree
    if len(tree) != 1:
        raise ValueError(f"a container must have one kind, got {list(tree)!r:.80}")
    ((kind, value),) = tree.items()
    if kind == "tensor":
        if not isinstance(value, str) or value not in tensors:
            raise ValueError(f"there is no tensor {value!r:.80}")
        return tensors[value]
    if kind not in ("list", "tuple", "dict", "counter"):
        raise ValueError(f"unknown kind of container {kind!r:.80}")
    if not isinstance(value, list):
        raise ValueError(f"a {kind} must be a list of its items, got {value!r:.80}")
    if kind == "list":
        return [unpack(item, tensors) for item in value]
    if kind == "tuple":
        return tuple(unpack(item, tensors) for item in value)
    entries = _unpack_entries(value, tensors)
    return Counter(entries) if kind == "counter" else entries


def _unpack_entries(pairs: list[Any], tensors: dict[str, Tensor]) -> dict[Any, Any]:
    entries = {}
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(f"an entry must be a pair of key and value, got {pair!r:.80}")
        key = unpack(pair[0], tensors)
        is_plain = key is None or isinstance(key, (str, int, float, bool, tuple))
        if not is_plain or key in entries:
            raise ValueError(f"a key must be unique, and a number or text, got {key!r:.80}")
        entries[key] = unpack(pair[1], tensors)
    return entries


# --- Checksums -----------------------------------------------------------------------------------


def seal(record: dict[str, Any], arrays: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Add a checksum to a record.

    Args:
        record: values that JSON can represent.
        arrays: arrays or tensors that the checksum includes.

    Returns:
        The record with the additional key "sha256".

    Example:
        >>> unseal("record", seal({"a": 1}))
        {'a': 1}
    """
    return {**record, "sha256": checksum(json.dumps(record), arrays)}


def unseal(
    name: str, sealed: dict[str, Any], arrays: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Verify and remove the checksum of a record.

    Args:
        name: name of the file, for the error message.
        sealed: result of :func:`seal`.
        arrays: arrays or tensors that the checksum includes.

    Returns:
        The record.

    Raises:
        Refused: if the checksum does not match.
    """
    record = {key: value for key, value in sealed.items() if key != "sha256"}
    if checksum(json.dumps(record), arrays) != sealed.get("sha256"):
        raise Refused(
            f"{name} is damaged: its content has another checksum. Restore it from a copy, or "
            "write it again"
        )
    return record


def checksum(text: str, arrays: Mapping[str, Any] | None = None) -> str:
    """Return the SHA-256 checksum of a text and of arrays.

    Args:
        text: the text.
        arrays: arrays or tensors by name; their names, types, shapes and values count.

    Returns:
        The checksum in hexadecimal digits.

    Example:
        >>> checksum("text")[:8]
        '982d9e3e'
    """
    digest = hashlib.sha256(text.encode())
    for name, array in sorted((arrays or {}).items()):
        tensor = torch.as_tensor(array)
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        # numpy lacks types such as bfloat16, so we hash the bytes.
        values = tensor.contiguous().as_strided((tensor.numel(),), (1,))
        digest.update(values.view(torch.uint8).numpy().data)
    return digest.hexdigest()
