"""Progress of a run on the error stream."""

from __future__ import annotations

import math
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

UPDATE_INTERVAL = 0.1
"""Seconds between two updates of the progress bar."""
COLUMNS = {
    "loss": "loss",
    "ensemble_accuracy": "accuracy",
    "rmse": "RMSE",
    "validation_loss": "validation loss",
    "validation_ensemble_accuracy": "validation accuracy",
    "validation_nll": "validation NLL",
    "validation_rmse": "validation RMSE",
}
"""Columns of the history that are shown, with their labels."""


class Progress:
    """A progress bar, a line for each epoch, or nothing.

    Args:
        show: False: nothing; None: a bar in a terminal (with ``rich``), and lines elsewhere; True:
            the same.
        epochs: Number of epochs.
        steps: Steps per epoch; 0 if unknown.
    """

    def __init__(self, show: bool | None, epochs: int, steps: int):
        terminal = sys.stderr is not None and sys.stderr.isatty()
        self.show = show is not False
        self.epochs = epochs
        self.updated = 0.0
        self.bar: Any = None
        if not self.show or not terminal:
            return
        try:
            from rich import progress
            from rich.console import Console
        except ImportError:
            return
        self.bar = progress.Progress(
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[text]}"),
            console=Console(file=sys.stderr),
        )
        self.task = self.bar.add_task("", total=steps * epochs or None, text="")

    def running(self) -> AbstractContextManager:
        """Return a context in which the bar is visible."""
        if self.bar is None:
            return nullcontext()
        return self.bar

    def step(self, run: Any) -> None:
        """Update the bar after a step, at most a few times per second."""
        if self.bar is None:
            return
        now = time.monotonic()
        if now - self.updated < UPDATE_INTERVAL:
            return
        self.updated = now
        speed = self.bar.tasks[self.task].speed or 0.0
        text = f"{speed:.1f} steps/s, loss {run.loss:.4g}"
        self.bar.update(self.task, completed=run.steps, text=text)

    def epoch(self, run: Any, record: dict[str, Any]) -> None:
        """Show the record of an epoch."""
        if not self.show or sys.stderr is None:
            return
        parts = []
        for column, label in COLUMNS.items():
            value = record.get(column, math.nan)
            if not math.isnan(value):
                parts.append(f"{label} {value:.4g}")
        parts.append(f"{record['seconds']:.2g} s")
        text = f"epoch {record['epoch']}/{self.epochs}: {', '.join(parts)}"
        if self.bar is None:
            print(text, file=sys.stderr)
        else:
            self.bar.update(self.task, completed=run.steps, text=text)
