"""Snapshots of Python values: two snapshots are equal if nothing in the value has changed.

Plain values are compared by type and value, small tensors by their elements, containers and objects
part by part. Modules, functions and classes are compared by identity: :mod:`embens.graph.guards`
follows their contents.
"""

import functools
import pickle
import random
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


STANDARD_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that every module has."""


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Attributes of modules that hold their hooks."""


MOST_OBJECTS = 5000
"""Number of objects that a guard or a picture looks at."""


SMALL = 1024
"""Number of elements up to which pictures of tensors contain the values."""


class Same:
    """An object that is compared by identity."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class SameTensor:
    """A tensor that is compared by identity, version and, if it is small, by its values."""

    def __init__(self, value: Tensor):
        self.value = value
        self.version = 0 if value.is_inference() else value._version
        is_compared = value.numel() <= SMALL and value.layout is torch.strided
        # torch.export replaces tensors by others without values, and may leave some behind.
        is_compared = is_compared and not torch.compiler.is_compiling()
        is_compared = is_compared and not value.is_meta and type(value) in (Tensor, nn.Parameter)
        self.elements = value.detach().clone() if is_compared else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SameTensor) or self.value is not other.value:
            return False
        if self.version != other.version:
            return False
        if self.elements is None or other.elements is None:
            return True
        is_nan = (self.elements != self.elements) & (other.elements != other.elements)
        return bool(((self.elements == other.elements) | is_nan).all())

    def __hash__(self) -> int:
        return id(self.value)


def snapshot(value: Any, seen: set[int]) -> Any:
    """Return a picture of a value; two pictures are equal if nothing in the value has changed.

    Args:
        value: Any object. Modules, functions and classes are compared by identity.
        seen: Ids of the objects that are part of the picture already.
    """
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, Tensor):
        return SameTensor(value)
    if isinstance(value, (nn.Module, type, FunctionType, MethodType, ModuleType, torch.fx.Proxy)):
        return Same(value)
    state = generator_state(value)
    if state is not None:
        return state
    if id(value) in seen or len(seen) > MOST_OBJECTS:
        return Same(value)
    seen.add(id(value))
    parts: list[Any] = [Same(value)]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        parts += [snapshot(item, seen) for item in value]
    elif isinstance(value, dict):
        for key, item in value.items():
            parts.append((snapshot(key, seen), snapshot(item, seen)))
    elif isinstance(value, functools.partial):
        parts += [snapshot(value.func, seen), snapshot(value.keywords, seen)]
    elif has_hidden_state(value):
        parts.append(_pickled(value))
    for name, item in attributes_of(value):
        parts.append((name, snapshot(item, seen)))
    return tuple(parts)


def attributes_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes that an object holds itself, in its dictionary or in slots."""
    yield from getattr(value, "__dict__", {}).items()
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name) and name not in ("__dict__", "__weakref__"):
                yield name, getattr(value, name)


def has_hidden_state(value: Any) -> bool:
    """Return whether an object changes without a change of attributes or of known containers.

    Iterators and arrays of bytes or of numpy do.
    """
    if isinstance(value, (Iterator, bytearray, memoryview)):
        return True
    return "numpy" in sys.modules and isinstance(value, sys.modules["numpy"].ndarray)


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception:  # classes of the user may raise anything
        return b""


def random_state() -> list[Any]:
    """Return the states of the global random generators, to see whether code draws numbers."""
    state: list[Any] = [torch.random.get_rng_state().tolist(), random.getstate()]
    if "numpy" in sys.modules:
        state.append(repr(sys.modules["numpy"].random.get_state()))
    return state


@contextmanager
def unchanged_random_state() -> Iterator[None]:
    """Restore the states of the global random generators on exit."""
    torch_state, python_state = torch.random.get_rng_state(), random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        torch.random.set_rng_state(torch_state)
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


def generator_state(value: Any) -> Any:
    """Return the state of a random generator of Python or numpy; None for other objects."""
    if isinstance(value, random.Random):
        return value.getstate()
    # The module of a class of Cython is a descriptor.
    if str(type(value).__module__).startswith("numpy.random"):
        generator = getattr(value, "bit_generator", None) or getattr(value, "_bit_generator", None)
        return None if generator is None else repr(generator.state)
    return None
