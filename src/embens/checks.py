"""Checks that every part of the library makes of its arguments, each written once.

They return the value that they were given, so that a check is part of the line that uses it. A
value of another type is a ``TypeError``, one out of range a ``ValueError``.
"""

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, TypeVar

from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

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


def suggest(hints: Mapping[str, str] | None = None) -> Callable[[T], T]:
    """Decorate a function, so that a misspelled keyword argument gets "did you mean".

    ``hints`` says more of some names. The signature stays what it is, for readers and for tools.
    """

    def decorate(function: Any) -> Any:
        known = [name for name in inspect.signature(function).parameters if name != "self"]

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            for name in kwargs:
                if name not in known:
                    hint = (hints or {}).get(name) or closest(name, known)
                    raise TypeError(f"{function.__name__} has no argument {name!r}{hint}")
            return function(*args, **kwargs)

        return checked

    return decorate


def check_rows(name: str, values: Any, expected: str) -> int:
    """Return the number of rows that all tensors of a tree have, which is made of tensors alone."""
    leaves = tree_leaves(values)
    if not leaves or not all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
        kinds = ", ".join(type(leaf).__name__ for leaf in leaves)
        raise TypeError(f"{name}: expected {expected}; got ({kinds})")
    if len({len(leaf) for leaf in leaves}) > 1:
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)
        raise ValueError(f"{name}: expected as many rows in all of them; got shapes {shapes}")
    return len(leaves[0])


def find_gaps(name: str, values: Any) -> str:
    """Return where numbers of some tensors are NaN or infinite, as a sentence; "" if nowhere."""
    for path, leaf in tree_flatten_with_path(values)[0]:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.is_meta:
            continue
        if not math.isfinite(leaf.detach().sum()) and (bad := ~leaf.isfinite()).any():
            kind = "NaN" if leaf.isnan().any() else "infinite numbers"
            place = "" if isinstance(values, tuple) and len(values) == 1 else keystr(path)
            return f"{name}{place} have {kind} in {name_rows(bad)}"
    return ""


def name_rows(bad: Tensor) -> str:
    """Return the numbers of the rows in which something of ``(row, …)`` is true, as text."""
    rows = bad.reshape(len(bad) if bad.dim() else 1, -1).any(1).nonzero().flatten().tolist()
    more = f" and {len(rows) - 10} more" if len(rows) > 10 else ""
    return f"row{'s' * (len(rows) > 1)} {', '.join(map(str, rows[:10]))}{more}"


Gamma = float | int | Callable[[int], float] | None


def gradient_factor(gamma: Gamma, members: int, natural: float) -> float:
    r"""Return :math:`\gamma(M)/M`."""
    value = natural if gamma is None else gamma(members) if callable(gamma) else gamma
    if not isinstance(value, Real | Tensor):
        raise TypeError(
            f"gamma must be a number, a function of the number of members, or None; got {gamma!r}"
        )
    return check_number("gamma", value, "finite and not negative", lambda g: g >= 0) / members


def short_repr(self: Any) -> str:
    """Return a dataclass in one line, with the shapes of tensors instead of their values."""
    parts = {f.name: getattr(self, f.name) for f in fields(self)}
    texts = (f"{n}={tuple(v.shape) if isinstance(v, Tensor) else v!r}" for n, v in parts.items())
    return f"{type(self).__name__}({', '.join(texts)})"
