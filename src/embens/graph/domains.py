"""Values of a graph as the folded form sees them: whose rows they have, and how many axes.

Members run as one larger batch whose first axis holds a block of rows for each member. A
:class:`Value` is what is known of one value in the graph, without its elements. The rules of
:mod:`embens.graph.rowwise` compute the value of a result from those of the arguments.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any


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
        domain: Whose rows it has.
        rank: Number of axes; None if it is not a tensor.
        kind: "tensor", "shape" (of a tensor), "rows" (a number proportional to the number of rows),
            "tuple" (of tensors with this rank) or "other".
        leading: Size of the first axis of a constant tensor, if known.
    """

    domain: Domain
    rank: int | None = None
    kind: str = "tensor"
    leading: int | None = None


OTHER = Value(Domain.CONSTANT, None, "other")


def axis_of(name: str, axis: Any, rank: int) -> int:
    """Return an axis counted from the start; refuse the axis of the batch."""
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise Unfoldable(f"the axis of {name!r} is not a fixed number")
    axis = axis + rank if axis < 0 else axis
    if axis == 0:
        raise Unfoldable(f"{name!r} works along the batch")
    if not 0 < axis < rank:
        raise Unfoldable(f"{name!r} works along an axis that is not known")
    return axis


def flatten(values: Any) -> list[Any]:
    """Return the leaves of nested lists, tuples, dictionaries and slices."""
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, slice):
        values = [values.start, values.stop, values.step]
    if not isinstance(values, (list, tuple)):
        return [values]
    leaves = []
    for value in values:
        leaves += flatten(value)
    return leaves


def batch_value(name: str, value: Any) -> Value:
    """Return a tensor argument with a batch axis."""
    if not isinstance(value, Value) or value.kind != "tensor" or not value.rank:
        raise Unfoldable(f"an argument of {name!r} has no batch axis")
    return value


def argument(args: list[Any], kwargs: dict[str, Any], index: int, name: str, default: Any) -> Any:
    """Return an argument that may be passed by position or by name."""
    if len(args) > index:
        return args[index]
    return kwargs.get(name, default)
