"""The history of a run, the metrics of an epoch, and progress on the error stream."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from embens.checks import check_choice

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

BUFFER_SIZE = 2**20
"""Number of buffered outputs after which they are counted."""
UPDATE_INTERVAL = 0.1
"""Seconds between two updates of the progress bar."""
PROGRESS_COLUMNS = {
    "loss": "loss",
    "ensemble_accuracy": "accuracy",
    "validation_loss": "validation loss",
    "validation_ensemble_accuracy": "validation accuracy",
}


@dataclass(frozen=True)
class History:
    """The result of :func:`embens.fit`.

    Training columns are measured during the epoch, while the weights change. Undefined values are
    NaN: the accuracy of a regression, a correlation without pairs, the rate of a group that does
    not exist.

    Attributes:
        members: one row per epoch and member with ``epoch``, ``member``, ``loss``, ``accuracy``
            and, with validation data, ``validation_loss`` and ``validation_accuracy``.
        epochs: one row per epoch with ``epoch``, ``loss`` (mean over members),
            ``ensemble_accuracy``, ``correlation`` (of correctness between members), the same three
            with the prefix ``validation_``, ``metric`` (selects the best epoch), ``lr`` (rate of
            the shared parameters, gamma included), ``modulation_lr``, ``gradient_norm_shared`` and
            ``gradient_norm_individual`` (at the first step of the epoch) and ``seconds``.
        best_epoch: the epoch with the best metric; None without validation data.
        stopped: why the run ended: "epochs", "patience", "time", or the reason that a callback
            passed to ``run.stop``.

    Example:
        >>> history = History([], [{"epoch": 1, "loss": 0.5}])
        >>> history.epochs[-1]["loss"]
        0.5
    """

    members: list[dict[str, Any]] = field(repr=False)
    epochs: list[dict[str, Any]] = field(repr=False)
    best_epoch: int | None = None
    stopped: str = "epochs"

    def to_pandas(self, table: Literal["epochs", "members"] = "epochs") -> pandas.DataFrame:
        """Return one of the two tables as a data frame."""
        import pandas

        check_choice("table", table, ("epochs", "members"))
        return pandas.DataFrame(getattr(self, table))

    def plot(self) -> Figure:
        """Plot losses and, for classification, accuracies.

        Thin lines are members, thick lines the ensemble. Validation is dashed. A vertical line
        marks the best epoch.
        """
        from matplotlib.figure import Figure

        columns = {"loss": "loss"}
        if any(not math.isnan(row["ensemble_accuracy"]) for row in self.epochs):
            columns["accuracy"] = "ensemble_accuracy"
        figure = Figure(figsize=(5.0 * len(columns), 3.5), layout="constrained")
        for position, (member_column, ensemble_column) in enumerate(columns.items(), 1):
            axes = figure.add_subplot(
                1, len(columns), position, xlabel="epoch", ylabel=member_column
            )
            self._draw(axes, member_column, ensemble_column, "", "-", "training")
            self._draw(axes, member_column, ensemble_column, "validation_", "--", "validation")
            if self.best_epoch is not None:
                axes.axvline(self.best_epoch, color="grey", lw=0.5)
            axes.legend()
        return figure

    def _draw(
        self,
        axes: Any,
        member_column: str,
        ensemble_column: str,
        prefix: str,
        style: str,
        label: str,
    ) -> None:
        epochs = [row["epoch"] for row in self.epochs]
        members = len(self.members) // max(len(epochs), 1)
        for a in range(members):
            rows = self.members[a::members]
            values = [row.get(prefix + member_column, math.nan) for row in rows]
            axes.plot(epochs, values, "C0" + style, lw=0.5, alpha=0.5)
        values = [row.get(prefix + ensemble_column, math.nan) for row in self.epochs]
        axes.plot(epochs, values, "k" + style, label=label)


def make_history(
    records: Sequence[dict[str, Any]], best_epoch: int | None, stopped: str
) -> History:
    """Build the two tables from the records of a run.

    Args:
        records: one dict per epoch; lists hold one value per member.
        best_epoch: the epoch with the best metric, if any.
        stopped: why the run ended.
    """
    epochs, members = [], []
    for record in records:
        epochs.append(epoch_row(record))
        columns = {}
        for name, value in record.items():
            if isinstance(value, list):
                columns[name.replace("member_", "")] = value
        for a in range(len(columns["loss"])):
            row = {"epoch": record["epoch"], "member": a}
            for name, values in columns.items():
                row[name] = values[a]
            members.append(row)
    return History(members, epochs, best_epoch, stopped)


def epoch_row(record: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a record that are not lists: a row of ``History.epochs``."""
    return {name: value for name, value in record.items() if not isinstance(value, list)}


class Tally:
    """Accumulate the losses and accuracies of members over batches.

    Batches wait in a buffer and are counted many at a time: a dozen small operations per step
    would slow down small networks noticeably.

    Args:
        members: number of members.
        batch: how the ensemble was called: "same", "own" or "split".
        device: of the sums.

    Attributes:
        sums: by name. Per member, ``(member,)``: ``loss``, the sum of losses over ``rows`` rows;
            ``correct``, the number of correct answers among ``labelled`` rows (labels to ignore
            are excluded). If all members see the same rows: ``both_correct``,
            ``(member, member)``, the rows on which two members are correct; and
            ``ensemble_correct``, those on which the mean output is.

    Example:
        >>> tally = Tally(2)
        >>> outputs = torch.tensor([[[2.0, 1.0]], [[0.0, 1.0]]])
        >>> tally.add(torch.tensor([0.1, 0.3]), outputs, torch.tensor([0]), rows=1)
        >>> tally.summary()["member_accuracy"]
        [1.0, 0.0]
    """

    def __init__(self, members: int, batch: str = "same", device: torch.device | str = "cpu"):
        self.members = members
        self.batch = batch
        shapes: dict[str, tuple[int, ...]] = {
            "loss": (members,),
            "rows": (members,),
            "correct": (members,),
            "labelled": (members,),
            "both_correct": (members, members),
            "ensemble_correct": (),
        }
        self.sums = {}
        for name, shape in shapes.items():
            self.sums[name] = torch.zeros(shape, device=device, dtype=torch.float64)
        self._clear()

    def _clear(self) -> None:
        self._losses: list[Tensor] = []
        self._rows: list[int] = []
        self._outputs: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._size = 0

    def add(self, losses: Tensor, outputs: Any, target: Any, rows: int) -> None:
        """Add a batch.

        Args:
            losses: mean losses of the members, ``(member,)``.
            outputs: outputs of the ensemble; counted if they are logits.
            target: the target; counted if it holds class indices.
            rows: number of rows (per member, if each has its own batch).
        """
        self._losses.append(losses.detach())
        self._rows.append(rows)
        if not self._is_classification(outputs, target):
            return
        self._outputs.append(outputs.detach())
        self._targets.append(target)
        self._size += outputs.numel()
        if self._size > BUFFER_SIZE:
            self.flush()

    def _is_classification(self, outputs: Any, target: Any) -> bool:
        """Return whether outputs are logits of classes and the target their indices."""
        if not isinstance(outputs, Tensor) or not isinstance(target, Tensor):
            return False
        if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
            return False
        axes = 2 if self.batch == "split" else 3
        if outputs.dim() != axes or outputs.shape[-1] < 2:
            return False
        rows = outputs.shape[1:-1] if self.batch == "same" else outputs.shape[:-1]
        return target.shape == rows

    @torch.no_grad()
    def flush(self) -> None:
        """Count the buffered batches."""
        if self._losses:
            self._count_losses()
        if self._outputs:
            self._count_answers()
        self._clear()

    def _count_losses(self) -> None:
        losses = self._losses
        if self.batch == "split":
            # Row i belongs to member i mod M: in a small batch the last members have no rows.
            weights = []
            for rows in self._rows:
                weights.append([len(range(a, rows, self.members)) for a in range(self.members)])
            losses = [F.pad(values, (0, self.members - len(values))) for values in losses]
        else:
            weights = [[rows] for rows in self._rows]
        weight = torch.tensor(weights, dtype=torch.float64).to(self.sums["loss"].device)
        self.sums["loss"] += (weight * torch.stack(losses)).sum(0)
        self.sums["rows"] += weight.sum(0)

    def _count_answers(self) -> None:
        outputs = torch.cat(self._outputs, 0 if self.batch == "split" else 1)
        target = torch.cat(self._targets, -1).to(outputs.device)
        labelled = (target >= 0) & (target < outputs.shape[-1])
        correct = (outputs.max(-1).indices == target) & labelled  # max is faster than argmax
        if self.batch == "split":
            owner = torch.cat([torch.arange(len(rows)) % self.members for rows in self._targets])
            belongs = owner == torch.arange(self.members)[:, None]
            belongs = belongs.to(outputs.device)
            correct = correct & belongs
            labelled = labelled & belongs
        self.sums["correct"] += correct.sum(1)
        self.sums["labelled"] += labelled.sum(-1)
        if self.batch == "same":
            ones = correct.to(torch.float32)
            self.sums["both_correct"] += ones @ ones.T  # integers, exact below 2²⁴
            ensemble_correct = (outputs.mean(0).max(-1).indices == target) & labelled
            self.sums["ensemble_correct"] += ensemble_correct.sum()

    def summary(self, prefix: str = "") -> dict[str, Any]:
        """Return the columns of a record; values per member are lists.

        Args:
            prefix: put before the name of every column.
        """
        self.flush()
        # Plain numbers from here on: a dozen operations on small tensors would take longer.
        sums = {name: value.tolist() for name, value in self.sums.items()}
        losses = _ratios(sums["loss"], sums["rows"])
        accuracies = _ratios(sums["correct"], sums["labelled"])
        ensemble_accuracy = correlation = math.nan
        if self.batch == "same" and sums["labelled"][0] > 0:
            rows = sums["labelled"][0]
            ensemble_accuracy = sums["ensemble_correct"] / rows
            correlation = _correlation(accuracies, sums["both_correct"], rows)
        observed = [loss for loss, rows in zip(losses, sums["rows"], strict=True) if rows > 0]
        return {
            f"{prefix}loss": sum(observed) / len(observed) if observed else math.nan,
            f"{prefix}ensemble_accuracy": ensemble_accuracy,
            f"{prefix}correlation": correlation,
            f"{prefix}member_loss": losses,
            f"{prefix}member_accuracy": accuracies,
        }


def _ratios(numerators: list[float], denominators: list[float]) -> list[float]:
    """Divide element by element; NaN where a denominator is 0."""
    ratios = []
    for numerator, denominator in zip(numerators, denominators, strict=True):
        ratios.append(numerator / denominator if denominator > 0 else math.nan)
    return ratios


def _correlation(accuracies: list[float], both_correct: list[list[float]], rows: float) -> float:
    """Return the mean correlation of correctness over pairs of members.

    As in :func:`embens.metrics.correctness_correlation`, members that are always or never correct
    are left out. NaN without a pair.

    Args:
        accuracies: of each member.
        both_correct: number of rows on which both members of a pair are correct.
        rows: number of rows.
    """
    varying = [a for a, accuracy in enumerate(accuracies) if 0 < accuracy < 1]
    if len(varying) < 2:
        return math.nan
    total = 0.0
    for a in varying:
        for b in varying:
            if a == b:
                continue
            covariance = both_correct[a][b] / rows - accuracies[a] * accuracies[b]
            variance_a = accuracies[a] * (1 - accuracies[a])
            variance_b = accuracies[b] * (1 - accuracies[b])
            total += covariance / math.sqrt(variance_a * variance_b)
    return total / (len(varying) * (len(varying) - 1))


class Progress:
    """A progress bar, one line per epoch, or nothing.

    The bar needs a terminal and ``rich``; otherwise each epoch prints one line.

    Args:
        show: whether to show progress; None: if the error stream is a terminal.
        epochs: number of epochs.
        steps: steps per epoch; 0 if unknown.
    """

    def __init__(self, show: bool | None, epochs: int, steps: int):
        terminal = sys.stderr is not None and sys.stderr.isatty()
        if show is None:
            show = terminal
        self.show = show
        self.epochs = epochs
        self.updated = 0.0
        self.bar: Any = None
        if not show or not terminal:
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
        if not self.show:
            return
        parts = []
        for column, label in PROGRESS_COLUMNS.items():
            value = record.get(column, math.nan)
            if not math.isnan(value):
                parts.append(f"{label} {value:.4g}")
        parts.append(f"{record['seconds']:.2g} s")
        text = f"epoch {record['epoch']}/{self.epochs}: {', '.join(parts)}"
        if self.bar is None:
            print(text, file=sys.stderr)
        else:
            self.bar.update(self.task, completed=run.steps, text=text)
