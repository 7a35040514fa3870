"""The parts of a saved estimator, read field by field.

A file may be damaged or forged even if its checksum is valid. So the type and the range of every
field, and its agreement with the other fields, are checked before it is used.
"""

import typing
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np
import torch

from embens.ensemble.header import MAX_MEMBERS, check_unique, read_law
from embens.fields import Fields, is_typed
from embens.tabular.bins import NumericColumn
from embens.tabular.columns import FOLDS, CategoricalColumn, Preprocessing
from embens.tabular.defaults import CHOICES, Sizes, check_arguments
from embens.tabular.targets import Head
from embens.training import History

T = TypeVar("T")

MAX_WIDTH = 2**20
LABEL_KINDS = "biufUO"  # numpy's kinds of booleans, integers, floats, strings and objects
HEAD_CHOICES = {
    "loss": CHOICES["loss"],
    "stopping": ("nll", "crps", "rmse"),
    "transform": ("none", "log", "quantile"),
}


def read_dataclass(kind: type[T], values: Fields) -> T:
    """Return an object of a dataclass from fields of the annotated types.

    Args:
        kind: The dataclass.
        values: All of its fields, and no others.

    Raises:
        embens.files.Refused: if a field is missing, unknown, NaN or of another type.
    """
    hints = typing.get_type_hints(kind)
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    values = Fields(values.values, values.place, names)
    return kind(**{name: values.typed(name, hints[name]) for name in names})


def read_arguments(kind: type, values: Fields) -> Any:
    """Return an estimator with the arguments of a file.

    Args:
        kind: The class of the estimator.
        values: Its arguments.

    Raises:
        embens.files.Refused: if an argument is missing, unknown or out of range.
    """
    values = Fields(values.values, values.place, kind().get_params(deep=False))
    arguments = dict(values.values)
    values.typed("random_state", int | bool | None)
    values.typed("verbose", int | bool)
    if arguments["law"] is not None:
        arguments["law"] = read_law(arguments["law"], f"{values.place}.law")
    estimator = kind(**arguments)
    try:
        check_arguments(estimator)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{values.place}: {error}") from None
    return estimator


def read_sizes(values: Fields) -> Sizes:
    """Return the chosen values of the arguments."""
    sizes = read_dataclass(Sizes, values)
    values.whole("members", most=MAX_MEMBERS)
    values.whole("width", most=MAX_WIDTH)
    for name in ("batch_size", "epochs", "patience"):
        values.whole(name)
    values.number("p", -1, 1)
    values.number("dropout", 0, 0.99)
    values.number("weight_decay", low=0)
    values.number("lr", low=0)
    return sizes


def read_columns(values: Fields) -> Preprocessing:
    """Return the encoding of the columns."""
    values = Fields(values.values, values.place, [field.name for field in fields(Preprocessing)])
    names = values.texts("names")
    numeric = []
    for column in values.each("numeric", [field.name for field in fields(NumericColumn)]):
        numeric.append(_read_numeric(column, len(names)))
    categorical = []
    for column in values.each("categorical", [field.name for field in fields(CategoricalColumn)]):
        categorical.append(_read_categorical(column, len(names)))
    return Preprocessing(names, numeric, categorical, values.texts("notes"))


def _read_numeric(values: Fields, count: int) -> NumericColumn:
    values.whole("position", least=0, most=count - 1)
    values.number("centre")
    if values.number("scale", low=0) == 0:
        raise values.fail("scale", "a number above 0")
    edges = values.tensor("edges", dims=1)
    scores = values.tensor("scores", dims=1)
    if len(edges) != len(scores) or edges.dtype != torch.float32 or scores.dtype != torch.float32:
        raise values.fail("scores", f"a tensor of float32 with {len(edges)} values, as the edges")
    if bool((edges.diff() <= 0).any()):
        raise values.fail("edges", "increasing")
    return read_dataclass(NumericColumn, values)


def _read_categorical(values: Fields, count: int) -> CategoricalColumn:
    values.whole("position", least=0, most=count - 1)
    check_unique(f"{values.place}.categories", values.texts("categories"))
    labels = values.texts("labels")
    check_unique(f"{values.place}.labels", labels)
    statistics = values.tensor("statistics", dims=3)
    rows = 0  # a column without target statistics
    if labels:
        rows = len(labels) + 2  # unseen and missing labels
    if tuple(statistics.shape[:2]) != (1 + FOLDS, rows) or (statistics.shape[2] > 0) != (rows > 0):
        raise values.fail("statistics", f"a tensor of shape ({1 + FOLDS}, {rows}, …)")
    return read_dataclass(CategoricalColumn, values)


def read_head(kind: type[Head], values: Fields) -> Any:
    """Return the head of an estimator.

    Args:
        kind: The class of the head.
        values: Its fields.
    """
    hints = typing.get_type_hints(kind)
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    values = Fields(values.values, values.place, names)
    arguments = {}
    for name in names:
        if name == "labels":
            arguments[name] = _read_labels(values)
        else:
            arguments[name] = values.typed(name, hints[name])
    for name, choices in HEAD_CHOICES.items():
        if name in arguments:
            values.text(name, choices)
    if "labels" in arguments:
        count = len(arguments["labels"])
    else:
        count = values.whole("targets")
    for name in ("temperature", "std"):
        if name in arguments and not bool((torch.as_tensor(arguments[name]) > 0).all()):
            raise values.fail(name, "above 0")
    for name, value in arguments.items():
        is_tensor = isinstance(value, torch.Tensor) and value.dim() > 0
        if is_tensor and value.shape[-1] not in (1, count):
            raise values.fail(name, f"a tensor with {count} columns")
    return kind(**arguments)


def _read_labels(values: Fields) -> tuple[np.ndarray, ...]:
    """Return the classes of each label; their types are checked before memory is allocated."""
    labels = []
    for pair in values.items("labels"):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not is_typed(pair[0], str):
            raise values.fail("labels", "a list of pairs of a type and classes")
        try:
            dtype = np.dtype(pair[0])
            longest = max([1, *(len(str(value)) for value in pair[1])])
            if dtype.kind not in LABEL_KINDS or dtype.itemsize > max(16, 4 * longest):
                raise values.fail("labels", "classes of a plain type")
            array = np.array(pair[1], dtype=dtype)
        except (TypeError, OverflowError):
            raise values.fail("labels", "classes of a plain type") from None
        if array.tolist() != list(pair[1]):  # a type that holds the start of a text, for example
            raise values.fail("labels", "classes of their type")
        if array.ndim != 1 or not len(array) or not np.array_equal(np.unique(array), array):
            raise values.fail("labels", "sorted and unique classes")
        labels.append(array)
    if not labels:
        raise values.fail("labels", "the classes of at least one label")
    return tuple(labels)


def read_history(values: Fields) -> History:
    """Return the history of training."""
    names = [field.name for field in fields(History)]
    values = Fields(values.values, values.place, names)
    for name in ("members", "epochs"):
        for row in values.items(name):
            if not isinstance(row, dict) or not all(isinstance(key, str) for key in row):
                raise values.fail(name, "a list of rows")
    if values.get("best_epoch") is not None:
        values.whole("best_epoch", most=max(1, len(values.items("epochs"))))
    values.text("stopped")
    return History(**values.values)


def read_held_out(values: Fields, members: int) -> dict[str, Any] | None:
    """Return the losses on the held-out rows, if there were any.

    Args:
        values: The fields of the estimator.
        members: Number of members.
    """
    if values.get("held_out") is None:
        return None
    names = ["ensemble", "members", "constant"]
    losses = values.fields("held_out", names, optional=["all_members"])
    for name in losses.values:
        if name != "members":
            losses.typed(name, float)
    losses.typed("members", list[float])
    if len(losses.items("members")) != members:
        raise losses.fail("members", f"a list of {members} losses")
    return losses.values
