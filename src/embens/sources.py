"""Batches of inputs and targets, in order, from tensors, arrays, data sets and loaders.

Inputs are a tensor, a tuple of tensors (several inputs), or a dict of tensors by the argument names
of the network. Items of a data set and batches of a loader are ``(inputs, target)`` as for
:func:`embens.fit`: ``(x, z, target)`` means ``((x, z), target)``, and a dict may contain the target
under "labels". Arrays of numpy and tables of pandas are converted to tensors.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from embens.checks import check_rows

INPUTS = "a tensor (batch, …), a tuple or dict of tensors, a data set or a loader"
LABELLED = "tensors (inputs, target), a data set or a loader of such pairs"


def input_batches(
    x: Any,
    batch_size: int,
    dtype: torch.dtype | None = None,
    counts: tuple[int, float] | None = None,
) -> Iterator[Any]:
    """Yield batches of inputs; targets and weights in data sets and loaders are dropped.

    Args:
        x: Inputs, a data set or a loader. The last element of a data set's items is the target,
            unless it is the only one.
        batch_size: Rows per batch; a loader has a fixed one.
        dtype: Type of the tensors made from floating arrays; None: the type of the array.
        counts: Least and largest number of inputs of the network, for :func:`has_weights`.

    Yields:
        A tensor, or a tuple or dict of tensors.

    Raises:
        TypeError: If ``x`` is none of these.
        ValueError: If a tuple has more or fewer inputs than the network takes.

    Example:
        >>> [len(batch) for batch in input_batches(torch.zeros(5, 2), batch_size=2)]
        [2, 2, 1]
    """
    if isinstance(x, Mapping):
        x = dict(x)
    x = as_tensors(x, dtype)
    if isinstance(x, (Tensor, tuple, dict)):
        check_inputs("x", x, counts, "Pass inputs without targets.")
        yield from _slices("x", x, INPUTS, batch_size)
        return
    for batch in _loader("x", x, INPUTS, batch_size):
        yield _drop_target(_drop_weights(as_tensors(batch, dtype), counts))


def labelled_batches(
    data: Any,
    batch_size: int,
    dtype: torch.dtype | None = None,
    counts: tuple[int, float] | None = None,
) -> Iterator[tuple[Any, Any]]:
    """Yield batches of inputs and targets; sample weights are dropped.

    Args:
        data: Tensors ``(inputs, target)``, a data set or a loader.
        batch_size: Rows per batch; a loader has a fixed one.
        dtype: Type of the tensors made from floating arrays; None: the type of the array.
        counts: Least and largest number of inputs of the network, for :func:`has_weights`.

    Yields:
        The inputs (a tensor, or a tuple or dict of tensors) and the target.

    Raises:
        TypeError: If ``data`` is none of these, or contains no targets.

    Example:
        >>> data = torch.zeros(5, 2), torch.zeros(5)
        >>> [(len(x), len(y)) for x, y in labelled_batches(data, batch_size=3)]
        [(3, 3), (2, 2)]
    """
    if isinstance(data, TensorDataset):
        data = data.tensors
    data = as_tensors(data, dtype)
    if isinstance(data, (tuple, list, Mapping)) and not is_list_of_dicts(data):
        inputs, target = split_target(_drop_weights(data, counts))
        check_inputs("data", inputs, counts)
        yield from _slices("data", (inputs, target), LABELLED, batch_size)
        return
    for batch in _loader("data", data, LABELLED, batch_size):
        yield split_target(_drop_weights(as_tensors(batch, dtype), counts))


def split_target(values: Any) -> tuple[Any, Any]:
    """Split ``(inputs, target)``, ``(x, z, target)`` or a dict with "labels".

    Args:
        values: A tuple or list that ends with the target, or a dict.

    Returns:
        The inputs (a tensor, or a tuple or dict of tensors) and the target.

    Raises:
        TypeError: If there is no target.

    Example:
        >>> split_target(("x", "z", "target"))
        (('x', 'z'), 'target')
    """
    if isinstance(values, Mapping) and "labels" in values:
        inputs = {name: value for name, value in values.items() if name != "labels"}
        return inputs, values["labels"]
    if not isinstance(values, (tuple, list)) or len(values) < 2:
        raise TypeError(
            f"data must be {LABELLED}, or dicts with 'labels', got {type(values).__name__} "
            "without a target."
        )
    inputs = tuple(values[:-1])
    if len(inputs) == 1:
        inputs = inputs[0]
    if isinstance(inputs, list):
        inputs = tuple(inputs)
    return inputs, values[-1]


def count_inputs(function: Callable[..., Any]) -> tuple[int, float]:
    """Return the least and the largest number of positional arguments of a function.

    Args:
        function: A function, such as the forward of a network.

    Example:
        >>> count_inputs(lambda x, z, mask=None: x)
        (2, 3)
    """
    least, most = 0, 0
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            return least, math.inf
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            most += 1
            if parameter.default is parameter.empty:
                least += 1
    return least, most


def check_inputs(
    name: str,
    inputs: Any,
    counts: tuple[int, float] | None,
    hint: str = "Data are (inputs, targets); for a list of batches pass a DataLoader.",
) -> None:
    """Raise ValueError if there are more or fewer inputs than the network takes.

    Args:
        name: Of the data, for the error message.
        inputs: A tuple of inputs; anything else is not checked.
        counts: Least and largest number of inputs of the network; None: unknown.
        hint: The last sentence of the error message.

    Example:
        >>> check_inputs("train", ("x", "z"), (1, 1))
        Traceback (most recent call last):
        ValueError: train: the network takes 1 input, got 2. Data are (inputs, targets); for ...
    """
    if counts is None or not isinstance(inputs, tuple):
        return
    least, most = counts
    if least <= len(inputs) <= most:
        return
    expected = f"{least}" if least == most else f"{least} to {most}"
    noun = "input" if expected == "1" else "inputs"
    raise ValueError(f"{name}: the network takes {expected} {noun}, got {len(inputs)}. {hint}")


def has_weights(values: Any, counts: tuple[int, float] | None) -> bool:
    """Return whether a batch ends with sample weights, after its target.

    ``((x, z), y, w)`` always does. ``(a, b, c)`` does if the network takes one input, so that it
    must be ``(x, y, w)``, and does not if it takes two, as in ``(x, z, y)``.

    Args:
        values: A batch, or all data.
        counts: Least and largest number of inputs of the network; None: there are no weights.

    Raises:
        TypeError: If both are possible and the last element may be weights.

    Example:
        >>> x, y, w = torch.zeros(5, 2), torch.zeros(5), torch.ones(5)
        >>> has_weights((x, y, w), (1, 1)), has_weights((x, y, w), (2, 2))
        (True, False)
    """
    if counts is None or not isinstance(values, (tuple, list)) or len(values) < 3:
        return False
    if isinstance(values[0], (tuple, list, Mapping)):
        return len(values) == 3
    least, most = counts
    inputs = len(values) - 1
    can_be_inputs = least <= inputs <= most
    can_be_weights = least <= inputs - 1 <= most
    is_floating = isinstance(values[-1], Tensor) and values[-1].is_floating_point()
    if can_be_inputs and can_be_weights and is_floating:
        raise TypeError(
            f"data of {len(values)} tensors are ambiguous, because the network takes {inputs - 1} "
            f"or {inputs} inputs. Write ((x, z), y) for several inputs, or ((x,), y, w) for sample "
            "weights w."
        )
    return can_be_weights and not can_be_inputs


def as_tensors(values: Any, dtype: torch.dtype | None = None) -> Any:
    """Convert arrays of numpy and tables of pandas to tensors; keep everything else.

    Args:
        values: An array, a table or a column of numbers, or a nested container.
        dtype: Type of the tensors made from floating arrays; None: the type of the array.

    Raises:
        TypeError: If an array or a table holds anything but numbers.

    Example:
        >>> import numpy as np
        >>> as_tensors((np.zeros(3), "text"), torch.float32)
        (tensor([0., 0., 0.]), 'text')
    """

    def convert(leaf: Any) -> Any:
        library = type(leaf).__module__.split(".")[0]
        if library not in ("numpy", "pandas") or not hasattr(leaf, "__array__"):
            return leaf
        array = leaf.to_numpy() if library == "pandas" else leaf
        if array.dtype.kind not in "biufc":
            raise TypeError(
                f"arrays and tables must hold numbers, got dtype {array.dtype}. Encode texts and "
                "categories as numbers, or use embens.tabular."
            )
        tensor = torch.tensor(array)  # a copy, since arrays may be read-only
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        return tensor

    return tree_map(convert, values)


def is_list_of_dicts(data: Any) -> bool:
    """Return whether data are a list with one dict per sample, which is a data set.

    Example:
        >>> is_list_of_dicts([{"x": 1, "labels": 0}]), is_list_of_dicts([1, 2])
        (True, False)
    """
    return isinstance(data, list) and all(isinstance(row, Mapping) for row in data)


def note_dtypes(error: RuntimeError, inputs: Any, dtype: torch.dtype) -> None:
    """Add the fix to an error of torch if inputs have another floating type than the network.

    Args:
        error: Raised by the network.
        inputs: A tensor, or a nested container.
        dtype: Of the parameters.
    """
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != dtype:
            error.add_note(
                f"The inputs are {leaf.dtype} and the network is {dtype}. Convert the inputs with "
                f"x.to({dtype})."
            )
            return


def note_features(error: RuntimeError, inputs: Any, reference: nn.Module) -> None:
    """Add the numbers of features to an error of torch if they differ.

    They are known for an ``nn.Sequential`` that begins with a linear layer.

    Args:
        error: Raised by the network.
        inputs: The inputs of one batch.
        reference: The network.
    """
    first_layer = reference
    while isinstance(first_layer, nn.Sequential) and len(first_layer) > 0:
        first_layer = first_layer[0]
    if isinstance(inputs, (tuple, list)) and len(inputs) == 1:
        inputs = inputs[0]
    if not isinstance(first_layer, nn.Linear) or not isinstance(inputs, Tensor):
        return
    if inputs.dim() == 0 or inputs.shape[-1] == first_layer.in_features:
        return
    error.add_note(
        f"The inputs have shape {tuple(inputs.shape)}, and the first layer expects "
        f"{first_layer.in_features} features. Pass inputs of shape "
        f"(batch, {first_layer.in_features})."
    )


def _drop_weights(values: Any, counts: tuple[int, float] | None) -> Any:
    return values[:-1] if has_weights(values, counts) else values


def _drop_target(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch
    if isinstance(batch, Mapping) and "labels" not in batch:
        return dict(batch)
    if isinstance(batch, (tuple, list)) and len(batch) == 1:
        return batch[0]
    inputs, _ = split_target(batch)
    return inputs


def _slices(name: str, values: Any, expected: str, batch_size: int) -> Iterator[Any]:
    rows = check_rows(name, values, expected)
    # Data without rows are one empty batch, so that outputs have the right shape.
    for start in range(0, max(rows, 1), batch_size):
        window = slice(start, start + batch_size)
        yield tree_map(lambda tensor, window=window: tensor[window], values)


def _loader(name: str, data: Any, expected: str, batch_size: int) -> Iterable[Any]:
    """Return an iterable of batches for a data set or a loader."""
    if isinstance(data, (str, bytes, list)) and not is_list_of_dicts(data):
        hint = ""
        if isinstance(data, list):
            hint = " Convert lists of numbers with torch.tensor."
        raise TypeError(f"{name} must be {expected}, got {type(data).__name__}.{hint}")
    is_data_set = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if isinstance(data, IterableDataset) or is_data_set:
        # A loader draws a seed. A separate generator keeps the global random state unchanged.
        data_set: Any = data
        return DataLoader(data_set, batch_size, generator=torch.Generator())
    if isinstance(data, Iterable):
        return data
    raise TypeError(f"{name} must be {expected}, got {type(data).__name__}.")
