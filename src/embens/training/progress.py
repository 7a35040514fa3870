"""A progress bar for a run: `rich` where it is installed, else a line for each epoch.

Quiet unless the standard error stream is a terminal, or the caller asks for it.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from torch import Tensor

_INTERVAL = 0.1  # seconds between updates of the bar
_SHOWN = {
    "loss": "loss",
    "ensemble_accuracy": "accuracy",
    "validation_loss": "validation loss",
    "validation_ensemble_accuracy": "validation accuracy",
}


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
        print(self.describe(record), file=sys.stderr)

    def describe(self, record: dict[str, Any]) -> str:
        """Return the main numbers of an epoch as text."""
        values = ((name, record.get(key)) for key, name in _SHOWN.items())
        shown = [f"{name} {v:.4g}" for name, v in values if v is not None and v == v]
        shown.append(f"{record['seconds']:.2g} s")
        return f"epoch {record['epoch']}/{self.epochs}: {', '.join(shown)}"


class Bar(Lines):
    """A bar over all steps with losses, rate and time left."""

    def __init__(self, epochs: int, steps: int):
        from rich import progress
        from rich.console import Console

        super().__init__(epochs)
        self.done = self.before = 0
        self.began, self.shown = time.monotonic(), 0.0
        fields = ("{task.fields[rate]}", "loss {task.fields[loss]}", "{task.fields[text]}")
        self.bar = progress.Progress(
            *(progress.BarColumn(), progress.MofNCompleteColumn(), progress.TimeElapsedColumn()),
            *(progress.TimeRemainingColumn(), *map(progress.TextColumn, fields)),
            console=Console(file=sys.stderr),
        )
        self.task = self.bar.add_task("", total=steps * epochs or None, loss="", text="", rate="")

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
            mean = f"{float(loss) / members:.4g}"
            self.bar.update(self.task, completed=self.done, loss=mean, rate=rate)

    def epoch(self, record: dict[str, Any]) -> None:
        """Show the last epoch beside the bar."""
        self.bar.update(self.task, text=self.describe(record))


def make_progress(progress: bool | None, epochs: int, steps: int) -> Silent:
    """Return what shows the progress: None: a bar if the error stream is a terminal."""
    terminal = sys.stderr is not None and sys.stderr.isatty()
    if progress is False or (progress is None and not terminal):
        return Silent()
    try:
        return Bar(epochs, steps) if terminal else Lines(epochs)
    except ImportError:
        return Lines(epochs)
