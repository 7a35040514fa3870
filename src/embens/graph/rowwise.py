"""Which operations treat the rows of a batch independently.

Members run as one larger batch whose first axis holds a block of rows for each member. That is
right where an operation maps concatenated blocks to the concatenation of its results on each block.
:func:`infer` knows this for functions and methods of torch by name, arguments and the ranks of the
values; anything else raises :class:`Unfoldable`. A new operation is a name in one of the sets, or a
rule ``(name, args, kwargs) -> Value`` in ``RULES``.
"""

from dataclasses import replace
from typing import Any

from embens.graph.domains import (
    OTHER,
    Domain,
    Unfoldable,
    Value,
    argument,
    axis_of,
    batch_value,
    flatten,
)
from embens.graph.operations import ELEMENTWISE
from embens.graph.shapes import (
    FACTORIES,
    infer_attribute,
    infer_index,
    infer_reshape,
    infer_size,
    infer_with_rows,
    sizes_of,
)

BROADCASTING = ELEMENTWISE | frozenset(
    "where maximum minimum eq ne lt le gt ge logical_and logical_or logical_not logical_xor "
    "masked_fill floor ceil round sign log1p log2 log10 expm1 exp2 atan tan asin acos sinh cosh "
    "asinh acosh atanh erfc floordiv floor_divide fmod remainder mod rtruediv rpow reciprocal lerp "
    "addcmul addcdiv nan_to_num and_ and or_ or xor invert not_ not pos isnan isinf isfinite bool "
    "int long hardshrink softshrink threshold prelu subtract multiply divide negative clip "
    "true_divide".split()
)


# Operations whose result is a number if all arguments are numbers, such as sizes.
ARITHMETIC = BROADCASTING | frozenset("max min isqrt prod gcd float".split())


REDUCING = frozenset(
    "mean sum amax amin max min argmax argmin std var logsumexp prod all any".split()
)


ALONG_AXIS = frozenset("softmax log_softmax softmin cumsum cumprod normalize glu".split())


PAIRS = frozenset("max min".split())  # along an axis these return (values, indices)


SPATIAL = {}
for _axes in (1, 2, 3):
    for _name in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "lp_pool"):
        SPATIAL[f"{_name}{_axes}d"] = _axes


def infer(name: str, args: list[Any], kwargs: dict[str, Any]) -> Value:
    """Return what is known of the result of a function or method.

    Args:
        name: Its name, without underscores around it.
        args: Positional arguments; values of the graph as :class:`Value`.
        kwargs: Keyword arguments, likewise.

    Raises:
        Unfoldable: If the operation is unknown or may mix rows.
    """
    values = [value for value in flatten((args, kwargs)) if isinstance(value, Value)]
    if not args and name not in BROADCASTING:
        raise Unfoldable(f"{name!r} gets all its arguments by name")
    if name == "getattr":
        return infer_attribute(args[0], args[1])
    if name in ("size", "dim", "numel", "len", "ndimension"):
        return infer_size(name, args, kwargs)
    if name == "getitem":
        return infer_index(args[0], args[1])
    if values and all(value.kind == "other" for value in values) and name in ARITHMETIC:
        return replace(OTHER, domain=max(value.domain for value in values))
    if name in ("to", "type_as") and isinstance(args[0], Value) and args[0].kind == "tensor":
        return args[0]  # only the type or the device of other arguments matters
    if any(value.kind in ("rows", "shape") for value in values):
        return infer_with_rows(name, args, kwargs, values)
    if all(value.domain is Domain.CONSTANT for value in values):
        return _infer_constant(name, args, kwargs, values)
    if name in BROADCASTING:
        return broadcast(name, values)
    rule = RULES.get(name)
    try:
        if rule is not None:
            return rule(name, args, kwargs)
        if name in SPATIAL:
            return _infer_spatial(name, args[0])
    except (AttributeError, IndexError, KeyError, TypeError):
        raise Unfoldable(f"{name!r} gets arguments in an unusual form") from None
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


def _infer_constant(
    name: str, args: list[Any], kwargs: dict[str, Any], values: list[Value]
) -> Value:
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
        sizes = sizes_of(args[:1] if name == "full" else args)
        leading = sizes[0] if sizes and isinstance(sizes[0], int) else None
        return Value(Domain.CONSTANT, len(sizes), leading=leading)
    axis = argument(args, kwargs, 1, "dim", None)
    if name == "unsqueeze" and tensors and isinstance(axis, int):
        rank = (tensors[0].rank or 0) + 1
        leading = 1 if axis in (0, -rank) else tensors[0].leading
        return Value(Domain.CONSTANT, rank, leading=leading)
    if name in ("expand", "repeat"):
        return Value(Domain.CONSTANT, len(sizes_of(args[1:])))
    if name in ("transpose", "permute", "t", "contiguous", "clone", "detach") and tensors:
        return Value(Domain.CONSTANT, tensors[0].rank)
    raise Unfoldable(f"{name!r} of tensors that do not depend on the input is not known")


def _infer_reduction(name: str, args: list[Any], kwargs: dict[str, Any]) -> Value:
    value = batch_value(name, args[0])
    axes = argument(args, kwargs, 1, "dim", kwargs.get("axis"))
    keeps = bool(argument(args, kwargs, 2, "keepdim", kwargs.get("keepdims", False)))
    if name in ("std", "var") and len(args) > 2:
        raise Unfoldable(f"{name!r} has positional options")
    if axes is None or isinstance(axes, Value):
        raise Unfoldable(f"{name!r} reduces over the batch")
    axes = list(axes) if isinstance(axes, (list, tuple)) else [axes]
    if not axes:
        raise Unfoldable(f"{name!r} reduces over all axes if none is named")
    rank = value.rank or 0
    for axis in axes:
        axis_of(name, axis, rank)
    rank = rank if keeps else rank - len(axes)
    return Value(value.domain, rank, "tuple" if name in PAIRS else "tensor")


def _infer_along_axis(name: str, args: list[Any], kwargs: dict[str, Any]) -> Value:
    value = batch_value(name, args[0])
    index, default = (2, 1) if name == "normalize" else (1, -1 if name == "glu" else None)
    axis = argument(args, kwargs, index, "dim", default)
    axis_of(name, axis, value.rank or 0)
    return value


def _infer_join(name: str, args: list[Any], kwargs: dict[str, Any]) -> Value:
    parts = args[0]
    if isinstance(parts, Value):
        raise Unfoldable(f"the parts of {name!r} are not listed")
    values = [batch_value(name, part) for part in parts]
    rank = values[0].rank or 0
    if any(value.rank != rank or value.domain is Domain.CONSTANT for value in values):
        raise Unfoldable(f"{name!r} joins values with and without a batch axis")
    result_rank = rank + 1 if name == "stack" else rank
    axis_of(name, argument(args, kwargs, 1, "dim", 0), result_rank)
    return Value(max(value.domain for value in values), result_rank)


def _infer_flatten(name: str, args: list[Any], kwargs: dict[str, Any]) -> Value:
    value = batch_value(name, args[0])
    rank = value.rank or 0
    start = argument(args, kwargs, 1, "start_dim", 0)
    end = argument(args, kwargs, 2, "end_dim", -1)
    start = start + rank if start < 0 else start
    end = end + rank if end < 0 else end
    if start == 0 and end == rank - 1:
        raise Unfoldable("'flatten' merges all axes")
    return Value(value.domain, rank - (end - start))


def _infer_unflatten(name: str, args: list[Any], kwargs: dict[str, Any]) -> Value:
    value = batch_value(name, args[0])
    axis_of(name, argument(args, kwargs, 1, "dim", 0), value.rank or 0)
    sizes = argument(args, kwargs, 2, "sizes", ())
    return Value(value.domain, (value.rank or 0) - 1 + len(sizes))


def _infer_permutation(name: str, args: list[Any], kwargs: dict[str, Any]) -> Value:
    value = batch_value(name, args[0])
    rank = value.rank or 0
    if name == "permute":
        axes = sizes_of(args[1:]) or list(kwargs.get("dims", ()))
        if not axes or axes[0] not in (0, -rank):
            raise Unfoldable("'permute' moves the batch to another axis")
        return value
    axis_of(name, argument(args, kwargs, 1, "dim0", 0), rank)
    axis_of(name, argument(args, kwargs, 2, "dim1", 0), rank)
    return value


def _infer_axis_change(name: str, args: list[Any], kwargs: dict[str, Any]) -> Value:
    value = batch_value(name, args[0])
    rank = value.rank or 0
    axis = argument(args, kwargs, 1, "dim", None)
    if axis is None:
        raise Unfoldable(f"{name!r} without an axis may remove the batch")
    if name == "unsqueeze":
        axis_of(name, axis, rank + 1)
        return Value(value.domain, rank + 1)
    axis_of(name, axis, rank)
    # Whether an axis of another size stays is not known; with size 1 it is removed.
    return Value(value.domain, rank - 1)


def _infer_parts(name: str, args: list[Any], kwargs: dict[str, Any]) -> Value:
    value = batch_value(name, args[0])
    rank = value.rank or 0
    if name == "unbind":
        axis_of(name, argument(args, kwargs, 1, "dim", 0), rank)
        return Value(value.domain, rank - 1, "tuple")
    axis_of(name, argument(args, kwargs, 2, "dim", 0), rank)
    return Value(value.domain, rank, "tuple")


def _infer_selection(name: str, args: list[Any], kwargs: dict[str, Any]) -> Value:
    value = batch_value(name, args[0])
    rank = value.rank or 0
    axis_of(name, argument(args, kwargs, 1, "dim", 0), rank)
    return Value(value.domain, rank - 1 if name == "select" else rank)


def _infer_product(name: str, args: list[Any], kwargs: dict[str, Any]) -> Value:
    left, right = args[0], argument(args, kwargs, 1, "other", None)
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
    value = batch_value(name, args[0])
    weight = argument(args, kwargs, 1, "weight", None)
    is_constant = isinstance(weight, Value) and weight.domain is Domain.CONSTANT
    for bias in (*args[2:], kwargs.get("bias")):
        if isinstance(bias, Value):
            is_constant &= bias.domain is Domain.CONSTANT and bias.rank == 1
    if (value.rank or 0) < 2 or not is_constant or weight.rank != 2:
        raise Unfoldable("'linear' has a weight that depends on the batch, or no batch")
    return value


def _infer_embedding(name: str, args: list[Any], kwargs: dict[str, Any]) -> Value:
    value = batch_value(name, args[0])
    weight = argument(args, kwargs, 1, "weight", None)
    if not isinstance(weight, Value) or weight.domain is not Domain.CONSTANT:
        raise Unfoldable("'embedding' has a table that depends on the batch")
    if len(args) > 2 or set(kwargs) - {"weight", "padding_idx"}:
        raise Unfoldable("'embedding' has options")
    return Value(value.domain, (value.rank or 0) + 1)


def _infer_attention(name: str, args: list[Any], kwargs: dict[str, Any]) -> Value:
    values = [batch_value(name, value) for value in args[:3]]
    ranks = {value.rank or 0 for value in values}
    if len(values) != 3 or len(ranks) != 1 or min(ranks) < 3:
        raise Unfoldable("the arguments of attention have different ranks")
    if any(value.domain is Domain.CONSTANT for value in values):
        raise Unfoldable("an argument of attention has no batch axis")
    mask = argument(args, kwargs, 3, "attn_mask", None)
    if isinstance(mask, Value):
        broadcast(name, [values[0], mask])
        values.append(mask)
    return Value(max(value.domain for value in values), values[0].rank)


def _infer_norm(name: str, args: list[Any], kwargs: dict[str, Any]) -> Value:
    value = batch_value(name, args[0])
    for parameter in [*args[1:], *kwargs.values()]:
        if isinstance(parameter, Value) and parameter.domain is not Domain.CONSTANT:
            raise Unfoldable(f"the parameters of {name!r} depend on the batch")
    if (value.rank or 0) < 2:
        raise Unfoldable(f"{name!r} works along the batch")
    if name in ("layer_norm", "rms_norm"):
        shape = argument(args, kwargs, 1, "normalized_shape", ())
        if not isinstance(shape, (list, tuple)) or len(shape) >= (value.rank or 0):
            raise Unfoldable(f"{name!r} works along the batch")
    return value


def _infer_pad(name: str, args: list[Any], kwargs: dict[str, Any]) -> Value:
    value = batch_value(name, args[0])
    padding = argument(args, kwargs, 1, "pad", ())
    if not isinstance(padding, (list, tuple)) or len(padding) // 2 >= (value.rank or 0):
        raise Unfoldable("'pad' pads the batch")
    return value


def _infer_spatial(name: str, value: Any) -> Value:
    value = batch_value(name, value)
    if value.rank != SPATIAL[name] + 2:
        raise Unfoldable(f"the argument of {name!r} has no batch axis")
    return value


def _infer_image(name: str, args: list[Any], kwargs: dict[str, Any]) -> Value:
    value = batch_value(name, args[0])
    if ((value.rank or 0) < 4 and name != "interpolate") or (value.rank or 0) < 3:
        raise Unfoldable(f"the argument of {name!r} has no batch axis")
    return value


RULES: dict[str, Any] = {
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
    "view": infer_reshape,
    "reshape": infer_reshape,
    "expand": infer_reshape,
    "repeat": infer_reshape,
    **dict.fromkeys(REDUCING, _infer_reduction),
    **dict.fromkeys(ALONG_AXIS, _infer_along_axis),
}
