"""Callbacks that write the record of each epoch to a file or a logger."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embens.files import check_output, write_atomically
from embens.training.callbacks import Callback

if TYPE_CHECKING:
    from embens.training.run import Run


class CSVLog(Callback):
    """Append a row per epoch to a CSV file.

    A run that resumes from a checkpoint continues its file: rows after the checkpoint are replaced.
    A run from the start replaces the file.

    Args:
        path: The file.

    Raises:
        OSError: When the run starts, if no file can be written there.
        ValueError: When the run starts, if the file holds something else; after the first epoch,
            if it is the table of a run with other columns.

    Example:
        >>> log = CSVLog("history.csv")
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._last_epoch: int | None = None

    def on_start(self, run: Run) -> None:
        """Check that the file can be written, and holds nothing but such a table."""
        check_output(self.path)
        lines = self._lines()
        if lines and "epoch" not in lines[0].rstrip("\n").split(","):
            raise ValueError(f"{self.path} is not a table of this run; use another file.")

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
        lines = [header]
        lines += self._rows_before(epoch, header)
        write_atomically(self.path, "".join(lines))

    def _lines(self) -> list[str]:
        """Return the lines of the file; none if it does not exist."""
        if not self.path.exists():
            return []
        try:
            return self.path.read_text().splitlines(keepends=True)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self.path} is not a table of this run; use another file."
            ) from error

    def _rows_before(self, epoch: int, header: str) -> list[str]:
        """Return the rows of the file before an epoch."""
        lines = self._lines()
        if lines and lines[0] != header:
            raise ValueError(f"{self.path} has other columns than this run; use another file.")
        place = header.rstrip("\n").split(",").index("epoch")
        rows = []
        for number, line in enumerate(lines[1:], start=2):
            if not line.endswith("\n"):
                continue  # a write that was interrupted
            try:
                is_before = int(line.split(",")[place]) < epoch
            except (IndexError, ValueError) as error:
                raise ValueError(
                    f"line {number} of {self.path} is not a row of this run: "
                    f"{line.strip()[:40]!r}. Remove it, or use another file."
                ) from error
            if is_before:
                rows.append(line)
        return rows


class Log(Callback):
    """Pass the record of each epoch to a logger.

    Args:
        writer: An object with ``add_scalar(name, value, epoch)``, such as TensorBoard's
            ``SummaryWriter``, or with ``log(dict)``, such as a Weights & Biases run.

    Raises:
        TypeError: If the writer has neither method.

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
