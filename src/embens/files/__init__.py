"""Atomic, checksummed files and locks."""

from embens.files.atomic import (
    PathLike,
    check_output,
    is_leftover,
    name_target,
    remove_leftovers,
    remove_now,
    sync,
    sync_names,
    temporary_path,
    write_atomically,
)
from embens.files.locks import locked
from embens.files.packing import pack, read_tree, unpack, write_tree
from embens.files.tensors import (
    Format,
    Refused,
    check_header,
    checksum,
    is_format,
    parse_json,
    read_tensors,
    refusing,
    seal,
    unseal,
    write_tensors,
)

__all__ = [
    "Format",
    "PathLike",
    "Refused",
    "check_header",
    "check_output",
    "checksum",
    "is_format",
    "is_leftover",
    "locked",
    "name_target",
    "pack",
    "parse_json",
    "read_tensors",
    "read_tree",
    "refusing",
    "remove_leftovers",
    "remove_now",
    "seal",
    "sync",
    "sync_names",
    "temporary_path",
    "unpack",
    "unseal",
    "write_atomically",
    "write_tensors",
    "write_tree",
]
