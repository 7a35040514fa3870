"""Several processes, one run: every process has its part of each batch and the same weights.

Gradients are summed over processes with the weights of their rows, so the result is that of one
process with the joint batch, to rounding, as long as rows don't influence one another (BatchNorm)
and the criterion is a mean over rows (not over class weights).
"""

import atexit
import os
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class World(NamedTuple):
    """The number of this process, and how many there are."""

    rank: int = 0
    size: int = 1


ALONE = World()


def join(device: torch.device) -> World:
    """Return this process's place; under ``torchrun`` connect the processes if nobody has."""
    if not dist.is_available():
        return ALONE
    if not dist.is_initialized():
        several = int(os.environ.get("WORLD_SIZE", "1")) > 1
        if not (several and dist.is_torchelastic_launched()):
            return ALONE
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        # Not before the end: a second connection after a closed one would wait forever.
        atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())
    return World(dist.get_rank(), dist.get_world_size())


@torch.no_grad()
def broadcast_(world: World, tensors: Iterable[Tensor]) -> None:
    """Give all processes the values of the first."""
    if world.size > 1:
        for tensor in tensors:
            dist.broadcast(tensor.detach(), 0)


def sum_(world: World, tensors: Iterable[Tensor]) -> None:
    """Sum tensors over processes, in place."""
    if world.size > 1:
        for tensor in tensors:
            dist.all_reduce(tensor)


@torch.no_grad()
def average_(
    world: World, loss: Tensor, parameters: Iterable[Tensor], rows: int, total: int | None
) -> Tensor:
    """Average gradients in place over processes, by their rows; return the loss, averaged too."""
    if world.size == 1:
        return loss
    if total is None:
        count = torch.tensor([rows], device=loss.device)
        sum_(world, [count])
        total = int(count)
    values = [loss.clone(), *(p.grad for p in parameters if p.grad is not None)]
    sum_(world, [value.mul_(rows / total) for value in values])
    return values[0]
