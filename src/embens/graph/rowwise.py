"""Which operations treat the rows of a batch independently.

Members run as one larger batch whose first axis holds a block of rows for each member. That is
right where an operation maps concatenated blocks to the concatenation of its results on each block.
:func:`infer` knows this for functions and methods of torch by name, arguments and the ranks of the
values; anything else raises :class:`Unfoldable`.
"""

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from embens.graph.reading import ELEMENTWISE


class Unfoldable(Exception):
    """A network cannot run several members as one batch; the message says why."""


class Domain(IntEnum):
    """Whose rows a value has."""

    CONSTANT = 0  # no batch axis: parameters, buffers, numbers
    SHARED = 1  # one batch, the same for all members
    MEMBER = 2  # one block of rows for every member of the chunk


@dataclass(frozen=True)
class Value:
    """What is known of one value in a graph.

    Attributes:
        domain: whose rows it has.
        rank: number of axes; None if it is not a tensor.
        kind: "tensor", "shape" (of a tensor), "rows" (a number proportional to the number of rows),
            "tuple" (of tensors with this rank) or "other".
        leading: size of the first axis of a constant tensor, if known.
    """

    domain: Domain
    rank: int | None = None
    kind: str = "tensor"
    leading: int | None = None


OTHER = Value(Domain.CONSTANT, None, "other")

BROADCASTING = ELEMENTWISE | frozenset(
    "where maximum minimum eq ne lt le gt ge logical_and logical_or logical_not logical_xor "
    "masked_fill floor ceil round sign log1p log2 log10 expm1 exp2 atan tan asin acos sinh cosh "
    "asinh acosh atanh erfc floordiv floor_divide fmod remainder mod rtruediv rpow reciprocal lerp "
    "addcmul addcdiv nan_to_num and_ and or_ or xor invert not_ not pos isnan isinf isfinite bool "
    "int long hardshrink softshrink threshold prelu subtract multiply divide negative clip "
    "true_divide".split()
)
REDUCING = frozenset(
    "mean sum amax amin max min argmax argmin std var logsumexp prod all any".split()
)
ALONG_AXIS = frozenset("softmax log_softmax softmin cumsum cumprod normalize glu".split())
PAIRS = frozenset("max min".split())  # along an axis these return (values, indices)
QUERIES = frozenset("dtype device layout".split())
FACTORIES = frozenset("zeros ones full empty arange".split())
SPATIAL = {}
for _axes in (1, 2, 3):
    for _name in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "lp_pool"):
        SPATIAL[f"{_name}{_axes}d"] = _axes


def infer(name: str, args: list[Any], kwargs: dict[str, Any]) -> Value:
    """Return what is known of the result of a function or method.

    Args:
        name: its name, without underscores around it.
        args: positional arguments; values of the graph as :class:`Value`.
        kwargs: keyword arguments, likewise.

    Raises:
        Unfoldable: if the operation is unknown or may mix rows.
    """
    values = [value for value in _flatten((args, kwargs)) if isinstance(value, Value)]
    if name == "getattr":
        return _infer_attribute(args[0], args[1])
    if name in ("size", "dim", "numel", "len", "ndimension"):
        return _infer_size(name, args, kwargs)
    if name == "getitem":
        return _infer_index(args[0], args[1])
    if values and all(value.kind == "other" for value in values) and name not in FACTORIES:
        return replace(OTHER, domain=max(value.domain for value in values))
    if name in ("to", "type_as") and isinstance(args[0], Value) and args[0].kind == "tensor":
        return args[0]  # only the type or the device of other arguments matters
    if any(value.kind in ("rows", "shape") for value in values):
        return _infer_with_rows(name, args, kwargs, values)
    if all(value.domain is Domain.CONSTANT for value in values):
        return _infer_constant(name, args, values)
    if name in BROADCASTING:
        return broadcast(name, values)
    rule = _RULES.get(name)
    if rule is not None:
        return rule(name, args, kwargs)
    if name in SPATIAL:
        return _infer_spatial(name, args[0])
    raise Unfoldable(f"{name!r} is not known to treat samples independently")


def broadcast(name: str, values: list[Value]) -> Value:
    """Return the result of an elementwise operation with broadcasting."""
    tensors = [value for value in values if value.kind == "tensor"]
    if len(tensors) < len([value for value in values if value.kind != "other"]):
        raise Unfoldable(f"an argument of {name!r} is not a tensor")
    rank = max(value.rank or 0 for value in tensors)
    for value in tensors:
        if value.domain is Domain.CONSTANT:
            spans_rows = value.rank == rank and rank > 0 and value.leading != 1
            if spans_rows:
                raise Unfoldable(f"{name!r} combines a batch with a tensor that has its own rows")
        elif value.rank != rank or rank == 0:
            raise Unfoldable(f"the batch is not the first axis of the arguments of {name!r}")
    return Value(max(value.domain for value in tensors), rank)


def axis_of(name: str, axis: Any, rank: int) -> int:
    """Return an axis counted from the start; refuse the axis of the batch."""
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise Unfoldable(f"the axis of {name!r} is not a fixed number")
    axis = axis + rank if axis < 0 else axis
    if axis == 0:
        raise Unfoldable(f"{name!r} works along the batch")
    return axis


def _flatten(values: Any) -> list[Any]:
    """Return the leaves of nested lists, tuples, dictionaries and slices."""
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, slice):
        values = [values.start, values.stop, values.step]
    if not isinstance(values, (list, tuple)):
        return [values]
    leaves = []
    for value in values:
        leaves += _flatten(value)
    return leaves


def _data(name: str, value: Any) -> Value:
    """Return a tensor argument with a batch axis."""
    if not isinstance(value, Value) or value.kind != "tensor" or not value.rank:
        raise Unfoldable(f"an argument of {name!r} has no batch axis")
    return value


# Attributes, sizes and indices


def _infer_attribute(value: Value, attribute: str) -> Value:
    if attribute in QUERIES:
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


def _infer_size(name: str, args: list[Any], kwargs: dict[str, Any]) -> Value:
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


def _infer_index(value: Any, index: Any) -> Value:
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
        if isinstance(item, (Value, list)) or any(isinstance(v, Value) for v in _flatten(item)):
            raise Unfoldable("its code indexes with a tensor")
        if isinstance(item, int):
            rank -= 1
        elif item is None:
            rank += 1
    return Value(value.domain, rank)


def _index_constant(value: Value, indices: list[Any]) -> Value:
    rank = value.rank or 0
    for item in indices:
        if isinstance(item, Value) and item.domain is not Domain.CONSTANT:
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


# Operations with numbers that depend on the number of rows


def _infer_with_rows(
    name: str, args: list[Any], kwargs: dict[str, Any], values: list[Value]
) -> Value:
    if name in ("mul", "rmul"):
        rows = [value for value in values if value.kind == "rows"]
        if len(rows) == 1 and all(value.kind in ("rows", "other") for value in values):
            return rows[0]
    if name in ("view", "reshape", "expand", "repeat"):
        return _infer_reshape(name, args, kwargs)
    if name in FACTORIES and name != "arange":
        return _infer_factory(name, args)
    raise Unfoldable(f"{name!r} computes with the number of samples")


def _infer_factory(name: str, args: list[Any]) -> Value:
    sizes = _sizes(args[:1] if isinstance(args[0], (list, tuple)) else args)
    if name == "full":
        sizes = _sizes(args[:1])
    first, others = sizes[0], sizes[1:]
    if not isinstance(first, Value) or first.kind != "rows" or _has_rows(others):
        raise Unfoldable(f"{name!r} makes a tensor whose first axis is not the batch")
    return Value(first.domain, len(sizes))


def _sizes(arguments: list[Any]) -> list[Any]:
    """Return sizes that are passed one by one or as one sequence."""
    if len(arguments) == 1 and isinstance(arguments[0], (list, tuple)):
        return list(arguments[0])
    return list(arguments)


def _has_rows(sizes: list[Any]) -> bool:
    return any(isinstance(size, Value) and size.kind in ("rows", "shape") for size in sizes)


def _infer_reshape(name: str, args: list[Any], kwargs: dict[str, Any]) -> Value:
    """Return the result of view, reshape, expand or repeat.

    The first axis of the result has to be proportional to the number of rows. Rows may be merged
    with the following axes, as the blocks of members stay in order.
    """
    value = args[0]
    sizes = _sizes(args[1:]) or _sizes([kwargs.get("shape", kwargs.get("size", ()))])
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


def _infer_constant(name: str, args: list[Any], values: list[Value]) -> Value:
    """Return the result of an operation on constants; its rank has to be known."""
    tensors = [value for value in values if value.kind == "tensor"]
    if name in BROADCASTING or name in ALONG_AXIS:
        if not tensors:
            return OTHER
        rank = max(value.rank or 0 for value in tensors)
        leading = None
        if all(v.rank is None or v.rank < rank or v.leading == 1 for v in tensors):
            leading = 1
        return Value(Domain.CONSTANT, rank, leading=leading)
    if name == "arange":
        return Value(Domain.CONSTANT, 1)
    if name in FACTORIES:
        sizes = _sizes(args[:1] if name == "full" else args)
        leading = sizes[0] if sizes and isinstance(sizes[0], int) else None
        return Value(Domain.CONSTANT, len(sizes), leading=leading)
    if name == "unsqueeze" and tensors and isinstance(args[1], int):
        rank = (tensors[0].rank or 0) + 1
        leading = 1 if args[1] in (0, -rank) else tensors[0].leading
        return Value(Domain.CONSTANT, rank, leading=leading)
    if name in ("expand", "repeat"):
        return Value(Domain.CONSTANT, len(_sizes(args[1:])))
    if name in ("transpose", "permute", "t", "contiguous", "clone", "detach") and tensors:
        return Value(Domain.CONSTANT, tensors[0].rank)
    raise Unfoldable(f"{name!r} of tensors that do not depend on the input is not known")


# Rules by name: each takes (name, args, kwargs)


def _argument(args: list[Any], kwargs: dict[str, Any], index: int, name: str, default: Any) -> Any:
    if len(args) > index:
        return args[index]
    return kwargs.get(name, default)


def _infer_reduction(name: str, args: list[Any], kwargs: dict[str, Any]) -> Value:
    value = _data(name, args[0])
    axes = _argument(args, kwargs, 1, "dim", kwargs.get("axis"))
    keeps = bool(_argument(args, kwargs, 2, "keepdim", False))
    if name in ("std", "var") and len(args) > 2:
        raise Unfoldable(f"{name!r} has positional options")
    if axes is None or isinstance(axes, Value):
        raise Unfoldable(f"{name!r} reduces over the batch")
    axes = list(axes) if isinstance(axes, (list, tuple)) else [axes]
    rank = value.rank or 0
    for axis in axes:
        axis_of(name, axis, rank)
    rank = rank if keeps else rank - len(axes)
    return Value(value.domain, rank, "tuple" if name in PAIRS else "tensor")


def _infer_along_axis(name: str, args: list[Any], kwargs: dict[str, Any]) -> Value:
    value = _data(name, args[0])
    index, default = (2, 1) if name == "normalize" else (1, -1 if name == "glu" else None)
    axis = _argument(args, kwargs, index, "dim", default)
    axis_of(name, axis, value.rank or 0)
    return value


def _infer_join(name: str, args: list[Any], kwargs: dict[str, Any]) -> Value:
    parts = args[0]
    if isinstance(parts, Value):
        raise Unfoldable(f"the parts of {name!r} are not listed")
    values = [_data(name, part) for part in parts]
    rank = values[0].rank or 0
    if any(value.rank != rank or value.domain is Domain.CONSTANT for value in values):
        raise Unfoldable(f"{name!r} joins values with and without a batch axis")
    result_rank = rank + 1 if name == "stack" else rank
    axis_of(name, _argument(args, kwargs, 1, "dim", 0), result_rank)
    return Value(max(value.domain for value in values), result_rank)


def _infer_flatten(name: str, args: list[Any], kwargs: dict[str, Any]) -> Value:
    value = _data(name, args[0])
    rank = value.rank or 0
    start = _argument(args, kwargs, 1, "start_dim", 0)
    end = _argument(args, kwargs, 2, "end_dim", -1)
    start = start + rank if start < 0 else start
    end = end + rank if end < 0 else end
    if start == 0 and end == rank - 1:
        raise Unfoldable("'flatten' merges all axes")
    return Value(value.domain, rank - (end - start))


def _infer_unflatten(name: str, args: list[Any], kwargs: dict[str, Any]) -> Value:
    value = _data(name, args[0])
    axis_of(name, _argument(args, kwargs, 1, "dim", 0), value.rank or 0)
    sizes = _argument(args, kwargs, 2, "sizes", ())
    return Value(value.domain, (value.rank or 0) - 1 + len(sizes))


def _infer_permutation(name: str, args: list[Any], kwargs: dict[str, Any]) -> Value:
    value = _data(name, args[0])
    rank = value.rank or 0
    if name == "permute":
        axes = _sizes(args[1:]) or list(kwargs.get("dims", ()))
        if not axes or axes[0] not in (0, -rank):
            raise Unfoldable("'permute' moves the batch to another axis")
        return value
    axis_of(name, _argument(args, kwargs, 1, "dim0", 0), rank)
    axis_of(name, _argument(args, kwargs, 2, "dim1", 0), rank)
    return value


def _infer_axis_change(name: str, args: list[Any], kwargs: dict[str, Any]) -> Value:
    value = _data(name, args[0])
    rank = value.rank or 0
    axis = _argument(args, kwargs, 1, "dim", None)
    if axis is None:
        raise Unfoldable(f"{name!r} without an axis may remove the batch")
    if name == "unsqueeze":
        axis_of(name, axis, rank + 1)
        return Value(value.domain, rank + 1)
    axis_of(name, axis, rank)
    # Whether an axis of another size stays is not known; with size 1 it is removed.
    return Value(value.domain, rank - 1)


def _infer_parts(name: str, args: list[Any], kwargs: dict[str, Any]) -> Value:
    value = _data(name, args[0])
    rank = value.rank or 0
    if name == "unbind":
        axis_of(name, _argument(args, kwargs, 1, "dim", 0), rank)
        return Value(value.domain, rank - 1, "tuple")
    axis_of(name, _argument(args, kwargs, 2, "dim", 0), rank)
    return Value(value.domain, rank, "tuple")


def _infer_selection(name: str, args: list[Any], kwargs: dict[str, Any]) -> Value:
    value = _data(name, args[0])
    rank = value.rank or 0
    axis_of(name, _argument(args, kwargs, 1, "dim", 0), rank)
    return Value(value.domain, rank - 1 if name == "select" else rank)


def _infer_product(name: str, args: list[Any], kwargs: dict[str, Any]) -> Value:
    left, right = args[0], _argument(args, kwargs, 1, "other", None)
    ranks = (left.rank or 0, right.rank or 0)
    domain = max(left.domain, right.domain)
    if right.domain is Domain.CONSTANT:
        if ranks[0] >= 2 and ranks[1] <= 2:
            return Value(domain, ranks[0] if ranks[1] == 2 else ranks[0] - 1)
    elif left.domain is Domain.CONSTANT:
        if ranks[1] >= 3 and ranks[0] == 2:
            return Value(domain, ranks[1])
    elif ranks[0] == ranks[1] >= 3:
        return Value(domain, ranks[0])
    raise Unfoldable(f"{name!r} multiplies tensors of ranks {ranks[0]} and {ranks[1]}")


def _infer_linear(name: str, args: list[Any], kwargs: dict[str, Any]) -> Value:
    value = _data(name, args[0])
    weight = _argument(args, kwargs, 1, "weight", None)
    is_constant = isinstance(weight, Value) and weight.domain is Domain.CONSTANT
    if (value.rank or 0) < 2 or not is_constant or weight.rank != 2:
        raise Unfoldable("'linear' has a weight that depends on the batch, or no batch")
    return value


def _infer_embedding(name: str, args: list[Any], kwargs: dict[str, Any]) -> Value:
    value = _data(name, args[0])
    weight = _argument(args, kwargs, 1, "weight", None)
    if not isinstance(weight, Value) or weight.domain is not Domain.CONSTANT:
        raise Unfoldable("'embedding' has a table that depends on the batch")
    if len(args) > 2 or set(kwargs) - {"weight", "padding_idx"}:
        raise Unfoldable("'embedding' has options")
    return Value(value.domain, (value.rank or 0) + 1)


def _infer_attention(name: str, args: list[Any], kwargs: dict[str, Any]) -> Value:
    values = [_data(name, value) for value in args[:3]]
    ranks = {value.rank or 0 for value in values}
    if len(values) != 3 or len(ranks) != 1 or min(ranks) < 3:
        raise Unfoldable("the arguments of attention have different ranks")
    if any(value.domain is Domain.CONSTANT for value in values):
        raise Unfoldable("an argument of attention has no batch axis")
    mask = _argument(args, kwargs, 3, "attn_mask", None)
    if isinstance(mask, Value):
        broadcast(name, [values[0], mask])
        values.append(mask)
    return Value(max(value.domain for value in values), values[0].rank)


def _infer_norm(name: str, args: list[Any], kwargs: dict[str, Any]) -> Value:
    value = _data(name, args[0])
    for parameter in [*args[1:], *kwargs.values()]:
        if isinstance(parameter, Value) and parameter.domain is not Domain.CONSTANT:
            raise Unfoldable(f"the parameters of {name!r} depend on the batch")
    if (value.rank or 0) < 2:
        raise Unfoldable(f"{name!r} works along the batch")
    if name in ("layer_norm", "rms_norm"):
        shape = _argument(args, kwargs, 1, "normalized_shape", ())
        if not isinstance(shape, (list, tuple)) or len(shape) >= (value.rank or 0):
            raise Unfoldable(f"{name!r} works along the batch")
    return value


def _infer_pad(name: str, args: list[Any], kwargs: dict[str, Any]) -> Value:
    value = _data(name, args[0])
    padding = _argument(args, kwargs, 1, "pad", ())
    if not isinstance(padding, (list, tuple)) or len(padding) // 2 >= (value.rank or 0):
        raise Unfoldable("'pad' pads the batch")
    return value


def _infer_spatial(name: str, value: Any) -> Value:
    value = _data(name, value)
    if value.rank != SPATIAL[name] + 2:
        raise Unfoldable(f"the argument of {name!r} has no batch axis")
    return value


def _infer_image(name: str, args: list[Any], kwargs: dict[str, Any]) -> Value:
    value = _data(name, args[0])
    if ((value.rank or 0) < 4 and name != "interpolate") or (value.rank or 0) < 3:
        raise Unfoldable(f"the argument of {name!r} has no batch axis")
    return value


_RULES: dict[str, Any] = {
    "cat": _infer_join,
    "concat": _infer_join,
    "stack": _infer_join,
    "flatten": _infer_flatten,
    "unflatten": _infer_unflatten,
    "permute": _infer_permutation,
    "transpose": _infer_permutation,
    "swapaxes": _infer_permutation,
    "squeeze": _infer_axis_change,
    "unsqueeze": _infer_axis_change,
    "chunk": _infer_parts,
    "split": _infer_parts,
    "unbind": _infer_parts,
    "select": _infer_selection,
    "narrow": _infer_selection,
    "matmul": _infer_product,
    "bmm": _infer_product,
    "linear": _infer_linear,
    "embedding": _infer_embedding,
    "scaled_dot_product_attention": _infer_attention,
    "layer_norm": _infer_norm,
    "rms_norm": _infer_norm,
    "group_norm": _infer_norm,
    "pad": _infer_pad,
    "interpolate": _infer_image,
    "pixel_shuffle": _infer_image,
    "pixel_unshuffle": _infer_image,
    "view": _infer_reshape,
    "reshape": _infer_reshape,
    "expand": _infer_reshape,
    "repeat": _infer_reshape,
    **dict.fromkeys(REDUCING, _infer_reduction),
    **dict.fromkeys(ALONG_AXIS, _infer_along_axis),
}
