"""Sums of losses and correct answers over the batches of an epoch."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

BUFFER_SIZE = 2**20
"""Number of buffered outputs after which they are counted."""


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
