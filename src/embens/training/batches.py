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
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from embens.training import randomness
from embens.training.parallel import ALONE, World

EXPECTED = (
    "expected tensors (inputs, targets), a torch Dataset of such pairs, or a DataLoader of batches"
)


class Minibatch(NamedTuple):
    """One step's data: how many rows are here, of how many in all processes (None: not known)."""

    inputs: Any
    target: Any
    rows: int
    total: int | None


class Shuffled:
    """Batches of samples that are found by number: of tensors, or of a map-style data set.

    Args:
        data: tensors ``(inputs, target)``, or a data set.
        batch_size: rows of a batch, in all processes together.
        seed: of the orders, which the number of the epoch changes; None: the rows as they are.
        own: another order, and an axis, for each of so many members.
        world: the processes that share each batch.
        repetition: with ``own``, the fraction of rows that is the same for all members.
        name: for messages.
    """

    resumable = True

    def __init__(
        self,
        data: Any,
        batch_size: int,
        *,
        seed: int | None = 0,
        own: int | None = None,
        world: World = ALONE,
        repetition: float | None = None,
        name: str = "train",
    ):
        data = data.tensors if isinstance(data, TensorDataset) else data
        listed = isinstance(data, (tuple, list))
        self.tensors = _check_tensors(data, name) if listed else None
        if not listed and (
            not (hasattr(data, "__getitem__") and hasattr(data, "__len__"))
            or isinstance(data, (Tensor, dict, str))
        ):
            parts = hasattr(data, "train") and hasattr(data, "test")
            hint = ". Pass one part: data.train" if parts else ""
            raise TypeError(f"{name}: {EXPECTED}; got {type(data).__name__}{hint}")
        self.data, self.count = data, count_rows(self.tensors) if self.tensors else len(data)
        if self.count == 0:
            raise ValueError(f"{name}: expected at least one sample; got none")
        self.batch_size, self.seed, self.own = batch_size, seed, own
        self.world, self.repetition = world, repetition or 0.0
        self.generators: list[torch.Generator] = []

    def __len__(self) -> int:
        return -(-self.count // self.batch_size)

    def order(self, epoch: int) -> Tensor:
        """Return the order of the rows in an epoch; with ``own``, one for each member."""
        if self.seed is None:
            return torch.arange(self.count)
        generator = torch.Generator().manual_seed(randomness.combine(self.seed, epoch))
        if self.own:
            return deal(self.count, self.own, self.repetition, generator)
        return torch.randperm(self.count, generator=generator)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Minibatch]:
        for index in self.order(epoch).split(self.batch_size, -1)[start:]:
            mine = index.tensor_split(self.world.size, -1)[self.world.rank]
            rows = mine.shape[-1]
            mine = mine if rows else index[..., :1]  # too few to share: any row, counted as none
            yield Minibatch(*self._fetch(mine), rows, index.shape[-1])

    def _fetch(self, index: Tensor) -> tuple[Any, Any]:
        flat = index.flatten()
        if self.tensors:
            parts = map_tensors(lambda t: t.index_select(0, flat.to(t.device)), self.tensors)
        else:
            many, numbers = getattr(self.data, "__getitems__", None), flat.tolist()
            items = many(numbers) if many else [self.data[i] for i in numbers]
            parts = parts_of(default_collate(items), "the data set: expected items (input, target)")
        return map_tensors(lambda v: v.unflatten(0, index.shape), parts) if self.own else parts


class Loaded:
    """Batches of a user's loader, which may draw from generators of its own.

    With ``repetition`` the rows of a batch are dealt out to every member in another order; without,
    batches of members' own have the members first already.
    """

    resumable = False
    tensors = None

    def __init__(
        self, loader: Any, own: int | None, repetition: float | None = None, name: str = "train"
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
            expected = f"{self.name}: expected a loader of batches (inputs, targets)"
            inputs, target = parts_of(values, expected)
            if self.own and self.repetition is not None:
                orders = deal(count_rows(target), self.own, self.repetition)
                inputs, target = map_tensors(lambda v, o=orders: v[o], (inputs, target))
            rows = count_rows(target, 1 if self.own else 0)
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


def training_batches(
    data: Any,
    batch_size: int,
    *,
    seed: int | None = 0,
    own: int | None = None,
    world: World = ALONE,
    repetition: float | None = None,
    name: str = "train",
) -> Shuffled | Loaded:
    """Return the batches of any kind of data; see :class:`Shuffled` for the arguments."""
    if isinstance(data, IterableDataset):
        data = DataLoader(data, batch_size)
    iterable = isinstance(data, Iterable) and not hasattr(data, "__getitem__")
    if isinstance(data, DataLoader) or iterable:
        return Loaded(data, own, repetition, name)
    options = {"world": world, "repetition": repetition, "name": name}
    return Shuffled(data, batch_size, seed=seed, own=own, **options)


def validation_batches(data: Any, batch_size: int) -> Shuffled | Loaded:
    """Return batches of all rows, in their order."""
    return training_batches(data, batch_size, seed=None, name="validation")


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


def parts_of(values: Any, expected: str = f"the data: {EXPECTED}") -> tuple[Any, Any]:
    """Return the inputs, a tuple or a dict, and the target of a batch."""
    if not isinstance(values, Sequence) or len(values) < 2:
        raise TypeError(f"{expected}; got {type(values).__name__}. Wrap the data to give that form.")
    *inputs, target = values
    if len(inputs) == 1 and isinstance(inputs[0], Mapping):
        return dict(inputs[0]), target
    several = len(inputs) == 1 and isinstance(inputs[0], (tuple, list))
    return tuple(inputs[0] if several else inputs), target


def map_tensors(function: Callable[[Tensor], Tensor], values: Any) -> Any:
    """Apply a function to the tensors in a tree; for tuples faster than ``tree_map``."""
    if isinstance(values, Tensor):
        return function(values)
    if type(values) is tuple:
        return tuple(map_tensors(function, value) for value in values)
    return tree_map(lambda v: function(v) if isinstance(v, Tensor) else v, values)


def count_rows(target: Any, axis: int = 0) -> int:
    """Return the number of samples behind a target."""
    leaf = next((v for v in tree_leaves(target) if isinstance(v, Tensor) and v.dim()), None)
    if leaf is None:
        raise TypeError("the data: expected targets with one row for each sample; got none")
    return leaf.shape[axis]


def _check_tensors(data: Sequence[Any], name: str) -> tuple[Any, Any]:
    tensors = tree_leaves(list(data))
    if len(data) < 2 or not all(isinstance(t, Tensor) and t.dim() for t in tensors):
        got = ", ".join(type(t).__name__ for t in tensors)
        raise TypeError(f"{name}: {EXPECTED}; got ({got})")
    if len({len(t) for t in tensors}) > 1:
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
        raise ValueError(f"{name}: expected as many inputs as targets; got shapes {shapes}")
    return parts_of(data)
