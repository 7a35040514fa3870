"""Data-parallel training: every process has the same weights and a part of each batch.

Gradients are averaged over processes, weighted by their numbers of rows. The result equals that of
one process with the joint batch, up to rounding, if rows do not influence one another (as in
BatchNorm) and the criterion is a mean over rows (not a mean over class weights).
"""

import atexit
import os
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class World(NamedTuple):
    """The rank of this process and the number of processes."""

    rank: int = 0
    size: int = 1


ALONE = World()


def join(device: torch.device) -> World:
    """Return this process's place; under ``torchrun``, initialise the process group if needed."""
    if not dist.is_available():
        return ALONE
    if not dist.is_initialized():
        several = int(os.environ.get("WORLD_SIZE", "1")) > 1
        if not several or not dist.is_torchelastic_launched():
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
        world: the processes.
        loss: the objective on this process's rows.
        parameters: whose ``.grad`` are averaged.
        rows: rows of the batch in this process.
        total: rows of the batch in all processes; None: counted here.

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
