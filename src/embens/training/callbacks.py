"""Callbacks: objects that :func:`embens.fit` tells what happens, and two that write it down.

A callback has any of ``on_step(ensemble, record)``, with the ``epoch``, the ``step`` of the run,
the mean ``loss`` of the members and the rates; ``on_epoch(ensemble, record)``, with a row of
``history.epochs``; and ``on_end(ensemble, history)``, with what ``fit`` is about to return. A plain
function is called as ``on_epoch``. What they draw at random does not change the run; of several
processes only the first has callbacks. Where one has ``state_dict`` and ``load_state_dict``, its
state is kept in the run's checkpoints.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from embens.checks import check_choice, closest
from embens.files import write_atomically

MOMENTS = ("on_step", "on_epoch", "on_end")
_EACH: tuple[Literal["epoch", "step"], ...] = ("epoch", "step")


def by_moment(callbacks: Sequence[Any]) -> dict[str, list[Callable]]:
    """Return the functions to call at each moment; refuse objects that would not be called."""
    found: dict[str, list[Callable]] = {moment: [] for moment in MOMENTS}
    if not isinstance(callbacks, Sequence):
        raise TypeError(f"callbacks: expected a list of them; got {type(callbacks).__name__}")
    for callback in callbacks:
        kind, names = type(callback).__name__, [n for n in dir(callback) if n.startswith("on_")]
        for name in names:
            if name not in MOMENTS:
                raise TypeError(f"callbacks: {kind} has an unknown {name}{closest(name, MOMENTS)}")
            found[name].append(getattr(callback, name))
        if not names and not callable(callback):
            raise TypeError(
                f"callbacks: expected functions, or objects with any of {', '.join(MOMENTS)}; got "
                f"{kind}. A logger goes into embens.training.Log(logger)."
            )
        if not names:
            found["on_epoch"].append(callback)
    return found


class CSV:
    """Append a row for each epoch, or for each step, to a file.

    A run that goes on from a checkpoint goes on with its file: rows after the checkpoint are
    written again, not twice. A run that starts anew starts the file anew.
    """

    def __init__(self, path: str | os.PathLike[str], each: Literal["epoch", "step"] = "epoch"):
        self.path, self.each, self._last = Path(path), check_choice("each", each, _EACH), -1
        setattr(self, f"on_{each}", self.write)

    def write(self, ensemble: Any, record: dict[str, Any]) -> None:
        if self._last < 0 or record[self.each] <= self._last:
            self._begin(list(record), record[self.each])
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, list(record), lineterminator="\n").writerow(record)
        self._last = record[self.each]

    def _begin(self, columns: list[str], first: int) -> None:
        """Keep the header and the whole rows before the first that is going to be written."""
        lines = self.path.read_text().splitlines(keepends=True) if self.path.exists() else []
        header, column = ",".join(columns) + "\n", columns.index(self.each)
        if lines[:1] not in ([], [header]):
            raise ValueError(f"{self.path} has other columns than this run; use another file")
        rows = [line for line in lines[1:] if line.endswith("\n")]
        rows = [line for line in rows if int(line.split(",")[column]) < first]
        write_atomically(self.path, "".join([header, *rows]))


class Log:
    """Pass records on to a logger that has ``log(dict)`` or ``add_scalar(name, value, step)``."""

    def __init__(self, logger: Any, each: Literal["epoch", "step"] = "epoch"):
        self.logger, self.each = logger, check_choice("each", each, _EACH)
        setattr(self, f"on_{each}", self.write)
        if not hasattr(logger, "log") and not hasattr(logger, "add_scalar"):
            kind = type(logger).__name__
            raise TypeError(f"logger: expected one with log(dict) or add_scalar; got {kind}")

    def write(self, ensemble: Any, record: dict[str, Any]) -> None:
        if not hasattr(self.logger, "add_scalar"):
            self.logger.log(dict(record))
            return
        for name, value in record.items():
            if name not in ("epoch", "step"):
                self.logger.add_scalar(name, value, record[self.each])
