"""Losses and metrics of the members, counted over the batches of an epoch."""

from __future__ import annotations

import itertools
import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from embens import mixtures

Task = Literal["classification", "regression", "gaussian"]

BUFFER_SIZE = 2**20
"""Number of buffered outputs after which they are counted."""


class BatchResult(NamedTuple):
    """Losses and outputs of one batch, detached.

    Attributes:
        losses: Mean losses of the members, ``(member,)``. None: the cross-entropies of
            ``log_probabilities``, for a batch with at least one label.
        outputs: Outputs of the ensemble, ``(member, batch, …)``; ``(batch, …)`` if it was split.
        target: The target on the device of the ensemble.
        rows: Number of rows (per member, if members have separate batches).
        task: "classification" (outputs are logits, targets class indices), "regression" (outputs
            are values) or "gaussian" (means and log-variances); None: no metric applies.
        log_probabilities: ``(member, class, batch)``, if the loss has computed them.
    """

    losses: Tensor | None
    outputs: Any
    target: Any
    rows: int
    task: Task | None = None
    log_probabilities: Tensor | None = None


class Tally:
    """Sums of the losses and metrics of some batches.

    Batches wait in a buffer and are counted many at a time: a dozen small operations per step
    would slow down small networks noticeably.

    Args:
        members: Number of members.
        batch: How the ensemble was called: "same", "own" or "split".
        device: Of the sums.

    Attributes:
        sums: By name. Per member, ``(member,)``: ``loss``, the sum of losses over ``rows`` rows;
            ``correct``, the number of correct answers among ``labelled`` rows (labels to ignore
            are excluded). If all members see the same rows: ``both_correct``,
            ``(member, member)``, the rows on which two members are correct; ``ensemble_correct``,
            those on which the mean output is; ``log_loss``, the sum of negative log-likelihoods of
            the ensemble; and ``squared_error`` of its mean over ``values`` values.

    Example:
        >>> tally = Tally(2)
        >>> outputs = torch.tensor([[[2.0, 1.0]], [[0.0, 1.0]]])
        >>> losses, target = torch.tensor([0.1, 0.3]), torch.tensor([0])
        >>> tally.add(BatchResult(losses, outputs, target, rows=1, task="classification"))
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
        self.tasks: set[Task | None] = set()
        self.sums = {}
        for name, shape in shapes.items():
            self.sums[name] = torch.zeros(shape, device=device, dtype=torch.float64)
        self._clear()

    def _clear(self) -> None:
        self._losses: list[Tensor] = []
        self._rows: list[int] = []
        self._classified: list[BatchResult] = []
        self._size = 0

    def add(self, result: BatchResult) -> None:
        """Add a batch.

        Args:
            result: Losses and outputs of the batch.
        """
        self.tasks.add(result.task)
        if result.losses is not None:
            self._losses.append(result.losses)
            self._rows.append(result.rows)
        if result.task is None:
            return
        if self.batch != "same":
            self._count_members(result)
        elif result.task == "classification":
            self._classified.append(result)
            self._size += result.outputs.numel()
            if self._size > BUFFER_SIZE:
                self.flush()
        else:
            self._count_errors(result)

    @torch.no_grad()
    def flush(self) -> None:
        """Count the buffered batches."""
        if self._losses:
            self._count_losses()
        if self._classified:
            self._count_answers()
        self._clear()

    def _count_losses(self) -> None:
        """Count the losses of batches that have them."""
        losses = self._losses
        weights = [[rows] for rows in self._rows]
        if self.batch == "split":
            # Row i belongs to member i mod M: in a small batch the last members have no rows.
            losses = [F.pad(values, (0, self.members - len(values))) for values in losses]
            members = range(self.members)
            weights = [[len(range(a, rows, self.members)) for a in members] for rows in self._rows]
        weight = torch.tensor(weights, dtype=torch.float64).to(self.sums["loss"].device)
        self.sums["loss"] += (weight * torch.stack(losses)).sum(0)
        self.sums["rows"] += weight.sum(0)

    def _count_members(self, result: BatchResult) -> None:
        """Count the correct answers of members that see different rows."""
        if result.task != "classification":
            return
        outputs, target = result.outputs, result.target
        labelled = (target >= 0) & (target < outputs.shape[-1])
        correct = (outputs.argmax(-1) == target) & labelled
        if self.batch == "own":
            self.sums["correct"] += correct.sum(1)
            self.sums["labelled"] += labelled.sum(1)
            return
        for a in range(self.members):
            self.sums["correct"][a] += correct[a :: self.members].sum()
            self.sums["labelled"][a] += labelled[a :: self.members].sum()

    def _count_answers(self) -> None:
        """Count answers and log-likelihoods of members that see the same rows."""
        results = self._classified
        outputs = torch.cat([result.outputs for result in results], 1)
        target = torch.cat([result.target for result in results]).long()
        labelled = (target >= 0) & (target < outputs.shape[2])
        all_labelled = bool(labelled.all())
        if not all_labelled:
            target = target.where(labelled, 0)  # the answers of these rows are not counted
        log_probabilities = torch.cat([_log_probabilities(result) for result in results], 2)
        index = target.expand(self.members, 1, -1)
        log_likelihoods = log_probabilities.gather(1, index).squeeze(1)
        # Indices of maxima are slow to compute. One comparison with the largest other class is
        # enough if there are no ties; different outputs may have equal log-probabilities.
        largest_others = log_probabilities.scatter_(1, index, -math.inf).amax(1)
        correct = log_likelihoods > largest_others
        if bool((log_likelihoods == largest_others).any()):
            correct = outputs.argmax(2) == target
        ensemble_correct = outputs.mean(0).argmax(1) == target
        if not all_labelled:
            correct &= labelled
            ensemble_correct &= labelled
        indicators = correct.to(torch.float32)
        both_correct = indicators @ indicators.T  # integers, exact below 2²⁴
        self.sums["both_correct"] += both_correct
        self.sums["correct"] += both_correct.diagonal()
        self.sums["labelled"] += labelled.sum()
        self.sums["ensemble_correct"] += ensemble_correct.sum()
        self._count_cross_entropies(log_likelihoods, labelled, all_labelled)
        if not all_labelled:
            log_likelihoods = log_likelihoods[:, labelled]
        log_losses = math.log(self.members) - log_likelihoods.logsumexp(0)
        # Sums in float64 do not depend on how rows are divided into batches.
        self.sums["log_loss"] += log_losses.double().sum()

    def _count_cross_entropies(
        self, log_likelihoods: Tensor, labelled: Tensor, all_labelled: bool
    ) -> None:
        """Count the losses of batches that came without them.

        The loss of a batch is the mean over its labelled rows, and counts for all of its rows. All
        summands are float32 values, so their sums in float64 are exact: they do not depend on when
        a buffer is counted.

        Args:
            log_likelihoods: Log-likelihoods ``(member, row)``.
            labelled: Boolean mask of the rows with a label ``(row,)``.
            all_labelled: Whether all rows have one.
        """
        if all_labelled and not self._losses:
            self.sums["loss"] -= log_likelihoods.double().sum(1)
            self.sums["rows"] += len(labelled)
            return
        results = self._classified
        sizes = [len(result.target) for result in results]
        parts = zip(results, log_likelihoods.split(sizes, 1), labelled.split(sizes), strict=True)
        for result, values, labels in parts:
            if result.losses is not None:
                continue
            total = -values[:, labels].double().sum(1)
            if not bool(labels.all()):
                total = (total / labels.sum()).float().double() * len(labels)
            self.sums["loss"] += total
            self.sums["rows"] += len(labels)

    def _count_errors(self, result: BatchResult) -> None:
        """Count the errors of a regression."""
        means = result.outputs
        if result.task == "gaussian":
            means, stds = result.outputs[..., 0], (result.outputs[..., 1] / 2).exp()
            target = result.target.reshape(means.shape[1:])
            losses = mixtures.negative_log_likelihood(means, stds, target)
            self.sums["log_loss"] += losses.double().sum()
        errors = means.mean(0) - result.target.reshape(means.shape[1:])
        self.sums["squared_error"] += errors.square().double().sum()
        self.sums["values"] += errors.numel()

    def summary(self, prefix: str = "") -> dict[str, Any]:
        """Return the columns of a record; values per member are lists.

        Args:
            prefix: Put before the name of every column.

        Returns:
            Losses, and the metrics of the task; NaN where nothing was counted.
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


def _log_probabilities(result: BatchResult) -> Tensor:
    """Return log-probabilities ``(member, class, batch)``, computed if the pass has not."""
    if result.log_probabilities is not None:
        return result.log_probabilities
    # Classes before rows: reductions over them are then several times faster.
    return result.outputs.movedim(2, 1).log_softmax(1)


def _ratio(numerator: float, denominator: float) -> float:
    """Divide; NaN if the denominator is 0."""
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
        accuracies: Of each member.
        both_correct: Number of rows on which both members of a pair are correct.
        rows: Number of rows.
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
