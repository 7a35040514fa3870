"""Processes of a run and their random generators.

Under ``torchrun`` every process has the same weights and a part of each batch. Gradients are
averaged over processes, weighted by their rows. The result equals that of one process
with the joint batch, up to rounding, if rows do not influence one another (as in BatchNorm) and the
criterion is a mean over rows (not a mean over class weights).

Random generators are the global ones of torch, Python and numpy. numpy is not a dependency: its
generator is included once something has imported it.
"""

import atexit
import os
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class World(NamedTuple):
    """The rank of this process and the number of processes."""

    rank: int = 0
    size: int = 1


ALONE = World()


def join(device: torch.device) -> World:
    """Return this process's place; under ``torchrun``, initialise the process group if needed.

    Args:
        device: Device of the ensemble, which determines the backend.
    """
    if not dist.is_available():
        return ALONE
    if not dist.is_initialized():
        has_other_processes = int(os.environ.get("WORLD_SIZE", "1")) > 1
        if not has_other_processes or not dist.is_torchelastic_launched():
            return ALONE
        if device.type == "cuda":
            dist.init_process_group("nccl")
        else:
            dist.init_process_group("gloo")
        # At exit only: a second process group after a destroyed one would hang.
        atexit.register(_leave)
    return World(dist.get_rank(), dist.get_world_size())


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@torch.no_grad()
def broadcast_(world: World, tensors: Iterable[Tensor]) -> None:
    """Overwrite tensors in place with those of the first process."""
    if world.size == 1:
        return
    for tensor in tensors:
        dist.broadcast(tensor.detach(), 0)


def sum_(world: World, tensors: Iterable[Tensor]) -> None:
    """Sum tensors over processes, in place."""
    if world.size == 1:
        return
    for tensor in tensors:
        dist.all_reduce(tensor)


@torch.no_grad()
def average_(
    world: World, loss: Tensor, parameters: Iterable[Tensor], rows: int, total: int | None
) -> Tensor:
    """Average gradients over processes in place, weighted by rows.

    Args:
        world: The processes.
        loss: The objective on this process's rows.
        parameters: Whose ``.grad`` are averaged.
        rows: Rows of the batch in this process.
        total: Rows of the batch in all processes; None: counted here.

    Returns:
        The averaged loss.
    """
    if world.size == 1:
        return loss
    if total is None:
        count = torch.tensor([rows], device=loss.device)
        sum_(world, [count])
        total = int(count)
    values = [loss.clone()]
    values += [p.grad for p in parameters if p.grad is not None]
    for value in values:
        value.mul_(rows / total)
    sum_(world, values)
    return values[0]


def get_states() -> dict[str, Any]:
    """Return the states of all global generators as tensors, integers and lists."""
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {"torch": torch.get_rng_state()}
    states["python"] = [version, list(words), gauss]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, words, position, has_gauss, gauss = numpy.random.get_state()
        states["numpy"] = [name, words.tolist(), position, has_gauss, gauss]
    return states


def set_states(states: dict[str, Any]) -> None:
    """Restore the states that :func:`get_states` returned."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"][: torch.cuda.device_count()])
    numpy = sys.modules.get("numpy")
    if "numpy" in states and numpy is not None:
        numpy.random.set_state(tuple(states["numpy"]))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators; restore their states on exit.

    Example:
        >>> before = torch.get_rng_state()
        >>> with seeded(0):
        ...     _ = torch.rand(3)
        >>> torch.equal(torch.get_rng_state(), before)
        True
    """
    before = get_states()
    try:
        if torch.accelerator.is_available():
            torch.manual_seed(seed)
        else:
            # torch.manual_seed would also format the call stack once for each kind of accelerator.
            torch.default_generator.manual_seed(seed)
        random.seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed % 2**32)
        yield
    finally:
        set_states(before)


def combine(seed: int, *integers: int) -> int:
    """Hash a seed and further integers to one seed below 2⁶³ (splitmix64)."""
    value = 0x9E3779B97F4A7C15
    words = (seed & 0xFFFFFFFF, seed >> 32 & 0x7FFFFFFF, *integers)
    for word in words:
        value = (value + word + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        value = ((value ^ value >> 27) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        value ^= value >> 31
    return value >> 1
