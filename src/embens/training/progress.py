"""What a run shows: a bar where `rich` is installed and there is a terminal, else lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor

_INTERVAL = 0.1  # seconds between updates of the bar
_SHOWN = {
    "loss": "loss",
    "ensemble_accuracy": "accuracy",
    "validation_loss": "validation loss",
    "validation_ensemble_accuracy": "validation accuracy",
}


class Progress:
    """A bar over all steps, a line for each epoch, or nothing.

    Shown if ``wanted``; None: if the error stream is a terminal. An epoch has so many steps, 0
    where that is not known.
    """

    def __init__(self, wanted: bool | None, epochs: int, steps: int):
        terminal = sys.stderr is not None and sys.stderr.isatty()
        self.epochs, self.wanted = epochs, terminal if wanted is None else wanted
        self.shown = 0.0
        self.bar = _bar(steps * epochs) if self.wanted and terminal else None

    @contextmanager
    def beginning(self, done: int) -> Iterator[None]:
        """Show the bar meanwhile; so many steps were done before."""
        self.done = self.before = done
        self.began = time.monotonic()
        with self.bar or nullcontext():
            yield
            if self.bar:
                self.bar.update(0, completed=self.done)

    def step(self, loss: Tensor, members: int) -> None:
        """Move the bar, a few times a second; the loss is the sum of the members'."""
        self.done += 1
        if self.bar is None or (now := time.monotonic()) - self.shown <= _INTERVAL:
            return
        self.shown = now
        rate = f"{(self.done - self.before) / max(now - self.began, 1e-9):.1f} steps/s"
        self.bar.update(0, completed=self.done, loss=f"{float(loss) / members:.4g}", rate=rate)

    def epoch(self, record: dict[str, Any]) -> None:
        values = ((name, record.get(key)) for key, name in _SHOWN.items())
        shown = [f"{name} {v:.4g}" for name, v in values if v is not None and v == v]
        shown.append(f"{record['seconds']:.2g} s")
        text = f"epoch {record['epoch']}/{self.epochs}: {', '.join(shown)}"
        if self.bar:
            self.bar.update(0, text=text)
        elif self.wanted:
            print(text, file=sys.stderr)


def _bar(steps: int) -> Any:
    try:
        from rich import progress
        from rich.console import Console
    except ImportError:
        return None
    fields = ("{task.fields[rate]}", "loss {task.fields[loss]}", "{task.fields[text]}")
    bar = progress.Progress(
        *(progress.BarColumn(), progress.MofNCompleteColumn(), progress.TimeElapsedColumn()),
        *(progress.TimeRemainingColumn(), *map(progress.TextColumn, fields)),
        console=Console(file=sys.stderr),
    )
    bar.add_task("", total=steps or None, loss="", text="", rate="")  # number 0
    return bar
