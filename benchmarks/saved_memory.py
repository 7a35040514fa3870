"""Measure the memory that autograd keeps for the backward pass."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import Tensor

from benchmarks.timing import Step


def saved_bytes(step: Step, parameters: Iterable[Tensor]) -> int:
    """Return the largest number of bytes that autograd holds at once during a step.

    Args:
        step: a forward and a backward pass.
        parameters: tensors that do not count.
    """
    gc.collect()
    with SavedMemory(parameters) as memory:
        step()
    return memory.peak


class SavedMemory:
    """Counts the storages that autograd saves while the context is open.

    A storage counts once, however many operations save it.

    Attributes:
        peak: largest number of bytes that were saved at the same time.
    """

    def __init__(self, parameters: Iterable[Tensor]):
        self.excluded = {p.untyped_storage().data_ptr() for p in parameters}
        self.uses: dict[int, int] = {}
        self.current = 0
        self.peak = 0

    def __enter__(self) -> SavedMemory:
        self.hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: _SavedTensor(self, tensor), lambda saved: saved.tensor
        )
        self.hooks.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.hooks.__exit__(*exception)


class _SavedTensor:
    """A saved tensor that updates the counts when autograd drops it."""

    def __init__(self, memory: SavedMemory, tensor: Tensor):
        self.memory = memory
        self.tensor = tensor
        storage = tensor.untyped_storage()
        self.address = storage.data_ptr()
        self.size = storage.nbytes()
        if self.address in memory.excluded:
            self.size = 0
        uses = memory.uses.get(self.address, 0)
        if uses == 0:
            memory.current += self.size
            memory.peak = max(memory.peak, memory.current)
        memory.uses[self.address] = uses + 1

    def __del__(self) -> None:
        self.memory.uses[self.address] -= 1
        if self.memory.uses[self.address] == 0:
            self.memory.current -= self.size
