"""Batches of training and validation data.

Data are pairs ``(inputs, target)``. Inputs are one tensor, a tuple of several, or a dict whose keys
are argument names of the reference. ``(x, z, target)`` means ``((x, z), target)``, and a dict with
the key ``labels`` means ``(the other entries, labels)``. A target may be a tuple or a dict as well,
for a criterion that takes it apart.

Tensors and map-style data sets are shuffled; the order depends on the seed and the epoch only. A
``DataLoader``, or any other object that can be iterated repeatedly, is used as it is. It cannot
resume within an epoch. Under ``torchrun`` each process takes its part of every batch, but a loader
has to distribute its rows itself (``DistributedSampler``).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from embens.checks import check_rows
from embens.training import processes
from embens.training.processes import ALONE, World

EXPECTED = "tensors (inputs, targets), a torch Dataset of such pairs, or a DataLoader of batches"


class Minibatch(NamedTuple):
    """The data of one forward pass.

    Attributes:
        inputs: a tuple or a dict of inputs.
        target: the target.
        rows: number of rows in this process (per member, if each member has its own batch).
        total: number of rows in all processes, or None if unknown.
    """

    inputs: Any
    target: Any
    rows: int
    total: int | None


@dataclass
class BatchSource:
    """Base class of the two kinds of data: indexed samples and loaders.

    Attributes:
        data: what the user passed.
        batch_size: rows of a batch in all processes together; a loader has its own.
        seed: seed of the sample order; None: keep the order of the data.
        members: if not None, draw a separate order for each of so many members.
        world: the processes that share each batch.
        name: of the argument, for error messages.
    """

    data: Any
    batch_size: int
    seed: int | None = 0
    members: int | None = None
    world: World = ALONE
    name: str = "train"

    count = 0
    """Number of rows, or of a loader's batches; 0 if unknown."""
    tensors = None
    """All ``(inputs, target)`` if the data are tensors."""
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
        if isinstance(data, (tuple, list)) and not _is_list_of_dicts(data):
            self.count = check_rows(self.name, list(data), EXPECTED)
            self.tensors = split_target(data, expected)
        elif hasattr(data, "__getitem__") and not isinstance(data, (Tensor, str)):
            self.count = len(data)
        else:
            hint = ""
            if hasattr(data, "train") and hasattr(data, "test"):
                hint = ". Pass one part: data.train"
            raise TypeError(f"{expected}; got {type(data).__name__}{hint}")
        if self.count == 0:
            raise ValueError(f"{self.name}: expected at least one sample; got none")

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return -(-self.count // self.batch_size)

    def order(self, epoch: int) -> Tensor:
        """Return the order of the rows in an epoch, ``(row,)`` or ``(member, row)``."""
        if self.seed is None:
            return torch.arange(self.count)
        generator = torch.Generator().manual_seed(processes.combine(self.seed, epoch))
        if self.members is None:
            return torch.randperm(self.count, generator=generator)
        orders = [torch.randperm(self.count, generator=generator) for _ in range(self.members)]
        return torch.stack(orders)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Minibatch]:
        """Yield the batches of an epoch from number ``start`` on."""
        for index in self.order(epoch).split(self.batch_size, -1)[start:]:
            local = index
            if self.world.size > 1:
                local = index.tensor_split(self.world.size, -1)[self.world.rank]
            rows = local.shape[-1]
            if rows == 0:
                # Fewer rows than processes: run any row, with weight 0.
                local = index[..., :1]
            inputs, target = self._fetch(local)
            yield Minibatch(inputs, target, rows, index.shape[-1])

    def _fetch(self, index: Tensor) -> tuple[Any, Any]:
        """Return inputs and target of rows, with the shape of ``index`` in front."""
        rows = index.flatten()
        if self.tensors is not None:
            parts = map_tensors(lambda t: t.index_select(0, rows.to(t.device)), self.tensors)
        else:
            numbers = rows.tolist()
            if hasattr(self.data, "__getitems__"):
                samples = self.data.__getitems__(numbers)
            else:
                samples = [self.data[number] for number in numbers]
            expected = "the data set: expected items (input, target)"
            parts = split_target(default_collate(samples), expected)
        if self.members is None:
            return parts
        return map_tensors(lambda t: t.unflatten(0, index.shape), parts)


@dataclass
class LoaderSource(BatchSource):
    """Batches of a user's loader, which may draw from random generators of its own."""

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
        """Yield the batches of an epoch; ``start`` is ignored."""
        sampler = getattr(self.data, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)  # type: ignore[union-attr]
        expected = f"{self.name}: expected a loader of batches (inputs, targets)"
        number = 0
        for number, values in enumerate(self.data, 1):
            inputs, target = split_target(values, expected)
            rows = count_rows(target, axis=0 if self.members is None else 1)
            if rows == 0:
                raise ValueError(f"{self.name}: batch {number} of the loader has no rows")
            yield Minibatch(inputs, target, rows, None)
        self._check_count(number)

    def _check_count(self, batches: int) -> None:
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
        data: tensors, a data set or a loader.
        batch_size: rows of a batch.
        options: further fields of :class:`BatchSource`.

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


def split_target(values: Any, expected: str) -> tuple[Any, Any]:
    """Split a batch into inputs (a tuple or a dict) and the target.

    Args:
        values: a sequence whose last element is the target, or a dict with ``labels``.
        expected: beginning of the error message.
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
    """Apply a function to all tensors of a nested container."""
    # The two common cases come first: tree_map would cost as much as a small layer.
    if isinstance(values, Tensor):
        return function(values)
    if type(values) is tuple:
        return tuple(map_tensors(function, value) for value in values)

    def apply(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        return leaf

    return tree_map(apply, values)


def count_rows(target: Any, axis: int = 0) -> int:
    """Return the length of a target along an axis."""
    for leaf in tree_leaves(target):
        if isinstance(leaf, Tensor) and leaf.dim() > axis:
            return leaf.shape[axis]
    raise TypeError("the data: expected targets with one row for each sample; got none")


def _is_list_of_dicts(data: Any) -> bool:
    return isinstance(data, list) and all(isinstance(row, Mapping) for row in data)
