"""What a traced graph depends on besides its inputs.

Tracing runs the user's code once. Python values that the code reads become constants of the graph:
attributes of modules and of objects that they hold, class attributes, global variables and
variables of closures. A :class:`Guard` remembers them; while it holds, the graph is valid.
"""

import random
import sys
from collections import deque
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
STANDARD_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that every module has."""

_LIBRARIES = ("torch", "numpy", "math", "typing", "embens", "builtins", "functools", "inspect")


class Same:
    """An object that is compared by identity."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def snapshot(value: Any, seen: set[int]) -> Any:
    """Return a picture of a value; two pictures are equal if nothing in the value has changed.

    Args:
        value: any object. Modules, functions and classes are compared by identity.
        seen: ids of the containers that are part of the picture already.
    """
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, Tensor):
        return Same(value), 0 if value.is_inference() else value._version
    if isinstance(value, (nn.Module, type, FunctionType, MethodType, ModuleType, torch.fx.Proxy)):
        return Same(value)
    if isinstance(value, random.Random):
        return value.getstate()
    if hasattr(value, "bit_generator"):  # a random generator of numpy
        return repr(value.bit_generator.state)
    if id(value) in seen:
        return Same(value)
    seen.add(id(value))
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return type(value), tuple(snapshot(item, seen) for item in value)
    if isinstance(value, dict):
        items = []
        for key, item in value.items():
            items.append((snapshot(key, seen), snapshot(item, seen)))
        return type(value), tuple(items)
    if hasattr(value, "__dict__"):
        # Only plain attributes: an object may lead to everything else in the process.
        plain = {key: item for key, item in vars(value).items() if isinstance(item, PLAIN)}
        return Same(value), tuple(plain.items())
    return Same(value)


def attributes_of(root: nn.Module) -> dict[str, Any]:
    """Return pictures of all attributes and buffers of a network, by dotted name."""
    pictures = {}
    seen: set[int] = set()
    for name, module in root.named_modules():
        prefix = f"{name}." if name else ""
        for key, value in vars(module).items():
            if key not in STANDARD_ATTRIBUTES:
                pictures[prefix + key] = snapshot(value, seen)
        for table in (module._buffers, module._parameters, module._modules):
            for key, value in table.items():
                pictures[prefix + key] = Same(value)
    return pictures


def random_state() -> list[Any]:
    """Return the states of the global random generators, to see whether code draws numbers."""
    state: list[Any] = [torch.random.get_rng_state().tolist(), random.getstate()]
    if "numpy" in sys.modules:
        state.append(repr(sys.modules["numpy"].random.get_state()))
    return state


class Guard:
    """Remembers the Python values that the code of a network may read.

    Args:
        root: the network.
    """

    def __init__(self, root: nn.Module):
        self.modules: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = []
        containers: list[Any] = []
        functions: list[FunctionType] = []
        for module in root.modules():
            self.modules.append((module, dict(vars(module)), dict(module._modules)))
            for key, value in vars(module).items():
                function = value.__func__ if isinstance(value, MethodType) else value
                if isinstance(function, FunctionType):
                    functions.append(function)
                elif key not in STANDARD_ATTRIBUTES and not isinstance(
                    value, (*PLAIN, Tensor, nn.Module)
                ):
                    containers.append(value)
        self.containers = containers
        self.cells: list[Any] = []
        self.hooks = [getattr(module, name) for module in root.modules() for name in HOOKS]
        self.hook_count = sum(map(len, self.hooks))
        # Namespaces with a name in them and its value.
        self.names: list[tuple[Any, str, Any]] = []
        for cls in {type(module) for module in root.modules()}:
            for parent in cls.__mro__:
                if parent.__module__.partition(".")[0] not in _LIBRARIES:
                    self._watch_class(parent, functions)
        visited: set[int] = set()
        while functions:
            function = functions.pop()
            if id(function) not in visited:
                visited.add(id(function))
                self._watch_function(function, functions)
        self.picture = self._picture()

    def _picture(self) -> list[Any]:
        seen: set[int] = set()
        values = [*self.containers, *(cell.cell_contents for cell in self.cells)]
        return [snapshot(value, seen) for value in values]

    def _watch_class(self, cls: type, functions: list[FunctionType]) -> None:
        for name, value in vars(cls).items():
            value = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(value, FunctionType):
                functions.append(value)
            elif isinstance(value, PLAIN):
                self.names.append((vars(cls), name, value))

    def _watch_function(self, function: FunctionType, functions: list[FunctionType]) -> None:
        """Watch the global variables and closures of a function, and the functions it calls."""
        if function.__module__.partition(".")[0] in _LIBRARIES:
            return
        names = function.__code__.co_names
        for namespace in _namespaces(function):
            for name in names:
                value = namespace.get(name)
                if isinstance(value, FunctionType):
                    functions.append(value)
                elif name in namespace and isinstance(value, PLAIN):
                    self.names.append((namespace, name, value))
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # the variable has no value yet
                continue
            if isinstance(value, FunctionType):
                functions.append(value)
            elif not isinstance(value, (nn.Module, type, ModuleType)):
                self.cells.append(cell)

    def holds(self) -> bool:
        """Return whether nothing has changed."""
        if sum(map(len, self.hooks)) != self.hook_count:
            return False
        for module, attributes, children in self.modules:
            if module._modules != children or not _is_equal(vars(module), attributes):
                return False
        for namespace, name, value in self.names:
            if namespace.get(name) != value:
                return False
        # torch.compile has guards for containers of its own and cannot follow a picture.
        return torch.compiler.is_compiling() or self._picture() == self.picture


def _namespaces(function: FunctionType) -> Iterator[dict[str, Any]]:
    """Yield the global variables of a function and those of modules that it names."""
    yield function.__globals__
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType) and value.__name__.partition(".")[0] not in _LIBRARIES:
            yield vars(value)


def _is_equal(left: dict[str, Any], right: dict[str, Any]) -> bool:
    try:
        return left == right
    except RuntimeError:  # another tensor with several elements
        return False
