"""Row-wise rules for sizes, indices and reshapes.

The number of rows of a batch is not fixed: a chunk of members has several times as many rows as the
batch. Code may read the number of rows, multiply it, and use it as the first size of a tensor.
Anything else raises :class:`~embens.graph.domains.Unfoldable`.
"""

from dataclasses import replace
from typing import Any

from embens.graph.domains import OTHER, Domain, Unfoldable, Value, flatten
from embens.graph.operations import DTYPE_QUERIES

FACTORIES = frozenset("zeros ones full empty arange".split())


def infer_attribute(value: Value, attribute: str) -> Value:
    """Return the value of an attribute of a tensor, such as its shape."""
    if attribute in DTYPE_QUERIES:
        return OTHER
    if attribute == "shape" and value.kind == "tensor":
        if value.domain is Domain.CONSTANT:
            return OTHER
        return Value(value.domain, value.rank, "shape")
    if attribute == "ndim":
        return OTHER
    if attribute in ("T", "mT") and value.kind == "tensor":
        if value.domain is Domain.CONSTANT:
            return replace(value, leading=None)
        if attribute == "mT" and (value.rank or 0) >= 3:
            return value
    raise Unfoldable(f"its code reads the attribute {attribute!r} of a tensor")


def infer_size(name: str, args: list[Any], kwargs: dict[str, Any]) -> Value:
    """Return the value of ``size``, ``dim``, ``numel`` or ``len`` of a tensor."""
    value = args[0]
    if value.domain is Domain.CONSTANT or name in ("dim", "ndimension"):
        return OTHER
    if name in ("len", "numel"):
        return Value(value.domain, None, "rows")
    axis = args[1] if len(args) > 1 else kwargs.get("dim")
    if axis is None:
        return Value(value.domain, value.rank, "shape")
    return _size_along(value, axis)


def _size_along(value: Value, axis: Any) -> Value:
    if not isinstance(axis, int):
        raise Unfoldable("the axis of a size is not a fixed number")
    rank = value.rank or 0
    axis = axis + rank if axis < 0 else axis
    if axis == 0:
        return Value(value.domain, None, "rows")
    return replace(OTHER, domain=value.domain)


def infer_index(value: Any, index: Any) -> Value:
    """Return the value of an indexed tensor, shape or tuple."""
    if value.kind == "shape":
        if isinstance(index, int):
            return _size_along(value, index)
        if isinstance(index, slice) and isinstance(index.start, int) and index.start > 0:
            return replace(OTHER, domain=value.domain)
        raise Unfoldable("its code takes a part of a shape")
    if value.kind == "tuple":
        return replace(value, kind="tensor")
    if value.kind != "tensor" or value.rank is None:
        return value
    indices = list(index) if isinstance(index, tuple) else [index]
    if value.domain is Domain.CONSTANT:
        return _index_constant(value, indices)
    rank = value.rank
    used = sum(1 for item in indices if item is not None and item is not Ellipsis)
    first = indices[0]
    is_full = isinstance(first, slice) and first == slice(None)
    if not is_full and not (first is Ellipsis and used < rank):
        raise Unfoldable("its code selects rows of the batch")
    for item in indices[1:]:
        is_simple = item is None or item is Ellipsis or type(item) in (int, slice)
        if not is_simple or any(isinstance(part, Value) for part in flatten(item)):
            raise Unfoldable("its code indexes with tensors or sequences")
        if isinstance(item, int):
            rank -= 1
        elif item is None:
            rank += 1
    return Value(value.domain, rank)


def _index_constant(value: Value, indices: list[Any]) -> Value:
    rank = value.rank or 0
    for item in indices:
        if isinstance(item, Value) and item.domain is Domain.CONSTANT:
            raise Unfoldable("its code indexes a constant with a tensor")
        if isinstance(item, Value):
            # A table lookup: rows of the table for every element of the index.
            if len(indices) == 1 and item.rank is not None:
                return Value(item.domain, item.rank + rank - 1)
            raise Unfoldable("its code indexes a table with several tensors")
        if isinstance(item, int):
            rank -= 1
        elif item is None:
            rank += 1
    leading = None
    if indices[0] is None:
        leading = 1
    elif isinstance(indices[0], slice) and indices[0] == slice(None):
        leading = value.leading
    return Value(Domain.CONSTANT, rank, leading=leading)


def infer_with_rows(
    name: str, args: list[Any], kwargs: dict[str, Any], values: list[Value]
) -> Value:
    """Return the result of an operation with the number of rows among its arguments."""
    if name in ("mul", "rmul"):
        rows = [value for value in values if value.kind == "rows"]
        if len(rows) == 1 and all(value.kind in ("rows", "other") for value in values):
            return rows[0]
    if name in ("view", "reshape", "expand", "repeat"):
        return infer_reshape(name, args, kwargs)
    if name in FACTORIES and name != "arange":
        return _infer_factory(name, args)
    raise Unfoldable(f"{name!r} computes with the number of samples")


def _infer_factory(name: str, args: list[Any]) -> Value:
    sizes = sizes_of(args[:1] if isinstance(args[0], (list, tuple)) else args)
    if name == "full":
        sizes = sizes_of(args[:1])
    first, others = sizes[0], sizes[1:]
    if not isinstance(first, Value) or first.kind != "rows" or _has_rows(others):
        raise Unfoldable(f"{name!r} makes a tensor whose first axis is not the batch")
    return Value(first.domain, len(sizes))


def sizes_of(arguments: list[Any]) -> list[Any]:
    """Return sizes that are passed one by one or as one sequence."""
    if len(arguments) == 1 and isinstance(arguments[0], (list, tuple)):
        return list(arguments[0])
    return list(arguments)


def _has_rows(sizes: list[Any]) -> bool:
    return any(isinstance(size, Value) and size.kind in ("rows", "shape") for size in sizes)


def infer_reshape(name: str, args: list[Any], kwargs: dict[str, Any]) -> Value:
    """Return the result of view, reshape, expand or repeat.

    The first axis of the result has to be proportional to the number of rows. Rows may be merged
    with the following axes, as the blocks of members stay in order.
    """
    value = args[0]
    sizes = sizes_of(args[1:]) or sizes_of([kwargs.get("shape", kwargs.get("size", ()))])
    if len(sizes) == 1 and isinstance(sizes[0], Value) and sizes[0].kind == "shape":
        source = sizes[0]
        if source.domain != value.domain:
            raise Unfoldable(f"{name!r} uses the shape of another value")
        return Value(value.domain, source.rank)
    if not sizes or _has_rows(sizes[1:]):
        raise Unfoldable(f"{name!r} moves the batch to another axis")
    first = sizes[0]
    has_rows = isinstance(first, Value) and first.kind == "rows"
    if name in ("expand", "repeat") and value.domain is Domain.CONSTANT:
        if has_rows and (value.rank or 0) <= len(sizes):
            if (value.rank or 0) == len(sizes) and value.leading != 1:
                raise Unfoldable(f"{name!r} repeats a tensor that has its own rows")
            return Value(first.domain, len(sizes))
        return Value(Domain.CONSTANT, len(sizes))
    if value.domain is Domain.CONSTANT:
        raise Unfoldable(f"{name!r} gives a constant the number of samples as a size")
    if has_rows:
        if name == "repeat":
            raise Unfoldable("'repeat' repeats the batch")
        if name == "expand" and value.rank != len(sizes):
            raise Unfoldable("'expand' moves the batch to another axis")
        if first.domain is Domain.MEMBER and value.domain is Domain.SHARED:
            raise Unfoldable(f"{name!r} uses the number of rows of another value")
        return Value(value.domain, len(sizes))
    if name == "repeat" and first == 1 and value.rank == len(sizes):
        return Value(value.domain, len(sizes))
    if name == "expand" and first == -1 and value.rank == len(sizes):
        return Value(value.domain, len(sizes))
    if name in ("view", "reshape") and first == -1:
        return Value(value.domain, len(sizes))
    raise Unfoldable(f"{name!r} gives the batch a fixed size")
