"""Tensors in safetensors files, with a JSON header and a checksum of both.

Reading a file never executes code.
"""

import contextlib
import errno
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embens.files.atomic import PathLike, check_output, write_atomically


class Refused(ValueError):
    """A file is damaged, has another version, or is of another kind."""


class Format(NamedTuple):
    """Kind of a file with tensors.

    Attributes:
        name: Name of the format, stored in the header.
        version: The version that is written and the only one that is read.

    Example:
        >>> Format("embens checkpoint", 6).name
        'embens checkpoint'
    """

    name: str
    version: int


@contextlib.contextmanager
def refusing(path: PathLike) -> Iterator[None]:
    """Convert errors caused by the content of a file into :class:`Refused`.

    Errors of the operating system, such as missing permissions, pass unchanged.

    Args:
        path: The file that is read; the message contains its name.

    Example:
        >>> with refusing("settings.json"):
        ...     json.loads("{")
        Traceback (most recent call last):
        embens.files.tensors.Refused: settings.json can't be read: JSONDecodeError(...)
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


def write_tensors(
    path: PathLike, kind: Format, header: dict[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write tensors and a header to one safetensors file with a checksum.

    Args:
        path: File to write.
        kind: Format of the file.
        header: Values that JSON can represent.
        tensors: Tensors by name; they may share memory.

    Raises:
        OSError: If no file can be written there; see :func:`check_output`.
        ValueError: If a tensor is on the meta device.
        TypeError: If a value is no dense tensor.

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
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            described = getattr(tensor, "layout", type(tensor).__name__)
            raise TypeError(
                f"{name!r} cannot be written: a file holds dense tensors, got {described}. Keep it "
                "out of the state: register_buffer(persistent=False), no get_extra_state."
            )
        if tensor.is_meta:
            raise ValueError(
                f"{name!r} has no values to write: it is on the meta device. Load its values first."
            )
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
        path: File to read.
        kind: Expected format.

    Returns:
        The header and the tensors.

    Raises:
        FileNotFoundError: If there is no such file.
        Refused: If the file is damaged, or has another format or version.
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
        path: The file.
        kind: The format of :func:`write_tensors`.
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
        name: Name of the file, for the error message.
        header: The header.
        kind: Expected format.

    Raises:
        Refused: If the format or the version differ.
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


def seal(record: dict[str, Any], arrays: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Add a checksum to a record.

    Args:
        record: Values that JSON can represent.
        arrays: Arrays or tensors that the checksum includes.

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
        name: Name of the file, for the error message.
        sealed: Result of :func:`seal`.
        arrays: Arrays or tensors that the checksum includes.

    Returns:
        The record.

    Raises:
        Refused: If the checksum does not match.
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
        text: The text.
        arrays: Arrays or tensors by name; their names, types, shapes and values count.

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
        # numpy lacks types such as bfloat16, so we hash the bytes. Only a last axis of stride 1 can
        # be viewed as bytes, but torch leaves the stride of an axis of size 1 arbitrary.
        values = tensor.contiguous().as_strided((tensor.numel(),), (1,))
        digest.update(values.view(torch.uint8).numpy().data)
    return digest.hexdigest()
