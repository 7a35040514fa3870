r"""The course of training: averaged weights, the rate, and when it is enough.

What is judged on held-out rows, and kept, is not the weights of the last step but their running
average :math:`\bar w \leftarrow \bar w + (w - \bar w) / \min(h, 1 + s/9)` over the last :math:`h`
steps or so, which moves far less from epoch to epoch. The rate rises during the first epoch and
falls along a cosine, by the epochs that are done or the time that is spent, whichever is further.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import get_ema_multi_avg_fn

from embens.ensemble import EmbeddedEnsemble
from embens.training import History

HORIZON = 2.0  # epochs that are averaged over
FLOOR = 0.02  # of the rate, at the end


class Enough(Exception):
    """Training may end: patience, or time, is over."""


class Averaging:
    """Callback of :func:`embens.fit` that averages weights and keeps the best average.

    ``judge`` returns the loss of an ensemble on held-out rows, and of each member; None: there are
    no such rows, and the last average is kept.
    """

    def __init__(
        self,
        ensemble: EmbeddedEnsemble,
        judge: Callable[[EmbeddedEnsemble], tuple[float, list[float]]] | None,
        *,
        steps: int,
        epochs: int,
        patience: int,
        seconds: float = math.inf,
    ):
        self.judge, self.steps, self.epochs = judge, steps, epochs
        self.patience, self.seconds, self.began = patience, seconds, time.monotonic()
        self.averaged = copy.deepcopy(ensemble)
        self.weights, self.average = (
            [p.detach() for p in some.parameters() if p.requires_grad]
            for some in (ensemble, self.averaged)
        )
        self.best = self.average
        self.step, self.loss = 0, math.inf
        self.history = History([], [])

    def done(self) -> float:
        """Return the share of the run that is over, by epochs or by time."""
        spent = (time.monotonic() - self.began) / self.seconds
        return min(1.0, max(self.step / (self.steps * self.epochs), spent))

    def scheduler(self, optimizer: Any) -> LambdaLR:
        """Return the scheduler of the run, which makes a step after each of the optimizer."""

        def factor(step: int) -> float:
            fall = FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * self.done())) / 2
            return min(1.0, (step + 1) / self.steps) * fall

        return LambdaLR(optimizer, factor)

    def on_step(self, ensemble: EmbeddedEnsemble, record: dict[str, Any]) -> None:
        self.step += 1
        kept = 1 - 1 / min(HORIZON * self.steps, 1 + self.step / 9)
        get_ema_multi_avg_fn(kept)(self.average, self.weights, self.step)
        if time.monotonic() - self.began > self.seconds:
            if not self.history.epochs:
                self.on_epoch(ensemble, record | {"seconds": self.seconds})
            self._end("time")

    def on_epoch(self, ensemble: EmbeddedEnsemble, record: dict[str, Any]) -> None:
        epoch, loss, members = record["epoch"], math.nan, []
        if self.judge is not None:
            loss, members = self.judge(self.averaged)
            record |= {"metric": loss, "validation_loss": sum(members) / len(members)}
        self.history.epochs.append(record)
        rows = ({"epoch": epoch, "member": a, "validation_loss": m} for a, m in enumerate(members))
        self.history.members.extend(rows)
        if self.judge is None or loss < self.loss or not self.history.best_epoch:
            self.loss, self.best = loss, [tensor.clone() for tensor in self.average]
            self.history = replace(self.history, best_epoch=epoch)
        elif epoch - self.history.best_epoch >= self.patience:
            self._end("patience")

    def keep_best(self) -> None:
        """Give the ensemble the best average."""
        for weight, tensor in zip(self.weights, self.best, strict=True):
            weight.copy_(tensor)

    def _end(self, why: Any) -> None:
        self.history = replace(self.history, stopped=why)
        raise Enough(why)
