r"""The paper's schedule of the rate.

What :math:`\gamma` does to rates is in :mod:`embens.ensemble.rates`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

MakeScheduler = Callable[[Optimizer], LRScheduler]


def linear_decay(epochs: int, *, hold: float = 0.5, final: float = 0.01) -> MakeScheduler:
    """Return the paper's schedule: a constant rate, then linearly down.

    Args:
        epochs: of the whole run.
        hold: fraction of the epochs with the full rate.
        final: fraction of the rate at the end; the last epoch comes one step short of it.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        >>> scheduler = linear_decay(8, final=0.0)(optimizer)
        >>> [scheduler.lr_lambdas[0](epoch) for epoch in range(8)]
        [1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if not 0 <= hold <= 1 or not 0 <= final <= 1:
        raise ValueError(f"hold and final are fractions from 0 to 1; got {hold} and {final}")

    def factor(epoch: int) -> float:
        left = (epochs - epoch) / max(epochs * (1 - hold), 1e-12)
        return final + (1 - final) * min(1.0, max(0.0, left))

    return lambda optimizer: LambdaLR(optimizer, factor)
