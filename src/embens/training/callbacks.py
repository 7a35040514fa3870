"""The callback protocol of :func:`embens.fit`, and callbacks that log.

A callback is an object of a subclass of :class:`Callback`, or a plain function of
``(ensemble, record)``, which is called after each epoch.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embens.checks import closest
from embens.ensemble import EmbeddedEnsemble
from embens.files import write_atomically

if TYPE_CHECKING:
    from embens.training.history import History
    from embens.training.options import Options
    from embens.training.run import Run

MOMENTS = ("on_start", "on_gradients", "on_step", "on_epoch", "on_end")


class Callback:
    """Base class of callbacks; override the methods you need.

    A callback that watches a run needs no more than these methods: it exists in the first process
    only, and random numbers that it draws do not change the run. A callback that changes training
    sets ``changes_training = True``: it then exists in every process, shares the run's random
    generators, and its :meth:`settings` identify the run in checkpoints.

    Example:
        >>> class PrintLoss(Callback):
        ...     def on_epoch(self, run, record):
        ...         print(f"epoch {record['epoch']}: {record['loss']:.3f}")
    """

    changes_training = False

    def setup(self, options: Options) -> None:
        """Change options before the run is built (see :class:`embens.training.Options`)."""

    def on_start(self, run: Run) -> None:
        """Called once before the first step."""

    def on_gradients(self, run: Run) -> None:
        """Called when the gradients of a step are complete, before the optimizer's step."""

    def on_step(self, run: Run) -> None:
        """Called after each step of the optimizer."""

    def on_epoch(self, run: Run, record: dict[str, Any]) -> None:
        """Called after each epoch with its row of ``history.epochs``."""

    def on_end(self, run: Run, history: History) -> None:
        """Called once at the end, with the result of ``fit``."""

    def settings(self) -> dict[str, Any]:
        """Return the settings that change the result: by default, all public attributes."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def state_dict(self) -> dict[str, Any]:
        """Return the state to be saved in checkpoints: tensors, numbers, strings, lists, dicts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""


class EpochFunction(Callback):
    """Call a function of ``(ensemble, record)`` after each epoch."""

    def __init__(self, function: Callable[[EmbeddedEnsemble, dict[str, Any]], object]):
        self.function = function

    def on_epoch(self, run: Run, record: dict[str, Any]) -> None:
        self.function(run.ensemble, record)


def as_callbacks(callbacks: Any) -> list[Callback]:
    """Return callbacks as a list of :class:`Callback`; raise TypeError for anything else."""
    if not isinstance(callbacks, Sequence):
        kind = type(callbacks).__name__
        raise TypeError(f"callbacks: expected a list of callbacks, got {kind}.")
    result: list[Callback] = []
    for callback in callbacks:
        if isinstance(callback, Callback):
            _check_names(callback)
            result.append(callback)
        elif callable(callback) and not isinstance(callback, type):
            result.append(EpochFunction(callback))
        else:
            raise TypeError(
                "callbacks: expected objects of a subclass of embens.training.Callback, or "
                f"functions of (ensemble, record); got {callback!r:.80}."
            )
    kinds = [type(callback) for callback in result if callback.changes_training]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise ValueError(f"callbacks has {kinds.count(kind)} {kind.__name__}; pass one.")
    return result


def _check_names(callback: Callback) -> None:
    """Raise if a method looks like one of the protocol but would never be called."""
    for name in dir(callback):
        if name.startswith("on_") and name not in MOMENTS:
            kind = type(callback).__name__
            raise TypeError(f"callbacks: {kind} has an unknown {name}{closest(name, MOMENTS)}")


class CSVLog(Callback):
    """Append a row per epoch to a CSV file.

    A run that resumes from a checkpoint continues its file: rows after the checkpoint are replaced.
    A run from the start replaces the file.

    Args:
        path: the file.

    Raises:
        ValueError: during the run, if the file has other columns.

    Example:
        >>> log = CSVLog("history.csv")
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._last_epoch: int | None = None

    def on_epoch(self, run: Run, record: dict[str, Any]) -> None:
        """Append the record."""
        epoch = record["epoch"]
        if self._last_epoch is None or epoch <= self._last_epoch:
            self._keep_rows_before(epoch, list(record))
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, list(record), lineterminator="\n").writerow(record)
        self._last_epoch = epoch

    def _keep_rows_before(self, epoch: int, columns: list[str]) -> None:
        header = ",".join(columns) + "\n"
        lines = []
        if self.path.exists():
            lines = self.path.read_text().splitlines(keepends=True)
        if lines and lines[0] != header:
            raise ValueError(f"{self.path} has other columns than this run; use another file.")
        kept = [header]
        for line in lines[1:]:
            # A line without an end is a write that was interrupted.
            complete = line.endswith("\n")
            if complete and int(line.split(",")[columns.index("epoch")]) < epoch:
                kept.append(line)
        write_atomically(self.path, "".join(kept))


class Log(Callback):
    """Pass the record of each epoch to a logger.

    Args:
        writer: an object with ``add_scalar(name, value, epoch)``, such as TensorBoard's
            ``SummaryWriter``, or with ``log(dict)``, such as a Weights & Biases run.

    Raises:
        TypeError: if the writer has neither method.

    Example:
        >>> class Printer:
        ...     def log(self, record):
        ...         print(record)
        >>> callback = Log(Printer())
    """

    def __init__(self, writer: Any):
        if not hasattr(writer, "log") and not hasattr(writer, "add_scalar"):
            kind = type(writer).__name__
            raise TypeError(f"writer: expected an object with log(dict) or add_scalar; got {kind}.")
        self.writer = writer

    def on_epoch(self, run: Run, record: dict[str, Any]) -> None:
        """Log the record."""
        if not hasattr(self.writer, "add_scalar"):
            self.writer.log(dict(record))
            return
        for name, value in record.items():
            if name != "epoch":
                self.writer.add_scalar(name, value, record["epoch"])
