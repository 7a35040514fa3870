"""Where batches come from: tensors, data sets or loaders.

A batch is ``(*inputs, target)``, or ``(inputs, target)`` with a tuple of several inputs. Tensors
and map-style data sets are shuffled by the run's seed and the number of the epoch alone; a
``DataLoader`` is iterated as it is, and can only start an epoch anew. Each of several processes
takes its part of every batch; a loader has to deal out rows itself (``DistributedSampler``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from embens.training import randomness
from embens.training.parallel import ALONE, World

EXPECTED = (
    "expected tensors (inputs, targets), a torch Dataset of such pairs, or a DataLoader of batches"
)
_BLOCK = 2**24  # bytes of tensors that are put into a new order at once


class Minibatch(NamedTuple):
    """One step's data: how many rows are here, of how many in all processes (None: not known)."""

    inputs: tuple[Any, ...]
    target: Any
    rows: int
    total: int | None


class Samples(NamedTuple):
    """Samples that are found by number."""

    fetch: Callable[[Tensor], Sequence[Any]]  # (*inputs, target) of some of them
    size: int
    together: int = 0  # may be fetched at once; 0: random items, in the order of the batches


class Shuffled:
    """Batches of samples; with ``own`` another order, and an axis, for each of so many members.

    A fraction ``repetition`` of the rows is then the same for all of them.
    """

    resumable = True

    def __init__(
        self,
        samples: Samples,
        batch_size: int,
        seed: int,
        own: int | None,
        world: World,
        repetition: float = 0.0,
    ):
        self.samples, self.count, self.batch_size = samples, samples.size, batch_size
        self.seed, self.own, self.world, self.repetition = seed, own, world, repetition
        self.generators: list[torch.Generator] = []

    def __len__(self) -> int:
        return -(-self.count // self.batch_size)

    def order(self, epoch: int) -> Tensor:
        """Return the order of the rows in an epoch; with ``own``, one for each member."""
        generator = torch.Generator().manual_seed(randomness.combine(self.seed, epoch))
        if self.own:
            return deal(self.count, self.own, self.repetition, generator)
        return torch.randperm(self.count, generator=generator)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Minibatch]:
        indices = self.order(epoch).split(self.batch_size, -1)
        if self.own or self.world.size > 1:
            yield from map(self._part, indices[start:])
            return
        block = max(1, self.samples.together // self.batch_size)
        for first in range(start - start % block, len(self), block):
            several = indices[first : first + block]
            sizes = [len(index) for index in several]
            values = self.samples.fetch(torch.cat(several))
            columns = [v.split(sizes) for v in values] if block > 1 else [[v] for v in values]
            for step, batch in enumerate(zip(*columns, strict=True)):
                if first + step >= start:
                    yield Minibatch(*parts_of(batch), sizes[step], sizes[step])

    def _part(self, index: Tensor) -> Minibatch:
        total = index.shape[-1]
        mine = index.tensor_split(self.world.size, -1)[self.world.rank]
        rows = mine.shape[-1]
        mine = mine if rows else index[..., :1]  # too few to share: any row, counted as none
        values = self.samples.fetch(mine.flatten())
        if self.own:
            values = [tree_map(lambda v: v.unflatten(0, mine.shape), v) for v in values]
        return Minibatch(*parts_of(values), rows, total)


class Loaded:
    """Batches of a user's loader, which may draw from generators of its own.

    With ``repetition`` the rows of a batch are dealt out to every member in another order; without,
    batches of members' own have the members first already.
    """

    resumable = False

    def __init__(self, loader: DataLoader, own: int | None, repetition: float | None = None):
        self.loader, self.own, self.repetition = loader, own, repetition
        self.count = len(self)
        found = (loader.generator, getattr(loader.sampler, "generator", None))
        found = {id(g): g for g in found if isinstance(g, torch.Generator)}
        self.generators = list(found.values())

    def __len__(self) -> int:
        try:
            return len(self.loader)
        except TypeError:  # of an iterable data set without a length
            return 0

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Minibatch]:
        if hasattr(self.loader.sampler, "set_epoch"):
            self.loader.sampler.set_epoch(epoch)  # type: ignore[union-attr]
        for values in self.loader:
            if not isinstance(values, (tuple, list)) or len(values) < 2:
                raise TypeError(
                    f"the loader: expected batches (inputs, targets); got {type(values).__name__}. "
                    "Give the data set or the collate_fn that form."
                )
            inputs, target = parts_of(values)
            if self.own and self.repetition is not None:
                orders = deal(count_rows(target), self.own, self.repetition)
                inputs, target = tree_map(lambda v, orders=orders: v[orders], (inputs, target))
            yield Minibatch(inputs, target, count_rows(target, self.own), None)


def deal(
    rows: int, members: int, repetition: float = 0.0, generator: torch.Generator | None = None
) -> Tensor:
    """Return an order of the rows for every member, in which a fraction of rows is in one place."""
    orders = torch.stack([torch.randperm(rows, generator=generator) for _ in range(members)])
    if repetition:
        free = torch.randperm(rows, generator=generator)[round(repetition * rows) :]
        places = orders[1:, free].argsort(1)  # at random
        orders[1:] = orders[0]
        orders[1:, free] = orders[0, free][places]
    return orders


def parts_of(values: Sequence[Any]) -> tuple[tuple[Any, ...], Any]:
    """Return the inputs and the target of a batch."""
    *inputs, target = values
    several = len(inputs) == 1 and isinstance(inputs[0], (tuple, list))
    return tuple(inputs[0] if several else inputs), target


def count_rows(target: Any, own: int | None = None) -> int:
    """Return the number of samples behind a target."""
    leaf = next((v for v in tree_leaves(target) if isinstance(v, Tensor) and v.dim()), None)
    if leaf is None:
        raise TypeError("the data: expected targets with one row for each sample; got none")
    return leaf.shape[1 if own else 0]


def training_batches(
    data: Any,
    batch_size: int,
    *,
    seed: int,
    own: int | None = None,
    world: World = ALONE,
    repetition: float | None = None,
) -> Shuffled | Loaded:
    """Return the batches to train on."""
    if isinstance(data, IterableDataset):
        data = DataLoader(data, batch_size)
    if isinstance(data, DataLoader):
        return Loaded(data, own, repetition)
    samples = samples_of(data, "train")
    return Shuffled(samples, batch_size, seed, own, world, repetition or 0.0)


def validation_batches(data: Any, batch_size: int) -> Callable[[], Iterator[tuple[tuple, Any]]]:
    """Return a function that yields ``(inputs, target)`` of all rows, in their order."""
    if isinstance(data, (DataLoader, IterableDataset)):
        loaded = training_batches(data, batch_size, seed=0)
        return lambda: ((batch.inputs, batch.target) for batch in loaded.epoch(0))
    samples = samples_of(data, "validation")
    indices = torch.arange(samples.size).split(batch_size)
    return lambda: (parts_of(samples.fetch(index)) for index in indices)


def samples_of(data: Any, name: str) -> Samples:
    """Return the samples in tensors or in a map-style data set; ``name`` is for messages."""
    if isinstance(data, TensorDataset):
        data = data.tensors
    if isinstance(data, (tuple, list)):
        several = len(data) == 2 and isinstance(data[0], (tuple, list))
        samples = _samples_of_tensors((*data[0], data[1]) if several else data, name)
    elif isinstance(data, Dataset) or (
        hasattr(data, "__getitem__")
        and hasattr(data, "__len__")
        and not isinstance(data, (Tensor, dict, str))
    ):
        samples = Samples(lambda index: _collate(data, index.tolist()), len(data))  # type: ignore[arg-type]
    else:
        parts = hasattr(data, "train") and hasattr(data, "test")
        hint = ". Pass one part: data.train" if parts else ""
        raise TypeError(f"{name}: {EXPECTED}; got {type(data).__name__}{hint}")
    if samples.size == 0:
        raise ValueError(f"{name}: expected at least one sample; got none")
    return samples


def _samples_of_tensors(tensors: Sequence[Any], name: str) -> Samples:
    if len(tensors) < 2 or not all(isinstance(t, Tensor) and t.dim() for t in tensors):
        got = ", ".join(type(t).__name__ for t in tensors)
        raise TypeError(f"{name}: {EXPECTED}; got ({got})")
    count = len(tensors[-1])
    if any(len(t) != count for t in tensors):
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
        raise ValueError(f"{name}: expected as many inputs as targets; got shapes {shapes}")
    size = sum(t.nbytes for t in tensors) // max(1, count)
    together = _BLOCK // max(1, size)
    return Samples(lambda i: [t.index_select(0, i.to(t.device)) for t in tensors], count, together)


def _collate(data: Any, numbers: list[int]) -> Sequence[Any]:
    many = getattr(data, "__getitems__", None)
    items = many(numbers) if many else [data[i] for i in numbers]
    values = default_collate(items)
    if not isinstance(values, (tuple, list)) or len(values) < 2:
        raise TypeError(
            f"the data set: expected items (input, target); got {type(items[0]).__name__}. Wrap it "
            "in one that returns such pairs."
        )
    return values
