"""Where batches come from: tensors, data sets or loaders.

Data are ``(inputs, target)``: one input, a tuple of several, or a dict by the names that the
reference gives them; ``(x, z, target)`` stands for ``((x, z), target)``, and a dict that has
``labels`` for the rest of it and these. A target may be a tuple or
a dict as well, for a criterion that takes it apart. Tensors and map-style data sets are shuffled by
the run's seed and the number of the epoch alone; a ``DataLoader``, or anything else that can be
iterated again and again, is used as it is, and can only start an epoch anew. Each of several
processes takes its part of every batch; a loader has to deal out rows itself
(``DistributedSampler``).
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
from embens.training import randomness
from embens.training.parallel import ALONE, World

EXPECTED = "tensors (inputs, targets), a torch Dataset of such pairs, or a DataLoader of batches"


class Minibatch(NamedTuple):
    """One step's data: how many rows are here, of how many in all processes (None: not known).

    ``numbers`` are those of the rows in the data, ``(row,)`` or ``(member, row)``, where known.
    """

    inputs: Any
    target: Any
    rows: int
    total: int | None
    numbers: Tensor | None = None


@dataclass
class Batches:
    """Batches of some data: tensors ``(inputs, target)``, a data set or a loader."""

    data: Any
    batch_size: int  # rows of a batch, in all processes together; a loader has its own
    seed: int | None = 0  # of the orders, which the epoch changes; None: the rows as they are
    own: int | None = None  # another order, and an axis, for each of so many members
    world: World = ALONE  # the processes that share each batch
    repetition: float | None = None
    """With ``own``, the fraction of rows that is the same for all members. None: the batches of a
    loader have the members first already; else their rows are dealt out."""
    name: str = "train"  # for messages
    count = 0  # rows, or batches of a loader; 0: not known
    tensors = None  # all inputs and targets, where the data are tensors
    generators = ()  # that a loader draws from


@dataclass
class Shuffled(Batches):
    """Batches of samples that are found by number: of tensors, or of a map-style data set."""

    resumable = True

    def __post_init__(self) -> None:
        data = self.data
        if isinstance(data, TensorDataset):
            data = data.tensors
        if isinstance(data, Mapping):
            data = parts_of(data, f"{self.name}: expected {EXPECTED}")
        by_row = isinstance(data, list) and all(isinstance(row, Mapping) for row in data)
        if isinstance(data, (tuple, list)) and not by_row:
            self.count = check_rows(self.name, list(data), EXPECTED)
            self.tensors = parts_of(data, f"{self.name}: expected {EXPECTED}")
        elif hasattr(data, "__getitem__") and not isinstance(data, (Tensor, dict, str)):
            self.count = len(data)
        else:
            parts = hasattr(data, "train") and hasattr(data, "test")
            hint = ". Pass one part: data.train" if parts else ""
            raise TypeError(f"{self.name}: expected {EXPECTED}; got {type(data).__name__}{hint}")
        if self.count == 0:
            raise ValueError(f"{self.name}: expected at least one sample; got none")

    def __len__(self) -> int:
        return -(-self.count // self.batch_size)

    def order(self, epoch: int) -> Tensor:
        """Return the order of the rows in an epoch; with ``own``, one for each member."""
        if self.seed is None:
            return torch.arange(self.count)
        generator = torch.Generator().manual_seed(randomness.combine(self.seed, epoch))
        if self.own:
            return deal(self.count, self.own, self.repetition or 0.0, generator)
        return torch.randperm(self.count, generator=generator)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Minibatch]:
        for index in self.order(epoch).split(self.batch_size, -1)[start:]:
            mine = index.tensor_split(self.world.size, -1)[self.world.rank]
            rows = mine.shape[-1]
            mine = mine if rows else index[..., :1]  # too few to share: any row, counted as none
            yield Minibatch(*self._fetch(mine), rows, index.shape[-1], mine)

    def _fetch(self, index: Tensor) -> tuple[Any, Any]:
        flat = index.flatten()
        if self.tensors:
            parts = map_tensors(lambda t: t.index_select(0, flat.to(t.device)), self.tensors)
        else:
            many, numbers = getattr(self.data, "__getitems__", None), flat.tolist()
            items = many(numbers) if many else [self.data[i] for i in numbers]
            parts = parts_of(default_collate(items), "the data set: expected items (input, target)")
        return map_tensors(lambda v: v.unflatten(0, index.shape), parts) if self.own else parts


@dataclass
class Loaded(Batches):
    """Batches of a user's loader, which may draw from generators of its own."""

    resumable = False

    def __post_init__(self) -> None:
        with suppress(TypeError):  # some loaders don't know
            self.count = len(self.data)
            self._check_count(self.count)
        sampler = getattr(self.data, "sampler", None)
        found = (getattr(self.data, "generator", None), getattr(sampler, "generator", None))
        self.generators = list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())

    def __len__(self) -> int:
        return self.count

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Minibatch]:
        sampler, number = getattr(self.data, "sampler", None), 0
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)  # type: ignore[union-attr]
        for number, values in enumerate(self.data, 1):
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
            once = "" if isinstance(self.data, DataLoader) else ". An iterator can be used once"
            raise ValueError(f"{self.name}: expected at least one batch; it gave none{once}")


AnyBatches = Shuffled | Loaded


def batches_of(data: Any, batch_size: int, **options: Any) -> AnyBatches:
    """Return the batches of any kind of data; the options are those of :class:`Batches`."""
    if isinstance(data, IterableDataset):
        data = DataLoader(data, batch_size)
    iterable = isinstance(data, Iterable) and not hasattr(data, "__getitem__")
    kind = Loaded if iterable or isinstance(data, DataLoader) else Shuffled
    return kind(data, batch_size, **options)


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


def parts_of(values: Any, expected: str) -> tuple[Any, Any]:
    """Return the inputs, a tuple or a dict, and the target of a batch."""
    if isinstance(values, Mapping) and "labels" in values:
        return {name: value for name, value in values.items() if name != "labels"}, values["labels"]
    if not isinstance(values, Sequence) or len(values) < 2:
        got = f"a dict of {list(values)}" if isinstance(values, Mapping) else type(values).__name__
        raise TypeError(f"{expected}, or dicts with 'labels'; got {got}. Wrap the data.")
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
