"""Where batches come from: tensors, data sets or loaders.

A batch is ``(*inputs, target)``. Tensors and map-style data sets are shuffled by the run's seed and
the number of the epoch alone, so that any batch can be had without those before it; a
``DataLoader`` is iterated as it is, and can only start an epoch anew. With several processes each
takes its :class:`Part` of every batch; a loader has to deal out different rows itself
(``DistributedSampler``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from embens.training import randomness

EXPECTED = (
    "expected tensors (inputs, targets), a torch Dataset of such pairs, or a DataLoader of batches"
)


class Part(NamedTuple):
    """This process's part of the work: the number of the process, and how many there are."""

    rank: int = 0
    of: int = 1


ALONE = Part()


class Batch(NamedTuple):
    """One step's data: how many rows are here, of how many in all processes (None: not known)."""

    inputs: tuple[Any, ...]
    target: Any
    rows: int
    total: int | None


class Shuffled:
    """Batches of rows that are found by number.

    Args:
        fetch: returns ``(*inputs, target)`` of some rows.
        rows: how many there are.
        batch_size: rows a batch has in all processes.
        seed: of the order.
        own: a different order, and a leading axis, for each of so many members.
        part: this process's.
    """

    resumable = True

    def __init__(
        self,
        fetch: Callable[[Tensor], Sequence[Any]],
        rows: int,
        batch_size: int,
        *,
        seed: int,
        own: int | None,
        part: Part,
    ):
        self.fetch, self.rows, self.batch_size = fetch, rows, batch_size
        self.seed, self.own, self.part = seed, own, part

    def __len__(self) -> int:
        return -(-self.rows // self.batch_size)

    def order(self, epoch: int) -> Tensor:
        """Return the order of the rows in an epoch; with ``own``, one for each member."""
        generator = torch.Generator().manual_seed(randomness.combine(self.seed, epoch))
        orders = [torch.randperm(self.rows, generator=generator) for _ in range(self.own or 1)]
        return torch.stack(orders) if self.own else orders[0]

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from one on."""
        order = self.order(epoch)
        for step in range(start, len(self)):
            index = order[..., step * self.batch_size : (step + 1) * self.batch_size]
            total = rows = index.shape[-1]
            if self.part.of > 1:
                index = index.tensor_split(self.part.of, dim=-1)[self.part.rank]
                rows = index.shape[-1]
                if rows == 0:  # too few to share: run any row, and count it as none
                    index = order[..., :1]
            *inputs, target = self._fetch(index)
            yield Batch(tuple(inputs), target, rows, total)

    def _fetch(self, index: Tensor) -> Sequence[Any]:
        if self.own is None:
            return self.fetch(index)
        values = self.fetch(index.flatten())
        return [tree_map(lambda v: v.unflatten(0, index.shape), v) for v in values]

    def state(self) -> dict[str, Any]:
        """Return what is needed to go on after a restart, besides the epoch's number."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a state."""


class Loaded:
    """Batches of a user's loader."""

    resumable = False

    def __init__(self, loader: DataLoader, own: int | None):
        self.loader, self.own = loader, own

    def __len__(self) -> int:
        try:
            return len(self.loader)
        except TypeError:  # of an iterable data set without a length
            return 0

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch."""
        if hasattr(self.loader.sampler, "set_epoch"):
            self.loader.sampler.set_epoch(epoch)  # type: ignore[union-attr]
        for values in self.loader:
            if not isinstance(values, (tuple, list)) or len(values) < 2:
                raise TypeError(
                    f"the loader: expected batches (inputs, targets); got {type(values).__name__}. "
                    "Give the data set or the collate_fn that form."
                )
            *inputs, target = values
            yield Batch(tuple(inputs), target, count_rows(target, self.own), None)

    def _generators(self) -> list[torch.Generator]:
        found = (self.loader.generator, getattr(self.loader.sampler, "generator", None))
        return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())

    def state(self) -> dict[str, Any]:
        """Return the states of the loader's own generators."""
        return {"generators": [g.get_state() for g in self._generators()]}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        for generator, value in zip(self._generators(), state["generators"], strict=True):
            generator.set_state(value)


def count_rows(target: Any, own: int | None = None) -> int:
    """Return the number of samples behind a target."""
    leaf = next((v for v in tree_leaves(target) if isinstance(v, Tensor) and v.dim()), None)
    if leaf is None:
        raise TypeError("the data: expected targets with one row for each sample; got none")
    return leaf.shape[1 if own else 0]


def training_batches(
    data: Any, batch_size: int, *, seed: int, own: int | None = None, part: Part = ALONE
) -> Shuffled | Loaded:
    """Return the batches to train on."""
    if isinstance(data, DataLoader):
        return Loaded(data, own)
    if isinstance(data, IterableDataset):
        return Loaded(DataLoader(data, batch_size), own)
    fetch, rows = _rows_of(data, "train")
    return Shuffled(fetch, rows, batch_size, seed=seed, own=own, part=part)


def validation_batches(data: Any, batch_size: int) -> Callable[[], Iterator[tuple[tuple, Any]]]:
    """Return a function that yields ``(inputs, target)`` of all rows, in their order."""
    if isinstance(data, (DataLoader, IterableDataset)):
        loaded = training_batches(data, batch_size, seed=0)
        return lambda: ((batch.inputs, batch.target) for batch in loaded.epoch(0))
    fetch, rows = _rows_of(data, "validation")

    def batches() -> Iterator[tuple[tuple, Any]]:
        for index in torch.arange(rows).split(batch_size):
            *inputs, target = fetch(index)
            yield tuple(inputs), target

    return batches


def _rows_of(data: Any, name: str) -> tuple[Callable[[Tensor], Sequence[Any]], int]:
    """Return a function from numbers of rows to ``(*inputs, target)``, and how many there are."""
    if isinstance(data, TensorDataset):
        data = data.tensors
    if isinstance(data, (tuple, list)):
        if len(data) < 2 or not all(isinstance(t, Tensor) and t.dim() for t in data):
            got = ", ".join(type(t).__name__ for t in data)
            raise TypeError(f"{name}: {EXPECTED}; got ({got})")
        rows = len(data[-1])
        if any(len(t) != rows for t in data):
            shapes = ", ".join(str(tuple(t.shape)) for t in data)
            raise ValueError(f"{name}: expected as many inputs as targets; got shapes {shapes}")
        fetch = _fetch_tensors(data)
    elif isinstance(data, Dataset) or _is_map(data):
        rows = len(data)  # type: ignore[arg-type]
        fetch = _fetch_items(data)
    else:
        parts = hasattr(data, "train") and hasattr(data, "test")
        hint = ". Pass one part: data.train" if parts else ""
        raise TypeError(f"{name}: {EXPECTED}; got {type(data).__name__}{hint}")
    if rows == 0:
        raise ValueError(f"{name}: expected at least one sample; got none")
    return fetch, rows


def _is_map(data: Any) -> bool:
    """Return whether an object, not derived from torch's ``Dataset``, can be used like one."""
    return (
        hasattr(data, "__getitem__")
        and hasattr(data, "__len__")
        and not isinstance(data, (Tensor, dict, str))
    )


def _fetch_tensors(tensors: Sequence[Tensor]) -> Callable[[Tensor], Sequence[Any]]:
    def fetch(index: Tensor) -> Sequence[Tensor]:
        return [t.index_select(0, index.to(t.device)) for t in tensors]

    return fetch


def _fetch_items(data: Any) -> Callable[[Tensor], Sequence[Any]]:
    def fetch(index: Tensor) -> Sequence[Any]:
        numbers = index.tolist()
        many = getattr(data, "__getitems__", None)
        items = many(numbers) if many else [data[i] for i in numbers]
        values = default_collate(items)
        if not isinstance(values, (tuple, list)) or len(values) < 2:
            raise TypeError(
                "the data set: expected items (input, target); got "
                f"{type(items[0]).__name__}. Wrap it in one that returns such pairs."
            )
        return values

    return fetch
