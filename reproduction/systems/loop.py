"""One plain training loop, shared by all systems."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

import embens

Data = tuple[Tensor, Tensor]
"""Inputs and targets with one row per sample."""

Criterion = Callable[[Tensor, Tensor], Tensor]
"""Loss of one member: a function of its outputs and the targets."""

Loss = Callable[[Tensor, Tensor], Tensor]
"""Scalar training loss: a function of the inputs and targets of one batch."""

Rate = Callable[[int, int], float]
"""Factor of the learning rate: a function of the step, counted from 0, and the total steps."""

Order = Callable[[int, torch.Generator], Tensor]
"""Order of the samples in an epoch: a function of their number and a generator.

The result has shape ``(row,)``, or ``(member, row)`` for per-member batches.
"""


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of a training run with SGD.

    Attributes:
        epochs: Number of passes over the training data.
        lr: Learning rate, before the factor of a schedule.
        batch_size: Samples per step.
        weight_decay: Weight decay of SGD.
        momentum: Momentum of SGD.
        label_smoothing: Label smoothing of cross-entropy; only for ``criterion=None``.
        criterion: Loss of one network. None selects cross-entropy for integer targets and squared
            error for floating ones, as in ``embens.objective``.
        seed: Seed of the sample order. Dropout uses torch's global generator.

    Example:
        >>> Recipe(epochs=10, lr=0.05).momentum
        0.9
    """

    epochs: int
    lr: float = 0.1
    batch_size: int = 128
    weight_decay: float = 5e-4
    momentum: float = 0.9
    label_smoothing: float = 0.0
    criterion: Criterion | None = None
    seed: int = 0

    def optimizer(self, parameters: Any) -> Optimizer:
        """Return SGD with these hyperparameters.

        Args:
            parameters: Parameters, or parameter groups whose settings take precedence.
        """
        return SGD(parameters, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the loss of one network.

        Args:
            outputs: Outputs of the network, ``(batch, class)``.
            target: Targets, ``(batch,)`` or ``(batch, class)``.
        """
        criterion = self.criterion
        if self.label_smoothing > 0:
            if criterion is not None:
                raise ValueError(
                    f"label_smoothing={self.label_smoothing} needs criterion=None; "
                    "apply the smoothing inside the criterion instead."
                )
            criterion = partial(F.cross_entropy, label_smoothing=self.label_smoothing)
        return embens.objective(outputs.unsqueeze(0), target, criterion)

    def steps(self, rows: int) -> int:
        """Return the number of optimizer steps on a data set with this many rows."""
        return self.epochs * math.ceil(rows / self.batch_size)


def constant(step: int, steps: int) -> float:
    """Return 1, the factor of a constant learning rate.

    Args:
        step: Step of the run, from 0.
        steps: Number of steps of the run.
    """
    return 1.0


def linear_decay(step: int, steps: int) -> float:
    """Return the paper's schedule: constant for half of the run, then linear down to 1 %.

    This is the default schedule of ``embens.fit``, applied per step instead of per epoch.

    Args:
        step: Step of the run, from 0.
        steps: Number of steps of the run.

    Example:
        >>> [round(linear_decay(step, 4), 3) for step in range(5)]
        [1.0, 1.0, 1.0, 0.505, 0.01]
    """
    remaining = 2 * (steps - step) / steps
    return 0.01 + 0.99 * min(1.0, remaining)


def shuffle(rows: int, generator: torch.Generator) -> Tensor:
    """Return a random order of the samples, ``(row,)``.

    Args:
        rows: Number of samples.
        generator: Source of randomness.
    """
    return torch.randperm(rows, generator=generator)


def train(
    loss: Loss,
    optimizer: Optimizer,
    data: Data,
    recipe: Recipe,
    *,
    rate: Rate = linear_decay,
    order: Order = shuffle,
    after_step: Callable[[int], None] | None = None,
) -> None:
    """Minimise a loss over batches of the data.

    Args:
        loss: Training loss of one batch.
        optimizer: Optimizer of the parameters behind the loss.
        data: Training inputs and targets. Batches are moved to the device of the parameters.
        recipe: Epochs, batch size and seed of the run.
        rate: Factor of the optimizer's learning rates at each step.
        order: Order of the samples in an epoch.
        after_step: Called after every step with the number of finished steps.

    Raises:
        ArithmeticError: If the loss is not finite.

    Example:
        >>> weight = torch.zeros((), requires_grad=True)
        >>> data = (torch.ones(8), torch.full((8,), 3.0))
        >>> recipe = Recipe(epochs=50, lr=0.5, momentum=0.0, weight_decay=0.0)
        >>> train(
        ...     lambda x, y: (weight * x - y).square().mean() / 2,
        ...     recipe.optimizer([weight]),
        ...     data,
        ...     recipe,
        ... )
        >>> round(weight.item(), 3)
        3.0
    """
    inputs, target = data
    device = optimizer.param_groups[0]["params"][0].device
    generator = torch.Generator().manual_seed(recipe.seed)
    base_rates = [group["lr"] for group in optimizer.param_groups]
    steps = recipe.steps(len(target))
    step = 0
    for _ in range(recipe.epochs):
        for rows in order(len(target), generator).split(recipe.batch_size, dim=-1):
            for group, base_rate in zip(optimizer.param_groups, base_rates, strict=True):
                group["lr"] = base_rate * rate(step, steps)
            value = loss(inputs[rows].to(device), target[rows].to(device))
            if not math.isfinite(value.item()):
                raise ArithmeticError(
                    f"the loss is {value.item()} at step {step}; use a smaller learning rate."
                )
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            step += 1
            if after_step is not None:
                after_step(step)


def train_network(
    network: nn.Module,
    data: Data,
    recipe: Recipe,
    *,
    rate: Rate = linear_decay,
    after_step: Callable[[int], None] | None = None,
) -> None:
    """Train a plain network in place, in training mode.

    Args:
        network: Network with outputs ``(batch, class)``.
        data: Training inputs and targets.
        recipe: Hyperparameters of the run.
        rate: Factor of the learning rate at each step.
        after_step: Called after every step with the number of finished steps.

    Example:
        >>> network = nn.Linear(2, 2)
        >>> x = torch.randn(64, 2)
        >>> train_network(network, (x, (x[:, 0] > 0).long()), Recipe(epochs=30, lr=0.5))
        >>> accuracy = (network(x).argmax(1) == (x[:, 0] > 0)).float().mean()
        >>> bool(accuracy > 0.9)
        True
    """
    network.train()

    def loss(inputs: Tensor, target: Tensor) -> Tensor:
        return recipe.loss(network(inputs), target)

    train(
        loss,
        recipe.optimizer(network.parameters()),
        data,
        recipe,
        rate=rate,
        after_step=after_step,
    )
