"""Nested containers of scalars, strings and tensors in safetensors files."""

from collections import Counter
from typing import Any

from torch import Tensor

from embens.files.atomic import PathLike
from embens.files.tensors import Format, read_tensors, refusing, write_tensors


def write_tree(path: PathLike, kind: Format, tree: dict[str, Any]) -> None:
    """Write a nested container of scalars, strings and tensors to one safetensors file.

    Args:
        path: File to write.
        kind: Format of the file.
        tree: Dicts, lists and tuples of scalars, strings, None and tensors.
    """
    tensors: dict[str, Tensor] = {}
    packed = pack(tree, tensors)
    write_tensors(path, kind, {"tree": packed}, tensors)


def read_tree(path: PathLike, kind: Format) -> dict[str, Any]:
    """Read a file of :func:`write_tree`.

    Args:
        path: File to read.
        kind: Expected format.

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
        tree: The container.
        tensors: The tensors of the container are added to this dict.

    Returns:
        The converted container, for :func:`unpack`.

    Raises:
        TypeError: If the container holds anything else.

    Example:
        >>> import torch
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
        tree: The converted container.
        tensors: The tensors of the container.

    Returns:
        The container.

    Raises:
        ValueError: If ``tree`` is not a result of :func:`pack`.
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
