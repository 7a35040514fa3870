"""The history of a run and the metrics of an epoch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from embens import mixtures
from embens.checks import check_choice

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

Task = Literal["classification", "regression", "gaussian"]

BUFFER_SIZE = 2**20
"""Number of buffered outputs after which they are counted."""


@dataclass(frozen=True)
class History:
    """The result of :func:`embens.fit`.

    Training columns are measured during the epoch, while the weights change. Undefined values are
    NaN: a correlation without pairs, the rate of a group that does not exist. A regression has no
    accuracies.

    Attributes:
        members: one row per epoch and member with ``epoch``, ``member``, ``loss``, ``accuracy``
            and, with validation data, ``validation_loss`` and ``validation_accuracy``.
        epochs: one row per epoch with ``epoch``, ``loss`` (mean over members) and the metrics of
            the ensemble: ``ensemble_accuracy``, ``nll`` (of the mean probability) and
            ``correlation`` (of correctness between members) for classification; ``rmse`` for
            regression, with ``nll`` (of the mixture) where members predict variances. The same
            columns with the prefix ``validation_``, ``metric`` (selects the best epoch), ``lr``
            (rate of the shared parameters, gamma included), ``modulation_lr``,
            ``gradient_norm_shared`` and ``gradient_norm_individual`` (at the first step of the
            epoch) and ``seconds``.
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
        if any("ensemble_accuracy" in row for row in self.epochs):
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
            ``(member, member)``, the rows on which two members are correct; ``ensemble_correct``,
            those on which the mean output is; ``log_loss``, the sum of negative log-likelihoods of
            the ensemble; and ``squared_error`` of its mean over ``values`` values.

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
            "log_loss": (),
            "squared_error": (),
            "values": (),
        }
        self.tasks: set[Task] = set()
        self.sums = {}
        for name, shape in shapes.items():
            self.sums[name] = torch.zeros(shape, device=device, dtype=torch.float64)
        self._clear()

    def _clear(self) -> None:
        self._losses: list[Tensor] = []
        self._rows: list[int] = []
        self._outputs: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._lacks_losses: list[bool] = []
        self._regressions: list[tuple[Tensor, Tensor]] = []
        self._size = 0

    def add(
        self, losses: Tensor | None, outputs: Any, target: Any, rows: int, task: Task | None = None
    ) -> None:
        """Add a batch.

        Args:
            losses: mean losses of the members, ``(member,)``; None: cross-entropies of logits
                and class indices, with at least one label, on rows that all members see.
            outputs: outputs of the ensemble; counted if they are logits.
            target: the target; counted if it holds class indices.
            rows: number of rows (per member, if members have separate batches).
            task: "regression" (outputs are values) or "gaussian" (means and log-variances).
        """
        if losses is not None:
            self._losses.append(losses.detach())
            self._rows.append(rows)
        if self._is_classification(outputs, target):
            self.tasks.add("classification")
            self._outputs.append(outputs.detach())
            self._targets.append(target)
            self._lacks_losses.append(losses is None)
        elif task is not None and self.batch == "same":
            self.tasks.add(task)
            self._regressions.append((outputs.detach(), target))
        else:
            return
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
        for outputs, target in self._regressions:
            self._count_errors(outputs, target)
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
        # Classes before rows: reductions over them are then several times faster.
        axis = 1 if self.batch == "split" else 2
        outputs = torch.cat([part.movedim(-1, axis - 1) for part in self._outputs], axis)
        target = torch.cat(self._targets, -1).to(outputs.device)
        labelled = (target >= 0) & (target < outputs.shape[axis - 1])
        correct = _is_correct(outputs, target, axis - 1) & labelled
        if self.batch == "same":
            self._count_ensemble(outputs, target, labelled, correct)
        if self.batch == "split":
            owner = torch.cat([torch.arange(len(rows)) % self.members for rows in self._targets])
            belongs = owner == torch.arange(self.members)[:, None]
            belongs = belongs.to(outputs.device)
            correct = correct & belongs
            labelled = labelled & belongs
        self.sums["correct"] += correct.sum(1)
        self.sums["labelled"] += labelled.sum(-1)

    def _count_ensemble(
        self, outputs: Tensor, target: Tensor, labelled: Tensor, correct: Tensor
    ) -> None:
        """Count pairs of members and the ensemble, on rows that all members see.

        Args:
            outputs: logits ``(member, class, row)``.
            target: class indices ``(row,)``.
            labelled: which of them are classes, ``(row,)``.
            correct: which answers are correct, ``(member, row)``.
        """
        ones = correct.to(torch.float32)
        self.sums["both_correct"] += ones @ ones.T  # integers, exact below 2²⁴
        ensemble_correct = (outputs.mean(0).max(0).indices == target) & labelled
        self.sums["ensemble_correct"] += ensemble_correct.sum()
        row_losses = _cross_entropies(outputs, target)
        if any(self._lacks_losses):
            self._count_row_losses(row_losses, labelled)
        log_losses = math.log(self.members) - (-row_losses[:, labelled]).logsumexp(0)
        # Sums in float64 do not depend on how rows are divided into batches.
        self.sums["log_loss"] += log_losses.double().sum()

    def _count_row_losses(self, row_losses: Tensor, labelled: Tensor) -> None:
        """Count the losses of batches that came without them.

        The loss of a batch is the mean over its labelled rows, and counts for all of its rows. All
        summands are float32 values, so their sums in float64 are exact: they do not depend on when
        a buffer is counted.

        Args:
            row_losses: ``(member, row)``.
            labelled: ``(row,)``.
        """
        if bool(labelled.all()) and all(self._lacks_losses):
            self.sums["loss"] += row_losses.double().sum(1)
            self.sums["rows"] += len(labelled)
            return
        sizes = [len(target) for target in self._targets]
        batches = zip(row_losses.split(sizes, 1), labelled.split(sizes), strict=True)
        for (losses, labels), lacks_losses in zip(batches, self._lacks_losses, strict=True):
            if not lacks_losses:
                continue
            total = losses[:, labels].double().sum(1)
            if not bool(labels.all()):
                total = (total / labels.sum()).float().double() * len(labels)
            self.sums["loss"] += total
            self.sums["rows"] += len(labels)

    def _count_errors(self, outputs: Tensor, target: Tensor) -> None:
        """Count the errors of a regression."""
        means = outputs
        if "gaussian" in self.tasks:
            means, stds = outputs[..., 0], (outputs[..., 1] / 2).exp()
            target = target.reshape(means.shape[1:])
            losses = mixtures.negative_log_likelihood(means, stds, target)
            self.sums["log_loss"] += losses.double().sum()
        errors = means.mean(0) - target.reshape(means.shape[1:])
        self.sums["squared_error"] += errors.square().double().sum()
        self.sums["values"] += errors.numel()

    def summary(self, prefix: str = "") -> dict[str, Any]:
        """Return the columns of a record; values per member are lists.

        Args:
            prefix: put before the name of every column.
        """
        self.flush()
        # Python floats from here on: a dozen operations on small tensors would take longer.
        sums = {name: value.tolist() for name, value in self.sums.items()}
        losses = _ratios(sums["loss"], sums["rows"])
        observed = [loss for loss, rows in zip(losses, sums["rows"], strict=True) if rows > 0]
        columns: dict[str, Any] = {"loss": _ratio(sum(observed), len(observed))}
        rows = sums["labelled"][0]
        if rows > 0 or "classification" in self.tasks:
            accuracies = _ratios(sums["correct"], sums["labelled"])
            is_defined = self.batch == "same" and rows > 0
            columns["ensemble_accuracy"] = columns["nll"] = columns["correlation"] = math.nan
            if is_defined:
                columns["ensemble_accuracy"] = sums["ensemble_correct"] / rows
                columns["nll"] = sums["log_loss"] / rows
                columns["correlation"] = _correlation(accuracies, sums["both_correct"], rows)
            columns["member_accuracy"] = accuracies
        elif sums["values"] > 0:
            columns["rmse"] = math.sqrt(sums["squared_error"] / sums["values"])
            if "gaussian" in self.tasks:
                columns["nll"] = sums["log_loss"] / sums["values"]
        columns["member_loss"] = losses
        return {f"{prefix}{name}": value for name, value in columns.items()}


def _is_correct(outputs: Tensor, target: Tensor, axis: int) -> Tensor:
    """Return where the class of the largest output, the first of several, is the target.

    Args:
        outputs: logits with the classes on ``axis`` and the rows on the next.
        target: class indices, of the shape of the outputs without ``axis``, or ``(row,)``; the
            result for a label that is no class has no meaning.
        axis: of the classes.
    """
    largest = outputs.amax(axis, keepdim=True)
    # Indices of maxima are slow to compute. Without ties and NaN the values are enough.
    is_largest = outputs == largest
    if int(is_largest.sum()) != largest.numel():
        return outputs.max(axis).indices == target
    labels = target.clamp(0, outputs.shape[axis] - 1).unsqueeze(-2).expand_as(largest)
    return is_largest.gather(axis, labels).squeeze(axis)


def _cross_entropies(outputs: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy of each member and row, ``(member, row)``.

    Args:
        outputs: logits ``(member, class, row)``.
        target: class indices ``(row,)``; the result of a row whose label is no class has no
            meaning.
    """
    members, classes, _ = outputs.shape
    labels = target.clamp(0, classes - 1).expand(members, -1)
    return F.cross_entropy(outputs, labels, reduction="none")


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else math.nan


def _ratios(numerators: list[float], denominators: list[float]) -> list[float]:
    """Divide element by element; NaN where a denominator is 0."""
    ratios = []
    for numerator, denominator in zip(numerators, denominators, strict=True):
        ratios.append(_ratio(numerator, denominator))
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
    correlations = []
    deviations = [math.sqrt(accuracy * (1 - accuracy)) for accuracy in accuracies]
    for a, b in itertools.combinations(varying, 2):
        covariance = both_correct[a][b] / rows - accuracies[a] * accuracies[b]
        correlations.append(covariance / (deviations[a] * deviations[b]))
    return sum(correlations) / len(correlations)
