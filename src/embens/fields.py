"""Typed reading of the fields of a file.

A file may be damaged or forged, also with a valid checksum. Every field is read with its type and
its range, so that a wrong value is an error that names the file, the field and the value.
"""

import math
from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from torch import Tensor

from embens.files import Refused

MOST = 2**53  # larger integers are no counts or sizes
FIX = "The file is damaged or was changed. Restore it from a copy, or write it again."


class Fields:
    """The fields of a dictionary that was read from a file.

    Args:
        values: The dictionary; anything else is refused.
        place: Where it is, for error messages: the name of the file and the path in it.
        names: Names that it must have; None: any.
        optional: Names that it may have as well.

    Raises:
        Refused: If the value is not a dictionary, or if a name is missing or unknown.

    Example:
        >>> fields = Fields({"members": 0}, "x.safetensors: spec", ["members"])
        >>> fields.whole("members")
        Traceback (most recent call last):
        embens.files.tensors.Refused: x.safetensors: spec.members must be an integer of at least ...
    """

    def __init__(
        self,
        values: Any,
        place: str,
        names: Iterable[str] | None = None,
        optional: Iterable[str] = (),
    ):
        self.place = place
        if not isinstance(values, dict):
            raise refusal(place, "a dictionary", values)
        self.values: dict[Any, Any] = values
        if names is None:
            return
        required = list(names)
        for name in required:
            if name not in values:
                raise Refused(f"{place} has no field {name!r}. {FIX}")
        for name in values:
            if name not in required and name not in optional:
                raise Refused(f"{place} has an unknown field {name!r:.80}. {FIX}")

    def get(self, name: str) -> Any:
        """Return a field of any type; None if it is missing."""
        return self.values.get(name)

    def fail(self, name: str, expected: str) -> Refused:
        """Return the error for a field: the problem, its value and the fix."""
        return refusal(f"{self.place}.{name}", expected, self.get(name))

    def whole(self, name: str, least: int = 1, most: int = MOST) -> int:
        """Return an integer; True and 1.0 are no integers."""
        value = self.get(name)
        if is_whole(value) and least <= value <= most:
            return value
        if most == MOST:
            raise self.fail(name, f"an integer of at least {least}")
        raise self.fail(name, f"an integer from {least} to {most}")

    def number(self, name: str, low: float = -math.inf, high: float = math.inf) -> float:
        """Return a finite number."""
        value = self.get(name)
        if is_finite(value) and low <= value <= high:
            return value
        if (low, high) == (-math.inf, math.inf):
            raise self.fail(name, "a finite number")
        raise self.fail(name, f"a finite number from {low:g} to {high:g}")

    def flag(self, name: str) -> bool:
        """Return True or False."""
        value = self.get(name)
        if not isinstance(value, bool):
            raise self.fail(name, "true or false")
        return value

    def text(self, name: str, choices: Iterable[str] | None = None) -> str:
        """Return a text, one of some choices if there are any."""
        value = self.get(name)
        if not isinstance(value, str):
            raise self.fail(name, "a text")
        if choices is None:
            return value
        listed = list(choices)
        if value not in listed:
            raise self.fail(name, f"one of {', '.join(map(repr, listed))}")
        return value

    def items(self, name: str) -> list[Any]:
        """Return a list or a tuple, as a list."""
        value = self.get(name)
        if not isinstance(value, (list, tuple)):
            raise self.fail(name, "a list")
        return list(value)

    def texts(self, name: str) -> list[str]:
        """Return a list of texts."""
        values = self.items(name)
        if not all(isinstance(value, str) for value in values):
            raise self.fail(name, "a list of texts")
        return values

    def wholes(self, name: str, least: int, most: int) -> list[int]:
        """Return a list of integers in a range."""
        values = self.items(name)
        if not all(is_whole(value) and least <= value <= most for value in values):
            raise self.fail(name, f"a list of integers from {least} to {most}")
        return values

    def tensor(self, name: str, dims: int | None = None) -> Tensor:
        """Return a tensor with finite floating-point values and a number of dimensions."""
        value = self.get(name)
        is_right = isinstance(value, Tensor) and value.is_floating_point()
        if not is_right or not bool(value.isfinite().all()):
            raise self.fail(name, "a tensor of finite values")
        if dims is not None and value.dim() != dims:
            raise self.fail(name, f"a tensor with {dims} dimensions")
        return value

    def typed(self, name: str, hint: Any) -> Any:
        """Return a field whose type is an annotation; floats and tensors have no NaN."""
        value = self.get(name)
        if not is_typed(value, hint):
            raise self.fail(name, f"a value of type {getattr(hint, '__name__', hint)}")
        return value

    def fields(
        self, name: str, names: Iterable[str] | None = None, optional: Iterable[str] = ()
    ) -> "Fields":
        """Return the fields of a dictionary in this one."""
        return Fields(self.get(name), f"{self.place}.{name}", names, optional)

    def each(self, name: str, names: Iterable[str]) -> list["Fields"]:
        """Return the fields of each dictionary in a list."""
        listed = list(names)
        result = []
        for index, value in enumerate(self.items(name)):
            result.append(Fields(value, f"{self.place}.{name}[{index}]", listed))
        return result


def is_typed(value: Any, hint: Any) -> bool:
    """Return whether a value has the type of an annotation, and is not NaN.

    Args:
        value: Floats, integers, texts, tensors, and lists and dictionaries of them.
        hint: The annotation: a class, a union of them, or a list, such as ``list[str] | None``.

    Example:
        >>> is_typed([1, 2], list[int]), is_typed(True, int), is_typed(None, float | None)
        (True, False, True)
    """
    origin = get_origin(hint)
    if hint is Any:
        return True
    if origin in (Union, UnionType):
        return any(is_typed(value, option) for option in get_args(hint))
    if origin is list:
        (item,) = get_args(hint)
        return isinstance(value, list) and all(is_typed(element, item) for element in value)
    if origin is dict:
        return isinstance(value, dict)
    if hint is None or hint is NoneType:
        return value is None
    if hint is int:
        return is_whole(value)
    if hint is float:
        return is_whole(value) or (isinstance(value, float) and not math.isnan(value))
    if hint is Tensor:
        return isinstance(value, Tensor) and not bool(value.isnan().any())
    return isinstance(value, hint)


def is_whole(value: Any) -> bool:
    """Return whether a value is an integer, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Return whether a value is a finite number, and not a bool."""
    if is_whole(value):
        return abs(value) <= MOST
    return isinstance(value, float) and math.isfinite(value)


def refusal(place: str, expected: str, value: Any) -> Refused:
    """Return the error for a value of a file."""
    if isinstance(value, Tensor):
        described = f"a tensor of {value.dtype} and shape {tuple(value.shape)}"
        if value.is_floating_point() and not bool(value.isfinite().all()):
            described += " with NaN or infinite values"
    else:
        described = f"{value!r:.80}"
    return Refused(f"{place} must be {expected}, got {described}. {FIX}")
