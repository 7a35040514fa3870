"""Batches of training and validation data.

Data are pairs ``(inputs, target)``. Inputs are one tensor, a tuple of several, or a dict whose keys
are argument names of the reference. ``(x, z, target)`` means ``((x, z), target)``, and a dict with
the key ``labels`` means ``(the other entries, labels)``. A target may be a tuple or a dict as well,
for a criterion that takes it apart. Sample weights follow the target: ``(x, y, w)`` for a network
with one input, ``((x, z), y, w)`` for several. Arrays of numpy become tensors.

Tensors and map-style data sets are shuffled; the order depends on the seed and the epoch only. A
``DataLoader``, or any other object that can be iterated repeatedly, is used as it is. It cannot
resume within an epoch. Under ``torchrun`` each process takes its part of every batch, but a loader
has to distribute its rows itself (``DistributedSampler``).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from embens.checks import check_rows
from embens.sources import as_tensors, check_inputs, has_weights, is_list_of_dicts
from embens.training import processes
from embens.training.processes import ALONE, World

SMALL_DATA = 2**20
"""Number of values up to which the rows of an epoch are reordered at once."""
EXPECTED = "tensors (inputs, targets), a torch Dataset of such pairs, or a DataLoader of batches"


class Minibatch(NamedTuple):
    """The data of one forward pass.

    Attributes:
        inputs: A tuple or a dict of inputs.
        target: The target.
        rows: Number of rows in this process (per member, if members have separate batches).
        total: Number of rows in all processes, or None if unknown.
        weight: Sample weights ``(row,)``, or None.
    """

    inputs: Any
    target: Any
    rows: int
    total: int | None
    weight: Tensor | None = None


@dataclass
class BatchSource:
    """Base class of the two kinds of data: indexed samples and loaders.

    Attributes:
        data: What the user passed.
        batch_size: Rows of a batch in all processes together; a loader has a fixed one.
        seed: Seed of the sample order; None: keep the order of the data.
        members: If not None, number of members, each of which has a separate order.
        world: The processes that share each batch.
        name: Of the argument, for error messages.
        counts: Least and largest number of inputs of the network, to recognise sample weights.
        dtype: Type of the tensors made from floating arrays of numpy.
    """

    data: Any
    batch_size: int
    seed: int | None = 0
    members: int | None = None
    world: World = ALONE
    name: str = "train"
    counts: tuple[int, float] | None = None
    dtype: torch.dtype | None = None

    count = 0
    """Number of rows, or of a loader's batches; 0 if unknown."""
    tensors = None
    """All ``(inputs, target)`` if the data are tensors."""
    weight: Tensor | None = None
    """All sample weights if the data are tensors."""
    generators: Sequence[torch.Generator] = ()
    """Random generators of a loader, to be saved in checkpoints."""


@dataclass
class IndexedSource(BatchSource):
    """Batches of samples with an index: tensors or a map-style data set."""

    resumable = True

    def __post_init__(self) -> None:
        data = self.data
        expected = f"{self.name}: expected {EXPECTED}"
        if isinstance(data, TensorDataset):
            data = data.tensors
        if isinstance(data, Mapping):
            data = split_target(data, expected)
        if isinstance(data, (tuple, list)) and not is_list_of_dicts(data):
            data = as_tensors(data, self.dtype)
            self.count = check_rows(self.name, list(data), EXPECTED)
            data, self.weight = split_weights(data, self.counts, self.name)
            self.tensors = split_target(data, expected)
            check_inputs(self.name, self.tensors[0], self.counts)
        elif hasattr(data, "__getitem__") and not isinstance(data, (Tensor, str)):
            self.count = len(data)
        else:
            hint = ""
            if hasattr(data, "train") and hasattr(data, "test"):
                hint = ". Pass one part: data.train"
            elif isinstance(data, Tensor):
                hint = f". Pass inputs and targets together: {self.name}=(x, y)"
            raise TypeError(f"{expected}; got {type(data).__name__}{hint}")
        if self.count == 0:
            raise ValueError(f"{self.name}: expected at least one sample; got none")

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return math.ceil(self.count / self.batch_size)

    def order(self, epoch: int) -> Tensor:
        """Return the order of the rows in an epoch, ``(row,)`` or ``(member, row)``.

        Args:
            epoch: Number of the epoch, from 0.
        """
        if self.seed is None:
            return torch.arange(self.count)
        generator = torch.Generator().manual_seed(processes.combine(self.seed, epoch))
        if self.members is None:
            return torch.randperm(self.count, generator=generator)
        orders = [torch.randperm(self.count, generator=generator) for _ in range(self.members)]
        return torch.stack(orders)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Minibatch]:
        """Yield the batches of an epoch from number ``start`` on.

        Args:
            epoch: Number of the epoch, from 0.
            start: Number of the first batch.
        """
        order = self.order(epoch)
        if self._is_small():
            # One copy in the order of the epoch is cheaper than one per batch.
            parts = self._fetch(order)
            for first in range(start * self.batch_size, self.count, self.batch_size):
                rows = slice(first, first + self.batch_size)
                inputs, target, weight = map_tensors(lambda t, rows=rows: t[rows], parts)
                size = min(self.batch_size, self.count - first)
                yield Minibatch(inputs, target, size, size, weight)
            return
        for index in order.split(self.batch_size, -1)[start:]:
            local_index = index  # of the rows of this process
            if self.world.size > 1:
                local_index = index.tensor_split(self.world.size, -1)[self.world.rank]
            rows = local_index.shape[-1]
            if rows == 0:
                # Fewer rows than processes: run any row, with weight 0.
                local_index = index[..., :1]
            inputs, target, weight = self._fetch(local_index)
            yield Minibatch(inputs, target, rows, index.shape[-1], weight)

    def _is_small(self) -> bool:
        """Return whether the data are small tensors that one process and all members share."""
        if self.tensors is None or self.members is not None or self.world.size > 1:
            return False
        values = 0
        for leaf in tree_leaves((*self.tensors, self.weight)):
            if isinstance(leaf, Tensor):
                values += leaf.numel()
        return values <= SMALL_DATA

    def _fetch(self, index: Tensor) -> tuple[Any, Any, Any]:
        """Return inputs, target and weights of rows, with the shape of ``index`` in front."""
        rows = index.flatten()
        if self.tensors is not None:
            parts = (*self.tensors, self.weight)
            parts = map_tensors(lambda t: t.index_select(0, rows.to(t.device)), parts)
        else:
            indices = rows.tolist()
            if hasattr(self.data, "__getitems__"):
                samples = self.data.__getitems__(indices)
            else:
                samples = [self.data[row] for row in indices]
            expected = "the data set: expected items (input, target)"
            values, weight = split_weights(default_collate(samples), self.counts, self.name)
            parts = (*split_target(values, expected), weight)
        if self.members is None:
            return parts
        return map_tensors(lambda t: t.unflatten(0, index.shape), parts)


@dataclass
class LoaderSource(BatchSource):
    """Batches of a user's loader, which may use separate random generators."""

    resumable = False

    def __post_init__(self) -> None:
        with suppress(TypeError):  # a loader of a stream has no length
            self.count = len(self.data)
            self._check_count(self.count)
        sampler = getattr(self.data, "sampler", None)
        generators = []
        for owner in (self.data, sampler):
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator) and generator not in generators:
                generators.append(generator)
        self.generators = generators

    def __len__(self) -> int:
        """Return the number of batches in an epoch; 0 if unknown."""
        return self.count

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Minibatch]:
        """Yield the batches of an epoch; ``start`` is ignored.

        Args:
            epoch: Number of the epoch, from 0, for samplers that shuffle by it.
            start: Not used.
        """
        sampler = getattr(self.data, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)  # type: ignore[union-attr]
        expected = f"{self.name}: expected a loader of batches (inputs, targets)"
        number = 0
        for number, values in enumerate(self.data, 1):
            values, weight = split_weights(as_tensors(values, self.dtype), self.counts, self.name)
            inputs, target = split_target(values, expected)
            rows = count_rows(target, axis=0 if self.members is None else 1)
            if rows == 0:
                raise ValueError(f"{self.name}: batch {number} of the loader has no rows")
            yield Minibatch(inputs, target, rows, None, weight)
        self._check_count(number)

    def _check_count(self, batches: int) -> None:
        """Raise ValueError for a loader without batches."""
        if batches > 0:
            return
        hint = ""
        if not isinstance(self.data, DataLoader):
            hint = ". An iterator can be used once"
        raise ValueError(f"{self.name}: expected at least one batch; it gave none{hint}")


AnySource = IndexedSource | LoaderSource


def batches_of(data: Any, batch_size: int, **options: Any) -> AnySource:
    """Return the batches of any kind of data.

    Args:
        data: Tensors, a data set or a loader.
        batch_size: Rows of a batch.
        options: Further fields of :class:`BatchSource`.

    Returns:
        The source of the batches.

    Raises:
        TypeError: If the data are none of these.
        ValueError: If there is no sample or no batch.

    Example:
        >>> source = batches_of((torch.zeros(10, 2), torch.zeros(10)), 4)
        >>> [batch.rows for batch in source.epoch(0)]
        [4, 4, 2]
    """
    if isinstance(data, IterableDataset):
        data = DataLoader(data, batch_size)
    if isinstance(data, DataLoader):
        return LoaderSource(data, batch_size, **options)
    if isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
        return LoaderSource(data, batch_size, **options)
    return IndexedSource(data, batch_size, **options)


def split_weights(
    values: Any, counts: tuple[int, float] | None, name: str
) -> tuple[Any, Tensor | None]:
    """Separate the sample weights from a batch, or from all data.

    Args:
        values: A sequence, or a dict.
        counts: Least and largest number of inputs of the network.
        name: Of the argument, for error messages.

    Returns:
        The values without weights, and the weights, or None.

    Raises:
        ValueError: If weights are not one finite, non-negative number for each row.
    """
    if not has_weights(values, counts):
        return values, None
    *data, weight = values
    is_valid = isinstance(weight, Tensor) and weight.dim() > 0
    if is_valid:
        weight = weight if weight.is_floating_point() else weight.float()
        is_valid = bool(weight.isfinite().all()) and bool((weight >= 0).all())
    if not is_valid or weight.dim() > 2:
        raise ValueError(
            f"{name}: sample weights must be one finite, non-negative number for each row, got "
            f"{getattr(weight, 'shape', weight)!s:.80}."
        )
    return tuple(data), weight


def split_target(values: Any, expected: str) -> tuple[Any, Any]:
    """Split a batch into inputs and the target.

    Unlike :func:`embens.sources.split_target`, a single input becomes a tuple too.

    Args:
        values: A sequence whose last element is the target, or a dict with ``labels``.
        expected: Beginning of the error message.

    Returns:
        The inputs, a tuple or a dict, and the target.

    Raises:
        TypeError: If there is no target.

    Example:
        >>> split_target(("x", "target"), "train: expected a pair")
        (('x',), 'target')
    """
    if isinstance(values, Mapping) and "labels" in values:
        inputs = {name: value for name, value in values.items() if name != "labels"}
        return inputs, values["labels"]
    if isinstance(values, Mapping):
        raise TypeError(f"{expected}, or dicts with 'labels'; got a dict of {list(values)}.")
    if not isinstance(values, Sequence) or len(values) < 2:
        kind = type(values).__name__
        raise TypeError(f"{expected}, or dicts with 'labels'; got {kind}. Wrap the data.")
    *inputs, target = values
    if len(inputs) > 1:
        return tuple(inputs), target
    (single,) = inputs
    if isinstance(single, Mapping):
        return dict(single), target
    if isinstance(single, (tuple, list)):
        return tuple(single), target
    return (single,), target


def map_tensors(function: Callable[[Tensor], Tensor], values: Any) -> Any:
    """Apply a function to all tensors of a nested container.

    Args:
        function: From a tensor to a tensor.
        values: Tensors in tuples, lists and dictionaries; other values stay as they are.

    Returns:
        A container of the same structure.
    """
    # The common cases come first: tree_map would cost as much as a small layer.
    if isinstance(values, Tensor):
        return function(values)
    if values is None:
        return None
    if type(values) is tuple:
        return tuple(map_tensors(function, value) for value in values)

    def apply(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        return leaf

    return tree_map(apply, values)


def count_rows(target: Any, axis: int = 0) -> int:
    """Return the length of a target along an axis.

    Args:
        target: A tensor, or a container of tensors.
        axis: The axis.
    """
    for leaf in tree_leaves(target):
        if isinstance(leaf, Tensor) and leaf.dim() > axis:
            return leaf.shape[axis]
    raise TypeError("the data: expected targets with one row for each sample; got none")
