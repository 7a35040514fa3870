"""Callbacks that end a run early."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from embens.checks import check_number, check_whole
from embens.training.callbacks import Callback
from embens.training.options import Metric, Options, is_larger_better

if TYPE_CHECKING:
    from embens.training.run import Run


class EarlyStopping(Callback):
    """Stop after ``patience`` epochs without a better metric on the validation data.

    The ensemble ends with the weights of the best epoch; add :class:`KeepLast` to keep the last.

    Args:
        patience: number of epochs.
        metric: as for :class:`KeepBest`.
        maximise: as for :class:`KeepBest`.

    Example:
        >>> callbacks = [EarlyStopping(10, metric="loss")]
    """

    changes_training = True

    def __init__(self, patience: int, metric: Metric = None, maximise: bool | None = None):
        if metric is not None:
            is_larger_better(metric, maximise)
        self.patience = check_whole("patience", patience)
        self.metric = metric
        self.maximise = maximise

    def setup(self, options: Options) -> None:
        """Set ``options.metric``."""
        options.choose_metric(self.metric, self.maximise)

    def on_start(self, run: Run) -> None:
        """Raise ValueError without validation data."""
        if run.validation is None:
            raise ValueError("EarlyStopping needs validation data, got validation=None.")

    def on_epoch(self, run: Run, record: dict[str, Any]) -> None:
        """Stop if the best epoch is too long ago."""
        if math.isnan(record["metric"]):
            return
        best_epoch = run.best_epoch or 0
        if run.epoch - best_epoch >= self.patience:
            run.stop("patience")


class TimeLimit(Callback):
    """Stop after a number of seconds; the epoch that is cut short is validated.

    With a :class:`Checkpoint` the next run continues where this one stopped.

    Args:
        seconds: of wall-clock time, above 0.

    Example:
        >>> callbacks = [TimeLimit(3600)]
    """

    changes_training = True

    def __init__(self, seconds: float):
        self.seconds = check_number("seconds", seconds, "a number above 0", lambda value: value > 0)
        self._deadline = math.inf

    def settings(self) -> dict[str, Any]:
        """Return nothing: a run may continue with another limit."""
        return {}

    def on_start(self, run: Run) -> None:
        """Start the clock."""
        self._deadline = time.monotonic() + self.seconds

    def on_step(self, run: Run) -> None:
        """Stop after the deadline of the first process, in all processes at the same step."""
        if run.agree(time.monotonic() > self._deadline):
            run.stop("time")
