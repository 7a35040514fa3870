"""Argument checks shared by all modules.

Each check returns the validated value. A value of the wrong type raises ``TypeError``, a value out
of range ``ValueError``. Messages state the problem, the value received and, where there is one, the
fix.
"""

import difflib
import functools
import inspect
import math
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

T = TypeVar("T")

MAX_CANDIDATES = 20  # candidates listed in an error message
MAX_ROWS = 10  # row indices listed in an error message

_LIBRARIES = (
    f"{Path(__file__).parent}{os.sep}",
    f"{Path(torch.__file__).parent}{os.sep}",
)
"""Folders whose files are not the user's code."""


def check_values(name: str, module: nn.Module) -> None:
    """Raise ValueError if a parameter is on the meta device.

    Args:
        name: Name of the function, for the error message.
        module: The module.
    """
    for parameter_name, parameter in module.named_parameters():
        if parameter.is_meta:
            raise ValueError(
                f"{name} needs values, but {parameter_name!r} is on the meta device. Load its "
                "values first, for example with embens.load."
            )


def check_whole(name: str, value: Any, least: int = 1) -> int:
    """Check that a value is an integer of at least ``least``.

    Args:
        name: Name of the argument, for the error message.
        value: The value to check; booleans and floats are not integers.
        least: Smallest valid value.

    Returns:
        The value as a Python ``int``.

    Raises:
        TypeError: If the value is not an integer.
        ValueError: If the value is smaller than ``least``.

    Example:
        >>> check_whole("epochs", 0)
        Traceback (most recent call last):
        ValueError: epochs must be a positive integer, got 0.
    """
    if least == 1:
        expected = "a positive integer"
    elif least == 0:
        expected = "a non-negative integer"
    else:
        expected = f"an integer of at least {least}"
    message = f"{name} must be {expected}, got {value!r}."
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(message)
    if value < least:
        raise ValueError(message)
    return int(value)


def check_members(members: Any) -> int:
    """Check the number of members, a positive integer.

    Args:
        members: The number.

    Returns:
        The number as a Python ``int``.

    Example:
        >>> check_members(8)
        8
    """
    return check_whole("members", members)


def check_number(
    name: str,
    value: Any,
    expected: str,
    valid: Callable[[float], bool] = math.isfinite,
) -> float:
    """Check that a value is a finite real number that satisfies a condition.

    Args:
        name: Name of the argument, for the error message.
        value: A number, or a tensor with one element.
        expected: Completes the sentence "the argument must be …".
        valid: Returns True for valid values; called with finite values only.

    Returns:
        The value as a Python ``float``.

    Raises:
        TypeError: If the value is not a real number.
        ValueError: If the value is NaN, infinite or not valid.

    Example:
        >>> check_number("rate", -1, "a number above 0", lambda rate: rate > 0)
        Traceback (most recent call last):
        ValueError: rate must be a number above 0, got -1.
    """
    number = value
    if isinstance(value, Tensor) and value.numel() == 1:
        number = value.item()
    message = f"{name} must be {expected}, got {value!r}."
    if isinstance(number, bool) or not isinstance(number, Real):
        raise TypeError(message)
    number = float(number)
    if not math.isfinite(number) or not valid(number):
        raise ValueError(message)
    return number


def check_choice(name: str, value: T, choices: Iterable[T]) -> T:
    """Check that a value is one of several choices.

    Args:
        name: Name of the argument, for the error message.
        value: The value to check.
        choices: The valid values.

    Returns:
        The value.

    Raises:
        ValueError: If the value is none of the choices; the message suggests the closest one.

    Example:
        >>> check_choice("pool", "averge", ("average", "max"))
        Traceback (most recent call last):
        ValueError: pool: unknown 'averge'; did you mean 'average'? Candidates: 'average', 'max'
    """
    choices = list(choices)
    if value not in choices:
        hint = closest(str(value), [str(choice) for choice in choices])
        raise ValueError(f"{name}: unknown {value!r}{hint}")
    return value


def closest(name: str, candidates: Iterable[str]) -> str:
    """Return the end of an error message that suggests a name.

    Args:
        name: The name that was not found.
        candidates: The valid names; at most 20 of them are listed.

    Returns:
        "; did you mean …? Candidates: …", or ". Candidates: …" if no candidate is similar.

    Example:
        >>> closest("relo", ["relu", "tanh"])
        "; did you mean 'relu'? Candidates: 'relu', 'tanh'"
    """
    candidates = list(candidates)
    listed = ", ".join(repr(candidate) for candidate in candidates[:MAX_CANDIDATES])
    if len(candidates) > MAX_CANDIDATES:
        listed += ", …"
    similar = difflib.get_close_matches(str(name), candidates, n=1, cutoff=0.5)
    if similar:
        return f"; did you mean {similar[0]!r}? Candidates: {listed}"
    return f". Candidates: {listed}"


def unknown_argument(
    function: Callable, unknown: Iterable[str], hints: Mapping[str, str]
) -> TypeError:
    """Return the error for a keyword argument that a function does not have.

    Args:
        function: The function.
        unknown: Names of the arguments; the error is about the first.
        hints: For some names, the text that follows "has no argument 'name'".

    Returns:
        The error, with a hint or the name of a similar argument.

    Example:
        >>> def train(epochs=1, **unknown):
        ...     if unknown:
        ...         raise unknown_argument(train, unknown, {})
        >>> train(epoch=3)
        Traceback (most recent call last):
        TypeError: train has no argument 'epoch'; did you mean 'epochs'? Candidates: 'epochs'
    """
    name = next(iter(unknown))
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    hint = hints.get(name) or closest(name, names)
    return TypeError(f"{function.__name__} has no argument {name!r}{hint}")


def suggest(hints: Mapping[str, str] | None = None) -> Callable[[T], T]:
    """Decorate a function so that a misspelled keyword argument gets a suggestion.

    The suggestion comes before the error about a missing argument. The signature and the docstring
    of the function are kept.

    Args:
        hints: For some names, the text that follows "has no argument 'name'".

    Returns:
        The decorator.

    Example:
        >>> @suggest()
        ... def train(epochs=1):
        ...     pass
        >>> train(epoch=3)
        Traceback (most recent call last):
        TypeError: train has no argument 'epoch'; did you mean 'epochs'? Candidates: 'epochs'
    """
    hints = hints or {}

    def decorate(function: Any) -> Any:
        names = inspect.signature(function).parameters

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            unknown = [name for name in kwargs if name not in names]
            if unknown:
                raise unknown_argument(function, unknown, hints)
            return function(*args, **kwargs)

        return checked

    return decorate


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that points at the line of the user's code.

    Args:
        message: The problem and its fix.
        category: Class of the warning.

    Example:
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     warn("members do not differ")
        >>> str(caught[0].message)
        'members do not differ'
    """
    if sys.version_info >= (3, 12):
        warnings.warn(message, category, skip_file_prefixes=_LIBRARIES)
    else:
        warnings.warn(message, category, stacklevel=_level_of_user())


def _level_of_user() -> int:
    """Return the ``stacklevel`` of the user's code in the caller, for Python 3.11."""
    calls = traceback.extract_stack()[:-1]  # without this function
    for level, call in enumerate(reversed(calls), start=1):
        if not call.filename.startswith(_LIBRARIES):
            return level
    return 1


def check_rows(name: str, values: Any, expected: str) -> int:
    """Check that all leaves of a nested container are tensors with the same number of rows.

    Args:
        name: Name of the argument, for the error message.
        values: A tensor, or a nested container of tensors.
        expected: Completes the sentence "the argument must be …".

    Returns:
        The number of rows, the length of the first axis.

    Raises:
        TypeError: If there is no tensor, or a leaf is not a tensor with at least one axis.
        ValueError: If the tensors differ in their number of rows.

    Example:
        >>> import torch
        >>> check_rows("x", (torch.zeros(5, 2), torch.zeros(5)), "tensors")
        5
    """
    leaves = tree_leaves(values)
    valid = all(isinstance(leaf, Tensor) and leaf.dim() > 0 for leaf in leaves)
    if not leaves or not valid:
        kinds = ", ".join(type(leaf).__name__ for leaf in leaves[:MAX_ROWS])
        if len(leaves) > MAX_ROWS:
            kinds += ", …"
        hint = ""
        if any(isinstance(leaf, (int, float)) for leaf in leaves):
            hint = " Convert lists of numbers with torch.tensor."
        raise TypeError(f"{name} must be {expected}, got ({kinds}).{hint}")
    rows = len(leaves[0])
    if any(len(leaf) != rows for leaf in leaves):
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)
        raise ValueError(
            f"{name} must have the same number of rows in all tensors, got shapes {shapes}."
        )
    return rows


def find_gaps(name: str, values: Any) -> str:
    """Describe non-finite entries; return "" if there are none.

    Args:
        name: A plural noun for the values, such as "inputs".
        values: A tensor, or a nested container of tensors and other leaves.

    Returns:
        A clause without a final period that names the first tensor with NaN or infinite values and
        its rows.

    Example:
        >>> import torch
        >>> find_gaps("inputs", torch.tensor([[1.0], [torch.nan]]))
        'inputs have NaN in row 1'
    """
    for path, leaf in tree_flatten_with_path(values)[0]:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.is_meta:
            continue
        # A finite sum is the cheap and usual case. The sum of finite values may overflow, so an
        # infinite sum alone proves nothing.
        if math.isfinite(leaf.detach().sum()):
            continue
        non_finite = ~leaf.isfinite()
        if not non_finite.any():
            continue
        kind = "NaN" if leaf.isnan().any() else "infinite values"
        place = keystr(path)
        if isinstance(values, tuple) and len(values) == 1:
            place = ""
        return f"{name}{place} have {kind} in {name_rows(non_finite)}"
    return ""


def name_rows(flags: Tensor) -> str:
    """List the rows in which any entry of a boolean tensor ``(row, …)`` is true.

    Args:
        flags: A boolean tensor; one without axes counts as a single row.

    Returns:
        Text such as "row 3" or "rows 3, 7"; at most 10 rows are listed.

    Example:
        >>> import torch
        >>> name_rows(torch.tensor([False, True, True]))
        'rows 1, 2'
    """
    if flags.dim() == 0:
        flags = flags.reshape(1)
    rows = flags.flatten(1).any(1) if flags.dim() > 1 else flags
    indices = rows.nonzero().flatten().tolist()
    text = "row " if len(indices) == 1 else "rows "
    text += ", ".join(str(index) for index in indices[:MAX_ROWS])
    if len(indices) > MAX_ROWS:
        text += f" and {len(indices) - MAX_ROWS} more"
    return text


def short_repr(self: Any) -> str:
    """Return a dataclass in one line, with the shapes of tensors instead of their values.

    Args:
        self: A dataclass instance; assign the function to ``__repr__`` of its class.

    Returns:
        Text such as ``Grams(values=(4, 4))``.
    """
    parts = []
    for field in fields(self):
        value = getattr(self, field.name)
        if isinstance(value, Tensor):
            value = tuple(value.shape)
        parts.append(f"{field.name}={value!r}")
    return f"{type(self).__name__}({', '.join(parts)})"
