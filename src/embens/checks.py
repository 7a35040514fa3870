"""Checks that every part of the library makes of its arguments, each written once.

They return the value that they were given, so that a check is part of the line that uses it. A
value of another type is a ``TypeError``, one out of range a ``ValueError``.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")


def check_whole(name: str, value: Any, least: int = 1) -> int:
    """Return a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be a whole number; got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}; got {value}")
    return int(value)


def check_members(members: Any) -> int:
    """Return the number of members: whole, and at least one."""
    return check_whole("members", members)


def check_number(
    name: str, value: Any, expected: str, valid: Callable[[float], bool] = math.isfinite
) -> float:
    """Return a finite number as a float; a tensor of one element is one.

    ``expected`` ends the sentence "the argument must be …"; ``valid`` tells which numbers will do.
    """
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    message = f"{name} must be {expected}; got {value!r}."
    if isinstance(number, bool) or not isinstance(number, Real):
        raise TypeError(message)
    if not (math.isfinite(number) and valid(float(number))):
        raise ValueError(message)
    return float(number)


def check_choice(name: str, value: T, choices: Iterable[T]) -> T:
    """Return one of the choices."""
    choices = list(choices)
    if value not in choices:
        raise ValueError(f"{name}: unknown {value!r}{closest(str(value), map(str, choices))}")
    return value


def closest(name: str, candidates: Iterable[str]) -> str:
    """Return "; did you mean …?" and the candidates, for an error message."""
    candidates = list(candidates)
    near = difflib.get_close_matches(str(name), candidates, n=1, cutoff=0.5)
    shown = ", ".join(map(repr, candidates[:20])) + (", …" if len(candidates) > 20 else "")
    return (f"; did you mean {near[0]!r}?" if near else ".") + f" Candidates: {shown}"


Gamma = float | int | Callable[[int], float] | None


def gradient_factor(gamma: Gamma, members: int, natural: float) -> float:
    r"""Return :math:`\gamma(M)/M`."""
    value = natural if gamma is None else gamma(members) if callable(gamma) else gamma
    if not isinstance(value, Real | Tensor):
        raise TypeError(
            f"gamma must be a number, a function of the number of members, or None; got {gamma!r}"
        )
    return check_number("gamma", value, "finite and not negative", lambda g: g >= 0) / members
