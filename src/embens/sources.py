"""Batches of inputs and targets, in order, from tensors, arrays, data sets and loaders.

Inputs are a tensor, a tuple of tensors (several inputs), or a dict of tensors by the argument names
of the network. Items of a data set and batches of a loader are ``(inputs, target)`` as for
:func:`embens.fit`: ``(x, z, target)`` means ``((x, z), target)``, and a dict may contain the target
under "labels". Arrays of numpy are converted to tensors.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from embens.checks import check_rows

INPUTS = "a tensor (batch, …), a tuple or dict of tensors, a data set or a loader"
LABELLED = "tensors (inputs, target), a data set or a loader of such pairs"


def input_batches(x: Any, batch_size: int, dtype: torch.dtype | None = None) -> Iterator[Any]:
    """Yield batches of inputs; targets in data sets and loaders are dropped.

    Args:
        x: inputs, a data set or a loader. The last element of a data set's items is the target,
            unless it is the only one.
        batch_size: rows per batch; a loader determines its own.
        dtype: type of the tensors made from floating arrays; None: the type of the array.

    Yields:
        A tensor, or a tuple or dict of tensors.

    Raises:
        TypeError: if ``x`` is none of these.

    Example:
        >>> [len(batch) for batch in input_batches(torch.zeros(5, 2), batch_size=2)]
        [2, 2, 1]
    """
    if isinstance(x, Mapping):
        x = dict(x)
    x = as_tensors(x, dtype)
    if isinstance(x, (Tensor, tuple, dict)):
        yield from _slices("x", x, INPUTS, batch_size)
        return
    for batch in _loader("x", x, INPUTS, batch_size):
        yield _drop_target(as_tensors(batch, dtype))


def labelled_batches(
    data: Any, batch_size: int, dtype: torch.dtype | None = None
) -> Iterator[tuple[Any, Any]]:
    """Yield batches of inputs and targets.

    Args:
        data: tensors ``(inputs, target)``, a data set or a loader.
        batch_size: rows per batch; a loader determines its own.
        dtype: type of the tensors made from floating arrays; None: the type of the array.

    Yields:
        The inputs (a tensor, or a tuple or dict of tensors) and the target.

    Raises:
        TypeError: if ``data`` is none of these, or contains no targets.

    Example:
        >>> data = torch.zeros(5, 2), torch.zeros(5)
        >>> [(len(x), len(y)) for x, y in labelled_batches(data, batch_size=3)]
        [(3, 3), (2, 2)]
    """
    if isinstance(data, TensorDataset):
        data = data.tensors
    data = as_tensors(data, dtype)
    if isinstance(data, (tuple, list, Mapping)):
        yield from _slices("data", split_target(data), LABELLED, batch_size)
        return
    for batch in _loader("data", data, LABELLED, batch_size):
        yield split_target(as_tensors(batch, dtype))


def split_target(values: Any) -> tuple[Any, Any]:
    """Split ``(inputs, target)``, ``(x, z, target)`` or a dict with "labels".

    Args:
        values: a tuple or list that ends with the target, or a dict.

    Returns:
        The inputs (a tensor, or a tuple or dict of tensors) and the target.

    Raises:
        TypeError: if there is no target.

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


def as_tensors(values: Any, dtype: torch.dtype | None = None) -> Any:
    """Convert the numpy arrays of a nested container to tensors; keep everything else.

    Args:
        values: an array, or a nested container.
        dtype: type of the tensors made from floating arrays; None: the type of the array.

    Example:
        >>> import numpy as np
        >>> as_tensors((np.zeros(3), "text"), torch.float32)
        (tensor([0., 0., 0.]), 'text')
    """

    def convert(leaf: Any) -> Any:
        if type(leaf).__module__ != "numpy" or not hasattr(leaf, "__array__"):
            return leaf
        tensor = torch.tensor(leaf)  # a copy, since arrays may be read-only
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        return tensor

    return tree_map(convert, values)


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
    if isinstance(data, (str, bytes, list)):
        raise TypeError(f"{name} must be {expected}, got {type(data).__name__}.")
    is_data_set = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if isinstance(data, IterableDataset) or is_data_set:
        # A generator of its own: a loader draws a seed, and prediction must not change the global
        # state.
        return DataLoader(data, batch_size, generator=torch.Generator())
    if isinstance(data, Iterable):
        return data
    raise TypeError(f"{name} must be {expected}, got {type(data).__name__}.")
