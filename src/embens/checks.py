"""Checks that every part of the library makes of its arguments, each written once."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any


def check_members(members: Any) -> int:
    """Return ``members`` if it is a whole number of at least one."""
    if isinstance(members, bool) or not isinstance(members, int):
        raise TypeError(f"members must be a whole number; got {members!r}")
    if members < 1:
        raise ValueError(f"members must be at least 1; got {members}")
    return members


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
    try:
        value = float(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"gamma must be a number, a function of the number of members, or None; got {gamma!r}"
        ) from None
    if not 0 <= value < float("inf"):
        raise ValueError(f"gamma must be finite and not negative; got {value}")
    return value / members
