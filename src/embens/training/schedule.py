"""The paper's learning-rate schedule."""

from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

MakeScheduler = Callable[[Optimizer], LRScheduler]


def linear_decay(epochs: int, *, hold: float = 0.5, final: float = 0.01) -> MakeScheduler:
    """Return the paper's schedule: constant, then linearly decreasing.

    Args:
        epochs: epochs of the whole run.
        hold: fraction of the epochs with the full rate.
        final: fraction of the rate after the last epoch.

    Returns:
        A function from an optimizer to a scheduler that makes one step per epoch.

    Raises:
        ValueError: if ``hold`` or ``final`` is not between 0 and 1.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        >>> scheduler = linear_decay(8, final=0.0)(optimizer)
        >>> [scheduler.lr_lambdas[0](epoch) for epoch in range(8)]
        [1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if not 0 <= hold <= 1 or not 0 <= final <= 1:
        raise ValueError(f"hold and final must be between 0 and 1, got {hold} and {final}.")
    decaying_epochs = max(epochs * (1 - hold), 1e-12)

    def factor(epoch: int) -> float:
        remaining = (epochs - epoch) / decaying_epochs
        return final + (1 - final) * min(1.0, max(0.0, remaining))

    def make(optimizer: Optimizer) -> LRScheduler:
        return LambdaLR(optimizer, factor)

    return make
