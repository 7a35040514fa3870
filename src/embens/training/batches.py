"""Where batches come from: tensors, data sets or loaders.

Data are ``(inputs, target)``: one input, a tuple of several, or a dict by the names that the
reference gives them; ``(x, z, target)`` stands for ``((x, z), target)``. A target may be a tuple or
a dict as well, for a criterion that takes it apart. Tensors and map-style data sets are shuffled by
the run's seed and the number of the epoch alone; a ``DataLoader``, or anything else that can be
iterated again and again, is used as it is, and can only start an epoch anew. Each of several
processes takes its part of every batch; a loader has to deal out rows itself
(``DistributedSampler``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from embens.checks import find_gaps, find_rows
from embens.training import randomness
from embens.training.parallel import ALONE, World

EXPECTED = (
    "expected tensors (inputs, targets), a torch Dataset of such pairs, or a DataLoader of batches"
)
_BLOCK = 2**24  # bytes of tensors that are put into a new order at once


class Minibatch(NamedTuple):
    """One step's data: how many rows are here, of how many in all processes (None: not known)."""

    inputs: Any
    target: Any
    rows: int
    total: int | None


class Samples(NamedTuple):
    """Samples that are found by number.

    Attributes:
        fetch: returns the leaves of ``(inputs, target)`` of some of them, and how to put them
            together.
        size: how many there are.
        together: how many may be fetched at once; 0: random items, in the order of the batches.
        gaps: for tensors, where they are not finite; None: to be looked for in every batch.
        suspects: the numbers of those rows.
        labels: the targets of all of them, or nothing.
    """

    fetch: Callable[[Tensor], tuple[list[Any], TreeSpec]]
    size: int
    together: int = 0
    gaps: str | None = None
    suspects: Tensor | None = None
    labels: Any = None


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
            leaves, form = self.samples.fetch(torch.cat(several))
            columns = [v.split(sizes) for v in leaves] if block > 1 else [[v] for v in leaves]
            for step, batch in enumerate(zip(*columns, strict=True)):
                if first + step >= start:
                    inputs, target = tree_unflatten(batch, form)
                    yield Minibatch(inputs, target, sizes[step], sizes[step])

    def _part(self, index: Tensor) -> Minibatch:
        total = index.shape[-1]
        mine = index.tensor_split(self.world.size, -1)[self.world.rank]
        rows = mine.shape[-1]
        mine = mine if rows else index[..., :1]  # too few to share: any row, counted as none
        leaves, form = self.samples.fetch(mine.flatten())
        if self.own:
            leaves = [v.unflatten(0, mine.shape) for v in leaves]
        inputs, target = tree_unflatten(leaves, form)
        return Minibatch(inputs, target, rows, total)


class Loaded:
    """Batches of a user's loader, which may draw from generators of its own.

    With ``repetition`` the rows of a batch are dealt out to every member in another order; without,
    batches of members' own have the members first already.
    """

    resumable = False
    samples = None

    def __init__(
        self,
        loader: Any,
        own: int | None,
        repetition: float | None = None,
        name: str = "train",
    ):
        self.loader, self.own, self.repetition, self.name = loader, own, repetition, name
        try:
            self.count = len(loader)
        except TypeError:
            self.count = 0  # not known
        else:
            self._check_count(self.count)
        sampler = getattr(loader, "sampler", None)
        found = (getattr(loader, "generator", None), getattr(sampler, "generator", None))
        found = {id(g): g for g in found if isinstance(g, torch.Generator)}
        self.generators = list(found.values())

    def __len__(self) -> int:
        return self.count

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Minibatch]:
        sampler, number = getattr(self.loader, "sampler", None), 0
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)  # type: ignore[union-attr]
        for number, values in enumerate(self.loader, 1):
            if not isinstance(values, (tuple, list)) or len(values) < 2:
                raise TypeError(
                    f"{self.name}: expected a loader of batches (inputs, targets); got "
                    f"{type(values).__name__}. Give the data set or the collate_fn that form."
                )
            inputs, target = parts_of(values)
            if self.own and self.repetition is not None:
                orders = deal(count_rows(target), self.own, self.repetition)
                inputs, target = tree_map(lambda v, orders=orders: v[orders], (inputs, target))
            rows = count_rows(target, self.own)
            if rows == 0:
                raise ValueError(f"{self.name}: batch {number} of the loader has no rows")
            yield Minibatch(inputs, target, rows, None)
        self._check_count(number)

    def _check_count(self, batches: int) -> None:
        if batches == 0:
            once = "" if isinstance(self.loader, DataLoader) else ". An iterator can be used once"
            raise ValueError(
                f"{self.name}: expected at least one batch; the loader gave none{once}"
            )


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


def parts_of(values: Sequence[Any]) -> tuple[Any, Any]:
    """Return the inputs, a tuple or a dict, and the target of a batch."""
    *inputs, target = values
    if len(inputs) == 1 and isinstance(inputs[0], Mapping):
        return dict(inputs[0]), target
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
    seed: int = 0,
    own: int | None = None,
    world: World = ALONE,
    repetition: float | None = None,
    name: str = "train",
) -> Shuffled | Loaded:
    """Return the batches to train on; ``name`` is for messages."""
    if isinstance(data, IterableDataset):
        data = DataLoader(data, batch_size)
    if isinstance(data, DataLoader) or (
        isinstance(data, Iterable) and not hasattr(data, "__getitem__")
    ):
        return Loaded(data, own, repetition, name)
    samples = samples_of(data, name)
    return Shuffled(samples, batch_size, seed, own, world, repetition or 0.0)


class InOrder(Shuffled):
    """Batches of all rows, in their order."""

    def order(self, epoch: int) -> Tensor:
        return torch.arange(self.count)


def validation_batches(data: Any, batch_size: int) -> Shuffled | Loaded:
    """Return batches of all rows, in their order."""
    batches = training_batches(data, batch_size, name="validation")
    if isinstance(batches, Loaded):
        return batches
    return InOrder(batches.samples, batch_size, 0, None, ALONE)


def samples_of(data: Any, name: str) -> Samples:
    """Return the samples in tensors or in a map-style data set; ``name`` is for messages."""
    if isinstance(data, TensorDataset):
        data = data.tensors
    if isinstance(data, (tuple, list)):
        samples = _samples_of_tensors(data, name)
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


def _samples_of_tensors(data: Sequence[Any], name: str) -> Samples:
    inputs, target = parts = parts_of(data) if len(data) > 1 else ((), data)
    tensors, form = tree_flatten(parts)
    if not inputs or not all(isinstance(t, Tensor) and t.dim() for t in tensors):
        got = ", ".join(type(t).__name__ for t in tensors)
        raise TypeError(f"{name}: {EXPECTED}; got ({got})")
    count = len(tensors[-1])
    if any(len(t) != count for t in tensors):
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
        raise ValueError(f"{name}: expected as many inputs as targets; got shapes {shapes}")
    size = sum(t.nbytes for t in tensors) // max(1, count)
    gaps = find_gaps("inputs", inputs) or find_gaps("targets", target)
    suspects = [find_rows(~t.isfinite()).cpu() for t in tensors if gaps and t.is_floating_point()]
    return Samples(
        lambda i: ([t.index_select(0, i.to(t.device)) for t in tensors], form),
        count,
        _BLOCK // max(1, size),
        gaps,
        torch.cat(suspects).unique() if suspects else None,
        target,
    )


def _collate(data: Any, numbers: list[int]) -> tuple[list[Any], TreeSpec]:
    many = getattr(data, "__getitems__", None)
    items = many(numbers) if many else [data[i] for i in numbers]
    values = default_collate(items)
    if not isinstance(values, (tuple, list)) or len(values) < 2:
        raise TypeError(
            f"the data set: expected items (input, target); got {type(items[0]).__name__}. Wrap it "
            "in one that returns such pairs."
        )
    return tree_flatten(parts_of(values))
