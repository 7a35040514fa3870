"""Values of a traced forward that depend on the inputs alone, such as masks and positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor


class InputPair(NamedTuple):
    """A value that depends on the inputs alone, for both sets of inputs.

    Attributes:
        first: The value of ``x1``.
        second: The value of ``x2``.
    """

    first: Any
    second: Any

    def map(self, function: Callable[[Any], Any]) -> InputPair:
        """Apply a function to both values."""
        return InputPair(function(self.first), function(self.second))


def constant_part(value: Any) -> Any:
    """Return a number instead of a pair of equal numbers; return other values unchanged.

    Args:
        value: Any value.

    Example:
        >>> constant_part(InputPair(3, 3)), constant_part(0.5)
        (3, 0.5)
    """
    if not isinstance(value, InputPair) or isinstance(value.first, Tensor):
        return value
    return value.first if value.first == value.second else value
