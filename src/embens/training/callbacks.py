"""What is told of a run: callbacks, which :func:`embens.fit` tells what happens, and its progress.

A callback has any of ``on_step(ensemble, record)``, with the ``epoch``, the ``step`` of the run,
the mean ``loss`` of the members and the rates; ``on_epoch(ensemble, record)``, with a row of
``history.epochs``; and ``on_end(ensemble, history)``, with what ``fit`` is about to return. A plain
function is called as ``on_epoch``. What they draw at random does not change the run; of several
processes only the first has callbacks. Where one has ``state_dict`` and ``load_state_dict``, its
state is kept in the run's checkpoints.
"""

import csv
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor

from embens.checks import closest
from embens.files import write_atomically

MOMENTS = ("on_step", "on_epoch", "on_end")
_INTERVAL = 0.1  # seconds between updates of the bar
_SHOWN = ("loss", "ensemble_accuracy", "validation_loss", "validation_ensemble_accuracy")


def by_moment(callbacks: Sequence[Any]) -> dict[str, list[Callable]]:
    """Return the functions to call at each moment; refuse objects that would not be called."""
    if not isinstance(callbacks, Sequence):
        raise TypeError(f"callbacks: expected a list of them; got {type(callbacks).__name__}")
    found: dict[str, list[Callable]] = {moment: [] for moment in MOMENTS}
    for callback in callbacks:
        kind, names = type(callback).__name__, [n for n in dir(callback) if n.startswith("on_")]
        if not names and not callable(callback):
            raise TypeError(
                f"callbacks: expected functions, or objects with any of {', '.join(MOMENTS)}; got "
                f"{kind}. A logger goes into embens.training.Log(logger)."
            )
        if wrong := sorted({*names} - {*MOMENTS}):
            hint = closest(wrong[0], MOMENTS)
            raise TypeError(f"callbacks: {kind} has an unknown {wrong[0]}{hint}")
        for name in names or ["on_epoch"]:
            found[name].append(getattr(callback, name, callback))
    return found


class CSV:
    """Append a row for each epoch to a file.

    A run that goes on from a checkpoint goes on with its file: rows after the checkpoint are
    written again, not twice. A run that starts anew starts the file anew.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path, self._last = Path(path), -1

    def on_epoch(self, ensemble: Any, record: dict[str, Any]) -> None:
        epoch, columns = record["epoch"], list(record)
        if self._last < 0 or epoch <= self._last:  # keep the whole rows before this one
            lines = self.path.read_text().splitlines(keepends=True) if self.path.exists() else []
            header, column = ",".join(columns) + "\n", columns.index("epoch")
            if lines[:1] not in ([], [header]):
                raise ValueError(f"{self.path} has other columns than this run; use another file")
            rows = [line for line in lines[1:] if line.endswith("\n")]
            rows = [line for line in rows if int(line.split(",")[column]) < epoch]
            write_atomically(self.path, "".join([header, *rows]))
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, columns, lineterminator="\n").writerow(record)
        self._last = epoch


class Log:
    """Pass epochs on to a logger that has ``log(dict)`` or ``add_scalar(name, value, epoch)``."""

    def __init__(self, logger: Any):
        self.logger = logger
        if not hasattr(logger, "log") and not hasattr(logger, "add_scalar"):
            kind = type(logger).__name__
            raise TypeError(f"logger: expected one with log(dict) or add_scalar; got {kind}")

    def on_epoch(self, ensemble: Any, record: dict[str, Any]) -> None:
        if not hasattr(self.logger, "add_scalar"):
            self.logger.log(dict(record))
            return
        for name in record.keys() - {"epoch"}:
            self.logger.add_scalar(name, record[name], record["epoch"])


class Progress:
    """A bar over all steps, a line for each epoch, or nothing.

    Shown if ``wanted``; None: if the error stream is a terminal. An epoch has so many steps, 0
    where that is not known.
    """

    def __init__(self, wanted: bool | None, epochs: int, steps: int):
        terminal = sys.stderr is not None and sys.stderr.isatty()
        self.epochs, self.wanted = epochs, terminal if wanted is None else wanted
        self.shown: float = 0.0
        self.bar: Any = None
        if not (self.wanted and terminal):
            return
        try:
            from rich import progress
            from rich.console import Console
        except ImportError:
            return
        self.bar = progress.Progress(
            *(progress.BarColumn(), progress.MofNCompleteColumn(), progress.TimeElapsedColumn()),
            *(progress.TimeRemainingColumn(), progress.TextColumn("{task.fields[text]}")),
            console=Console(file=sys.stderr),
        )
        self.bar.add_task("", total=steps * epochs or None, text="")  # number 0

    def beginning(self, done: int) -> AbstractContextManager:
        """Return a context in which the bar is shown; so many steps were done before."""
        self.done = done
        return self.bar or nullcontext()

    def step(self, loss: Tensor, members: int) -> None:
        """Move the bar, a few times a second; the loss is the sum of the members'."""
        self.done += 1
        if self.bar is None or (now := time.monotonic()) - self.shown <= _INTERVAL:
            return
        self.shown = now
        text = f"{self.bar.tasks[0].speed or 0:.1f} steps/s, loss {float(loss) / members:.4g}"
        self.bar.update(0, completed=self.done, text=text)

    def epoch(self, record: dict[str, Any]) -> None:
        values = [(name, v) for name in _SHOWN if (v := record.get(name, math.nan)) == v]
        words = [f"{n.replace('ensemble_', '').replace('_', ' ')} {v:.4g}, " for n, v in values]
        text = f"epoch {record['epoch']}/{self.epochs}: {''.join(words)}{record['seconds']:.2g} s"
        if self.bar:
            self.bar.update(0, completed=self.done, text=text)
        elif self.wanted:
            print(text, file=sys.stderr)
