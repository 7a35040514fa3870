"""A progress bar for a run: `rich` where it is installed, else a line for each epoch.

Quiet unless the standard error stream is a terminal, or the caller asks for it.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from torch import Tensor

_INTERVAL = 0.1  # seconds between updates of the bar


class Silent:
    """Shows nothing."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def start(self, done: int) -> None:
        """Say that so many steps were done before."""

    def step(self, loss: Tensor, members: int) -> None:
        """Show that a step was done, and the sum of the members' losses in it."""

    def epoch(self, record: dict[str, Any]) -> None:
        """Show how an epoch ended."""


class Lines(Silent):
    """One plain line for each epoch."""

    def __init__(self, epochs: int):
        self.epochs = epochs

    def epoch(self, record: dict[str, Any]) -> None:
        """Print the line."""
        print(f"epoch {record['epoch']}/{self.epochs}: {describe(record)}", file=sys.stderr)


class Bar(Silent):
    """A bar over all steps with losses, rate and time left."""

    def __init__(self, epochs: int, steps: int):
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self.epochs, self.done, self.shown = epochs, 0, 0.0
        self.began, self.before = time.monotonic(), 0
        self.bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[text]}"),
            console=Console(file=sys.stderr),
        )
        total = steps * epochs or None
        self.task = self.bar.add_task("", total=total, loss="", text="", rate="")

    def __enter__(self) -> Bar:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.update(self.task, completed=self.done)
        self.bar.stop()

    def start(self, done: int) -> None:
        """Say that so many steps were done before."""
        self.done = self.before = done

    def step(self, loss: Tensor, members: int) -> None:
        """Move the bar, a few times a second."""
        self.done += 1
        now = time.monotonic()
        if now - self.shown > _INTERVAL:
            self.shown = now
            rate = f"{(self.done - self.before) / max(now - self.began, 1e-9):.1f} steps/s"
            self.bar.update(
                self.task, completed=self.done, loss=f"{float(loss) / members:.4g}", rate=rate
            )

    def epoch(self, record: dict[str, Any]) -> None:
        """Show the last epoch beside the bar."""
        text = f"epoch {record['epoch']}/{self.epochs}: {describe(record)}"
        self.bar.update(self.task, text=text)


def describe(record: dict[str, Any]) -> str:
    """Return the main numbers of an epoch as text."""
    names = {
        "loss": "loss",
        "ensemble_accuracy": "accuracy",
        "validation_loss": "validation loss",
        "validation_ensemble_accuracy": "validation accuracy",
    }
    values = ((name, record.get(key)) for key, name in names.items())
    shown = [
        f"{name} {value:.4g}" for name, value in values if value is not None and value == value
    ]
    return ", ".join([*shown, f"{record['seconds']:.2g} s"])


def make_progress(progress: bool | None, epochs: int, steps: int) -> Silent:
    """Return what shows the progress: None: a bar if the error stream is a terminal."""
    terminal = sys.stderr is not None and sys.stderr.isatty()
    if progress is False or (progress is None and not terminal):
        return Silent()
    if not terminal:
        return Lines(epochs)
    try:
        return Bar(epochs, steps)
    except ImportError:
        return Lines(epochs)
