"""Running averages of the weights."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from embens.checks import check_number
from embens.training.callbacks import Callback

if TYPE_CHECKING:
    from embens.training.run import Run


class WeightAveraging(Callback):
    r"""Validate, and end with, a running mean of the weights instead of the last weights.

    After step :math:`s`, the mean moves by

    .. math:: \bar w \leftarrow \bar w + \frac{w - \bar w}{\min(h, 1 + s/9)},

    where :math:`h` is the number of steps in ``epochs`` epochs. Buffers, such as statistics of norm
    layers, are copied. The mean is evaluated in full precision.

    Args:
        epochs: length of the average, a number above 0.

    Example:
        >>> callbacks = [WeightAveraging(epochs=2)]
    """

    changes_training = True

    def __init__(self, epochs: float):
        self.epochs = check_number("epochs", epochs, "a number above 0", lambda value: value > 0)
        self._average: Any = None

    def on_start(self, run: Run) -> None:
        """Copy the ensemble."""
        if run.steps_per_epoch == 0:
            raise ValueError(
                "WeightAveraging: the length of this loader is unknown; pass one with len()."
            )
        self._average = copy.deepcopy(run.ensemble)
        run.evaluated = self._average

    @torch.no_grad()
    def on_step(self, run: Run) -> None:
        """Update the average."""
        horizon = max(self.epochs * run.steps_per_epoch, 1.0)
        decay = 1 - 1 / min(horizon, 1 + run.steps / 9)
        means = [p.detach() for p in self._average.parameters()]
        weights = [p.detach() for p in run.ensemble.parameters()]
        get_ema_multi_avg_fn(decay)(means, weights, run.steps)
        buffers = zip(self._average.buffers(), run.ensemble.buffers(), strict=True)
        for copied, buffer in buffers:
            copied.copy_(buffer)

    def state_dict(self) -> dict[str, Any]:
        """Return the averaged weights."""
        return dict(self._average.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the averaged weights."""
        self._average.load_state_dict(state)
