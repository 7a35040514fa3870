"""Every public name has a docstring with its arguments and an example that runs as a doctest."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from enum import Enum
from typing import Any

ROOMS = ("", ".finite", ".laws", ".metrics", ".networks", ".tabular", ".theory", ".training")
RETURNED = ("embens.conformal", "embens.differences", "embens.uncertainty")
"""Modules whose classes public functions return."""

CALLED_BY_FIT = {
    "embens.training.Checkpoint.load_last",
    "embens.training.Checkpoint.save",
    "embens.training.Run.begin_epoch",
    "embens.training.Run.check_objectives",
    "embens.training.Run.check_weights",
    "embens.training.Run.divergence",
    "embens.training.Run.has_finite_weights",
    "embens.training.Run.load_state_dict",
    "embens.training.Run.notify",
    "embens.training.Run.state_dict",
    "embens.training.Run.update_best",
}
"""Methods of callbacks that users do not call, without an example."""

CALLED_BY_EXECUTORS = {
    "embens.EmbeddedEnsemble.changed_attributes",
    "embens.EmbeddedEnsemble.chunks",
    "embens.EmbeddedEnsemble.refresh_layers",
    "embens.EmbeddedEnsemble.run",
    "embens.EmbeddedEnsemble.sample_values",
}
"""Methods of ensembles that users do not call, without an example."""


def public_objects() -> dict[str, Any]:
    """Return the public classes and functions by their names."""
    objects: dict[str, Any] = {}
    rooms = [importlib.import_module(f"embens{room}") for room in ROOMS]
    for room in rooms:
        names = getattr(room, "__all__", None)
        for name in names or [name for name in vars(room) if not name.startswith("_")]:
            value = getattr(room, name)
            is_defined_here = names or getattr(value, "__module__", "") == room.__name__
            if is_defined_here and (inspect.isclass(value) or inspect.isroutine(value)):
                objects.setdefault(f"{room.__name__}.{name}", value)
    for name in RETURNED:
        for value in vars(importlib.import_module(name)).values():
            if inspect.isclass(value) and value.__module__ == name and value.__name__[0] != "_":
                objects[f"{name}.{value.__name__}"] = value
    return objects


def methods(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties that a class defines and does not inherit."""
    for name, value in vars(cls).items():
        if name.startswith("_") or any(hasattr(base, name) for base in cls.__mro__[1:]):
            continue
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if inspect.isfunction(value) or isinstance(value, (property, functools.cached_property)):
            yield name, value


OBJECTS = public_objects()
CLASSES = {name: value for name, value in OBJECTS.items() if inspect.isclass(value)}
CALLABLES = dict(OBJECTS)
for _class_name, _cls in CLASSES.items():
    CALLABLES |= {f"{_class_name}.{name}": value for name, value in methods(_cls)}
METHODS = [name for name in CALLABLES if name not in OBJECTS and callable(CALLABLES[name])]


def code_of_examples(docstring: str) -> str:
    lines = [line.strip() for line in docstring.splitlines()]
    return "\n".join(line for line in lines if line.startswith((">>>", "...")))


def parameters_of(value: Any) -> list[str]:
    """Return the names of the arguments of a function, or of a class that defines some."""
    if inspect.isclass(value) and issubclass(value, Enum):
        return []
    if inspect.isclass(value) and not inspect.isfunction(value.__init__):
        return []
    if inspect.isclass(value) and not value.__init__.__module__.startswith("embens"):
        return []
    return [name for name in inspect.signature(value).parameters if name not in ("self", "cls")]


def test_public_names_have_docstrings():
    missing = [name for name, value in CALLABLES.items() if not inspect.getdoc(value)]
    assert missing == []


def test_public_classes_and_functions_have_an_example():
    missing = [name for name, value in OBJECTS.items() if ">>>" not in inspect.getdoc(value)]
    assert missing == []


def test_public_methods_have_an_example_or_are_called_in_that_of_their_class():
    missing = set()
    for name in METHODS:
        class_name, _, method = name.rpartition(".")
        examples = code_of_examples(inspect.getdoc(OBJECTS[class_name]))
        has_example = ">>>" in inspect.getdoc(CALLABLES[name])
        if not has_example and not re.search(rf"\b{method}\(", examples):
            missing.add(name)

    internal = CALLED_BY_FIT | CALLED_BY_EXECUTORS
    assert missing - internal == set()
    assert internal - missing == set(), "take these out of the sets above"


def test_arguments_of_public_names_are_documented():
    missing = []
    for name, value in CALLABLES.items():
        if not callable(value) or not parameters_of(value):
            continue
        section = r"^(Args|Attributes):" if inspect.isclass(value) else r"^Args:"
        if not re.search(section, inspect.getdoc(value), re.MULTILINE):
            missing.append(name)

    assert missing == []


def test_results_of_public_functions_are_documented():
    missing = []
    for name, value in CALLABLES.items():
        if inspect.isclass(value) or not callable(value):
            continue  # the first sentence about a property is about its value
        result = inspect.signature(value).return_annotation
        has_result = result not in (None, "None", inspect.Signature.empty)
        section = r"^(Returns|Yields):"
        if has_result and not re.search(section, inspect.getdoc(value), re.MULTILINE):
            missing.append(name)

    assert missing == []
