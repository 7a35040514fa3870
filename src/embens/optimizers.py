"""Kinds of optimizers: how they use gradients and weight decay."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

MakeOptimizer = Callable[[list[dict[str, Any]]], Optimizer]


@dataclass(frozen=True)
class OptimizerKind:
    """How an optimizer uses gradients and weight decay.

    Attributes:
        scale_free: Whether it takes the same step for a gradient and for any multiple of it.
        decoupled: Whether a scale-free optimizer multiplies its decay by the learning rate instead
            of adding it to the gradient.
    """

    scale_free: bool
    decoupled: bool


def measure_kind(optimizer: MakeOptimizer) -> OptimizerKind:
    """Return the kind of an optimizer, measured with steps of a small parameter.

    Args:
        optimizer: A class, or a function from parameter groups to an optimizer.

    Returns:
        The kind.

    Raises:
        TypeError: If it is neither, or its steps need a closure.

    Example:
        >>> measure_kind(torch.optim.RMSprop)
        OptimizerKind(scale_free=True, decoupled=False)
    """
    step = _tenth_step(optimizer, scale=1.0)
    scaled_step = _tenth_step(optimizer, scale=8.0)
    size = float(step.norm())
    if size == 0 or float((scaled_step - step).norm()) > 0.01 * size:
        return OptimizerKind(False, False)
    # Added to gradients of this size, the decay has no effect; multiplied by the rate, it has.
    plain_step = _tenth_step(optimizer, scale=1e6)
    decayed_step = _tenth_step(optimizer, scale=1e6, decay=0.5)
    decoupled = float((decayed_step - plain_step).norm()) > 0.01 * size
    return OptimizerKind(True, decoupled)


def _tenth_step(optimizer: MakeOptimizer, scale: float, decay: float = 0.0) -> Tensor:
    """Return the tenth step on fixed gradients; the first steps of RAdam are of another kind."""
    start = torch.linspace(1.0, 2.0, 6).reshape(2, 3)
    parameter = nn.Parameter(start.clone())
    groups = [{"params": [parameter], "lr": 0.01, "weight_decay": decay}]
    trial = optimizer(groups) if callable(optimizer) else optimizer
    if not callable(optimizer) or not isinstance(trial, Optimizer):
        raise TypeError(
            "optimizer must be a class or a function from parameter groups to an optimizer, such "
            f"as torch.optim.Adam or partial(torch.optim.SGD, momentum=0.9), got {trial!r}."
        )
    before = start
    for step in range(10):
        before = parameter.detach().clone()
        parameter.grad = scale * torch.cos(start * (3.0 + step) * 2)
        try:
            trial.step()
        except TypeError as error:
            raise TypeError(
                f"{type(trial).__name__} cannot take plain steps ({error}). Optimizers that need a "
                "closure need a hand-written training loop."
            ) from None
    return parameter.detach() - before
