"""What a traced graph depends on besides its inputs.

Tracing runs the user's code once. Python values that the code reads become constants of the graph:
attributes of modules and of objects that they hold, class attributes, global variables, and
variables of closures. A :class:`Guard` finds them from the code objects of the functions that
``forward`` can reach, and remembers their values. While it holds, the graph is valid. Code that can
read something else, such as the environment or a file, is :class:`Unwatchable`.
"""

import builtins
import dis
import functools
import logging
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    CodeType,
    FunctionType,
    GenericAlias,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    UnionType,
    WrapperDescriptorType,
)
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from embens.graph.snapshots import (
    MOST_OBJECTS,
    PLAIN,
    STANDARD_ATTRIBUTES,
    attributes_of,
    generator_state,
    has_hidden_state,
)

_LIBRARIES = frozenset(
    "torch numpy math cmath typing typing_extensions embens builtins functools inspect itertools "
    "operator collections abc dataclasses enum copy contextlib warnings logging types string "
    "textwrap einops jaxtyping beartype numbers re random __future__".split()
)
"""Packages whose functions depend only on their arguments, or on state watched elsewhere."""


_BLIND_FUNCTIONS = frozenset("globals locals vars eval exec open input compile __import__".split())
"""Builtins that read values which the code does not name."""


_TYPE_QUERIES = (isinstance, callable, type, torch.is_tensor)
"""Functions that a trace replaces by name (:mod:`embens.graph.misreadings`)."""


_TYPE_ATTRIBUTES = frozenset(
    "__class__ __instancecheck__ isinstance singledispatch singledispatchmethod "
    "tree_map_only tree_map_only_ tree_all_only tree_any_only map_only".split()
)
"""Attributes and functions that show that a traced value is not a tensor."""


_SEED_QUERIES = frozenset(
    "initial_seed get_rng_state default_rng RandomState SeedSequence Random SystemRandom".split()
)
"""Functions that read or make a random generator; a trace would keep their result."""


_ANY_NAME = frozenset("__dict__ __getattribute__ attrgetter getattr_static".split())
"""Attributes and functions that read attributes by names computed at run time."""


_UNCALLED = frozenset(
    "__init__ __new__ __repr__ __str__ __copy__ __deepcopy__ __reduce__ __reduce_ex__ __getstate__ "
    "__setstate__ __del__ __init_subclass__ __class_getitem__ __dict__ __weakref__ __doc__ "
    "__module__ __annotations__ __slotnames__ __abstractmethods__ _abc_impl".split()
)
"""Entries of classes that a forward does not call implicitly."""


_STATELESS_BUILTINS = (
    *(object, property, type(NotImplemented), GetSetDescriptorType, MemberDescriptorType),
    *(WrapperDescriptorType, MethodWrapperType, MethodDescriptorType, ClassMethodDescriptorType),
)
"""Builtin types without attributes whose objects do not change; others may be views of a value."""


_METHODS_IN_C = (type(list.append), type(list.__add__), type([].__add__), type(torch.Tensor.shape))
"""Types of methods and attributes that are implemented in C."""


_FIXED = (
    *(Tensor, torch.fx.Proxy, torch.Generator, torch.memory_format, torch.layout),
    *(ModuleType, slice, range, type(Ellipsis), type(threading.Lock()), GenericAlias, UnionType),
    *_METHODS_IN_C,
)
"""Types that are compared by identity. Values of tensors are inputs of a graph, or refused."""


_MISSING = object()


class Unwatchable(Exception):
    """Code depends on something whose changes cannot be seen; the message names it."""


def torch_state() -> tuple[Any, ...]:
    """Return global settings of torch that code may read."""
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_anomaly_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_num_threads(),
        is_distributed,
    )


class Guard:
    """Remembers the Python values that the code of a network may read.

    Attributes of the network's modules are not included
    (:class:`embens.graph.folding.ModuleState`), but the objects that these attributes hold are.

    Args:
        root: The network.
        strict: Whether code that may read values whose changes cannot be seen is an error.
            Otherwise such values are not watched, and neither is the code of installed packages.

    Raises:
        Unwatchable: If the code may read values whose changes cannot be seen.
    """

    def __init__(self, root: nn.Module, *, strict: bool = True):
        self.root = root
        self.strict = strict
        self.names = {"forward"}  # names that occur in the code, as variables or as attributes
        self.loaded: set[str] = set()  # those that the code reads, not only assigns
        self.reads_any_name = False  # whether it reads attributes by names computed at run time
        self.compares_identity = False  # whether it compares objects with ``is``
        self.namespaces: dict[int, dict[str, Any]] = {}  # globals of the functions of the code
        # A walk follows the names that are known, and finds more; repeat until nothing is new.
        while True:
            size = len(self.names), self.reads_any_name
            self._walk()
            if (len(self.names), self.reads_any_name) == size:
                break
        self.torch_state = torch_state()

    def change(self) -> str:
        """Return a name of something that has changed; "" if nothing has."""
        for namespace, name, value in self.variables:
            if not _is_same(namespace.get(name, _MISSING), value):
                return name
        for owner, name, value in self.attributes:
            if not _is_same(getattr(owner, name, _MISSING), value):
                return f"{getattr(owner, '__name__', type(owner).__name__)}.{name}"
        for container, items in self.contents:
            if not _is_same_content(container, items):
                return f"a {type(container).__name__}"
        for generator, state in self.generators:
            if generator_state(generator) != state:
                return "the state of a random generator"
        for logger, level in self.loggers:
            if logger.getEffectiveLevel() != level:
                return f"the level of the logger {logger.name!r}"
        if torch_state() != self.torch_state:
            return "a setting of torch"
        return ""

    def holds(self) -> bool:
        """Return whether nothing has changed."""
        return not self.change()

    def refuse_reading(self, attributes: Iterable[str]) -> None:
        """Raise Unwatchable if the code may read one of some attributes of modules."""
        for name in attributes:
            if self.reads_any_name or name in self.loaded:
                raise Unwatchable(f"its code has changed {name!r}, so members differ in it")

    # Finding what the code may read

    def _walk(self) -> None:
        """Visit everything that code with the known names can reach."""
        self.variables: list[tuple[Any, str, Any]] = []  # namespaces, names in them, and values
        self.attributes: list[tuple[Any, str, Any]] = []  # objects, names and values
        self.contents: list[tuple[Any, Any]] = []  # containers and copies of their contents
        self.generators: list[tuple[Any, Any]] = []  # random generators and their states
        self.loggers: list[tuple[logging.Logger, int]] = []  # loggers and their levels
        self.visited: dict[int, Any] = {}  # objects are kept alive, so that no id is used twice
        self.queue: deque[Any] = deque()
        modules = list(self.root.modules())
        for module in modules:
            self.visited[id(module)] = module
        for module in modules:
            for name, value in vars(module).items():
                if name not in STANDARD_ATTRIBUTES and self._is_read(name):
                    self._push(value)
            self._push(type(module))
        while self.queue:
            self._visit(self.queue.popleft())

    def _refuse(self, reason: str) -> None:
        if self.strict:
            raise Unwatchable(reason)

    def _is_read(self, name: Any) -> bool:
        return self.reads_any_name or name in self.names

    def _push(self, value: Any) -> None:
        if isinstance(value, PLAIN) or id(value) in self.visited:
            return
        if len(self.visited) > MOST_OBJECTS:
            self._refuse(f"its code reaches more than {MOST_OBJECTS} objects")
            return
        self.visited[id(value)] = value
        self.queue.append(value)

    def _visit(self, value: Any) -> None:
        if isinstance(value, _FIXED):
            return
        state = generator_state(value)
        if state is not None:
            self.generators.append((value, state))
            return
        if isinstance(value, logging.Logger):
            self.loggers.append((value, value.getEffectiveLevel()))
            return
        if any(value is query for query in _TYPE_QUERIES):
            self._refuse(f"its code calls {value.__name__!r} by another name")
        if str(getattr(value, "__name__", "")) in _SEED_QUERIES:
            self._refuse(f"its code calls {value.__name__!r}")
        if isinstance(value, functools.singledispatchmethod):
            self._refuse("its code chooses methods by the types of values")
        if isinstance(value, FunctionType) and value.__name__ in _TYPE_ATTRIBUTES:
            self._refuse(f"its code calls {value.__name__!r}")
        if isinstance(value, FunctionType):
            self._visit_function(value)
        elif isinstance(value, BuiltinFunctionType):
            self._visit_builtin(value)
        elif isinstance(value, MethodType):
            self._push(value.__func__)
            self._push(value.__self__)
        elif isinstance(value, type):
            self._visit_class(value)
        else:
            self._visit_object(value)

    def _visit_builtin(self, function: BuiltinFunctionType) -> None:
        """Visit the object that a C method is bound to, or check a builtin function."""
        if self._is_foreign(function.__module__ or "builtins"):
            return
        if function.__self__ is builtins:
            self._note_builtin(function.__name__)
        else:
            self._push(function.__self__)

    def _note_builtin(self, name: str) -> None:
        if name in _BLIND_FUNCTIONS:
            self._refuse(f"its code calls {name!r}")
        if name == "getattr":
            self.reads_any_name = True

    def _visit_object(self, value: Any) -> None:
        """Watch the contents and the attributes of an object, and visit its class."""
        is_container = isinstance(value, (list, tuple, set, frozenset, deque, dict))
        if is_container:
            items: Any = dict(value) if isinstance(value, dict) else list(value)
            self.contents.append((value, items))
            for item in (*items, *items.values()) if isinstance(value, dict) else items:
                self._push(item)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self._push(part)
        attributes = dict(attributes_of(value))
        if "__wrapped__" in attributes:  # of functools.lru_cache
            self._push(attributes["__wrapped__"])
        for name in self.names - attributes.keys():
            if hasattr(value, "__dict__"):
                self.variables.append((vars(value), name, _MISSING))
        is_wrapper = any(cls.__module__ == "collections" for cls in type(value).__mro__)
        for name, item in attributes.items():
            # Methods of UserDict, ChainMap, … read attributes that the user's code does not name.
            if is_wrapper or self._is_read(name):
                self.attributes.append((value, name, item))
                self._push(item)
        if has_hidden_state(value):
            self._refuse(f"its code may read an object of type {type(value).__name__!r}")
        is_known = is_container or hasattr(value, "__dict__") or attributes
        package = str(type(value).__module__).partition(".")[0]
        is_known = is_known or (package in _LIBRARIES and package != "builtins")
        if not is_known and type(value) not in _STATELESS_BUILTINS:
            self._refuse(f"its code may read an object of type {type(value).__name__!r}")
        self._push(type(value))

    def _visit_class(self, cls: type) -> None:
        """Watch what the code may read of a class, and visit its methods."""
        if type(cls) is not type:
            self._push(type(cls))  # properties of a metaclass are read from the class
        for parent in cls.__mro__:
            package = str(parent.__module__).partition(".")[0]
            if package in _LIBRARIES:
                continue
            if package != "types" and self._is_foreign(package):
                continue
            entries = vars(parent)
            for name in self.names - entries.keys():
                self.variables.append((entries, name, _MISSING))
            for name, value in entries.items():
                is_implicit = name.startswith("__") and name not in _UNCALLED
                if is_implicit or (self._is_read(name) and name not in _UNCALLED):
                    self.variables.append((entries, name, value))
                    self._push(_function_of(value))

    def _visit_function(self, function: FunctionType) -> None:
        """Watch the variables of a function, and visit what they hold."""
        package = (function.__module__ or "").partition(".")[0]
        if package in _LIBRARIES or self._is_foreign(package):
            return
        self.namespaces[id(function.__globals__)] = function.__globals__
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            value = getattr(function, name)
            self.attributes.append((function, name, value))
            if name != "__code__":
                self._push(value)
        self._push(vars(function))
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # the variable has no value yet
                continue
            self.attributes.append((cell, "cell_contents", value))
            self._push(value)
        for code in _nested_codes(function.__code__):
            self._visit_code(code, function.__globals__)

    def _visit_code(self, code: CodeType, namespace: dict[str, Any]) -> None:
        self.names.update(code.co_names)
        self.names.update(constant for constant in code.co_consts if isinstance(constant, str))
        self.loaded.update(constant for constant in code.co_consts if isinstance(constant, str))
        for instruction in dis.get_instructions(code):
            if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
                self._note_attribute(instruction.argval)
            if instruction.opname == "IS_OP":  # ``if x is None`` has a different opcode
                self.compares_identity = True
            if instruction.opname == "MATCH_CLASS":
                self._refuse("its code matches the types of values")
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                self._visit_variable(namespace, instruction.argval, code.co_names)
            elif instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                self._refuse(f"its code changes the global variable {instruction.argval!r}")
                self._visit_variable(namespace, instruction.argval, code.co_names)
            elif instruction.opname == "IMPORT_NAME":
                self._visit_package(sys.modules.get(instruction.argval), code.co_names)

    def _note_attribute(self, name: str) -> None:
        if name in _TYPE_ATTRIBUTES:
            self._refuse(f"its code reads {name!r}")
        if name in _SEED_QUERIES:
            self._refuse(f"its code calls {name!r}")
        self.loaded.add(name)
        self.compares_identity = self.compares_identity or name in ("is_", "is_not")
        self.reads_any_name = self.reads_any_name or name in _ANY_NAME

    def _visit_variable(
        self, namespace: dict[str, Any], name: str, attributes: Iterable[str]
    ) -> None:
        """Watch a variable of a module, and visit its value."""
        value = namespace.get(name, _MISSING)
        self.variables.append((namespace, name, value))
        if value is _MISSING:
            self._note_builtin(name)
        elif isinstance(value, ModuleType):
            self._visit_package(value, attributes)
        else:
            self._push(value)

    def _is_foreign(self, name: str) -> bool:
        """Return whether the code of a package is not watched.

        Modules of the standard library may depend on time or files; a strict guard refuses them.
        Other installed packages are large; only a strict guard watches them.
        """
        root = name.partition(".")[0]
        if root in _LIBRARIES or root == "__main__":
            return False
        if root in sys.stdlib_module_names:
            self._refuse(f"its code uses the module {root!r}")
            return True
        return not self.strict and _is_installed(root)

    def _visit_package(self, package: ModuleType | None, attributes: Iterable[str]) -> None:
        """Watch the variables of a Python module that have one of some names."""
        if package is builtins:
            self._refuse("its code uses the module 'builtins'")
        if package is None or package.__name__.partition(".")[0] in _LIBRARIES:
            return
        if self._is_foreign(package.__name__):
            return
        attributes = tuple(attributes)
        key = id(package) ^ hash(attributes)  # a module is visited once for each set of names
        if key not in self.visited:
            self.visited[key] = package
            for name in attributes:
                if name in vars(package):
                    self._visit_variable(vars(package), name, attributes)


def _is_installed(package: str) -> bool:
    path = getattr(sys.modules.get(package), "__file__", None) or ""
    return "site-packages" in path or "dist-packages" in path


def _function_of(value: Any) -> Any:
    """Return the function behind a property, a class method or a cached property."""
    if isinstance(value, functools.singledispatchmethod):
        return value
    for attribute in ("fget", "__func__", "func"):
        function = getattr(value, attribute, None)
        if isinstance(function, FunctionType):
            return function
    return value


def _nested_codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those of the functions and comprehensions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested_codes(constant)


def _is_same(value: Any, before: Any) -> bool:
    """Return whether a value is the same object as before, or an equal plain value."""
    if value is before:
        return True
    is_plain = isinstance(value, PLAIN) and type(value) is type(before)
    return is_plain and value == before


def _is_same_content(container: Any, items: Any) -> bool:
    if len(container) != len(items):
        return False
    if isinstance(items, dict):
        same_keys = all(_is_same(*keys) for keys in zip(container, items, strict=True))
        container, items = container.values(), items.values()
        if not same_keys:
            return False
    return all(_is_same(*pair) for pair in zip(container, items, strict=True))
