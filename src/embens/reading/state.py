"""What the code of a reference keeps from one call to the next.

Read off the source of every ``forward`` and of the methods that it calls: the attributes that they
assign, and those whose contents they change in place.
"""

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from embens.reading.samples import is_in_place

_CHANGING = frozenset(
    "append appendleft extend insert add update setdefault pop popleft popitem remove discard "
    "clear sort reverse".split()
)
_STATISTICS = ("running_mean", "running_var")

Place = tuple[str, str]
"""The name of a module, and that of one of its attributes."""
Use = tuple[tuple[str, ...], str]
"""A path of attributes from a module, and "read", "written", "passed" or "named" (by a string)."""


@dataclass
class State:
    """The buffers that the code changes, other attributes that it changes and reads, the rest."""

    buffers: set[Place] = field(default_factory=set)
    kept: set[Place] = field(default_factory=set)
    left: set[Place] = field(default_factory=set)


def find_state(reference: nn.Module) -> State:
    """Return the attributes that the code of the user's modules changes."""
    names = {id(m): n for n, m in reversed(list(reference.named_modules()))}
    changed: set[Place] = set()
    read: set[Place] = set()
    state, methods = State(), [(name, "forward") for name in names.values()]
    met = set(methods)
    for owner, method in methods:  # which grows on the way
        start = reference.get_submodule(owner)
        for path, use in _uses(type(start), method):
            holder, (attribute, *rest) = start, path
            while rest and (inner := holder._modules.get(attribute)) is not None:
                holder, (attribute, *rest) = inner, rest
            place = (names[id(holder)], attribute)
            if use == "read" and not rest and place not in met:
                methods.append(place)
                met.add(place)
            buffer = holder._buffers.get(attribute)
            value = holder.__dict__.get(attribute) if buffer is None else buffer
            passed = use == "passed" and buffer is not None
            written = use == "written" or (use == "named" and not rest)
            is_changed = written or passed or (rest and _changes(value, rest))
            (changed if is_changed else read).add(place)
    for name, attribute in changed:
        holder = reference.get_submodule(name)
        if holder._buffers.get(attribute) is not None:
            state.buffers.add((name, attribute))
        elif attribute not in {*holder._modules, *vars(nn.Module())}:
            kept = (name, attribute) in read and attribute not in holder._parameters
            (state.kept if kept else state.left).add((name, attribute))
    return state


def _changes(value: Any, path: list[str]) -> bool:
    """Return whether the method at the end of a path changes what it is called on."""
    if is_in_place(path[-1]):
        return path[-1] not in ("requires_grad_", "detach_", "record_stream")
    if isinstance(value, (Tensor, nn.Module)):
        return False
    return path[-1] in _CHANGING or any(u == "written" for _, u in _uses(type(value), path[0]))


@functools.lru_cache(maxsize=1024)
def _uses(cls: type, method: str) -> frozenset[Use]:
    """Return what a method of the user's, or those that it overrides, does with attributes."""
    functions = [f for c in cls.__mro__ if isinstance(f := vars(c).get(method), FunctionType)]
    own = [f for f in functions if str(f.__module__).partition(".")[0] not in ("torch", "embens")]
    return frozenset(use for function in own for use in _read(inspect.unwrap(function)))


def _read(function: Any) -> Iterator[Use]:
    try:
        nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))))
        known: dict[str, tuple[str, ...]] = {inspect.getfullargspec(function).args[0]: ()}
    except (OSError, TypeError, SyntaxError, IndexError):
        return  # code without a source

    def path_of(node: Any) -> tuple[str, ...] | None:
        if isinstance(node, ast.Name):
            return known.get(node.id)
        if not isinstance(node, (ast.Attribute, ast.Subscript)):
            return None
        path = path_of(node.value)
        return path if path is None or isinstance(node, ast.Subscript) else (*path, node.attr)

    for node in nodes:  # other names for what attributes hold
        if isinstance(node, ast.Assign) and isinstance(name := node.targets[0], ast.Name):
            known |= {name.id: path} if (path := path_of(node.value)) else {}
    inner = {id(n.value) for n in nodes if isinstance(n, (ast.Attribute, ast.Subscript))}
    assigned = [
        (n.targets, getattr(n.value, "value", None)) for n in nodes if isinstance(n, ast.Assign)
    ]
    named = {id(t) for targets, value in assigned if isinstance(value, str) for t in targets}
    for node in nodes:
        if isinstance(node, (ast.Attribute, ast.Subscript)) and id(node) not in inner:
            if path := path_of(node):
                written = "named" if id(node) in named else "written"
                yield path, "read" if isinstance(node.ctx, ast.Load) else written
        elif isinstance(node, ast.Call):
            called = function.__globals__.get(getattr(node.func, "id", ""))
            words = getattr(getattr(called, "__code__", None), "co_names", ())
            passed = [k.value for k in node.keywords if k.arg in ("out", *_STATISTICS)]
            if ast.unparse(node.func).endswith(("batch_norm", "instance_norm")):
                passed += node.args[1:3]
            elif any(map(is_in_place, words)):
                passed += node.args
            yield from ((path, "passed") for n in passed if (path := path_of(n)))
