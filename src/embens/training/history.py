"""What happened in a run: two tables, and the counts behind their rows.

A :class:`Tally` adds up what batches say about members: losses, right answers, and how often two
members are right together, from which the correlation follows. It is one flat tensor, so that it
can be summed over processes and kept in a checkpoint. Outputs wait in a buffer and are counted
many at a time, because on small networks a dozen small operations at each step would be felt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    import pandas

_BUFFER = 2**20  # numbers


@dataclass(frozen=True)
class History:
    """The course of a run.

    Attributes:
        members: one row for each epoch and member: ``epoch``, ``member``, ``loss``, ``accuracy``
            and, with validation data, ``validation_loss``, ``validation_accuracy``.
        epochs: one row for each epoch: ``epoch``, ``loss`` (mean of the members'),
            ``ensemble_accuracy``, ``correlation`` (of being right, between members), the same with
            ``validation_`` before, ``metric`` (what early stopping goes by), ``lr`` and
            ``modulation_lr``, ``gradient_norm_shared`` and ``gradient_norm_individual`` (at the
            first step of the epoch, as the optimizer gets them) and ``seconds``.
        best_epoch: the epoch with the best metric, if there was validation data.
        stopped: why the run ended: "epochs" (all done) or "patience".

    Values on the training data are those of the steps as they went. What is not defined (the
    accuracy of a regression, a correlation without pairs, columns of parameters that don't exist)
    is NaN.
    """

    members: list[dict[str, Any]] = field(repr=False)
    epochs: list[dict[str, Any]] = field(repr=False)
    best_epoch: int | None = None
    stopped: Literal["epochs", "patience"] = "epochs"

    def to_pandas(self, table: Literal["epochs", "members"] = "epochs") -> pandas.DataFrame:
        """Return one of the two tables as a data frame."""
        if table not in ("epochs", "members"):
            raise ValueError(f"table: expected 'epochs' or 'members', got {table!r}")
        import pandas

        return pandas.DataFrame(getattr(self, table))


def history_of(records: Sequence[dict[str, Any]], best_epoch: int | None, stopped: Any) -> History:
    """Return the tables of a run's records: a dict for each epoch, lists being by member."""
    epochs = [{k: v for k, v in r.items() if not isinstance(v, list)} for r in records]
    members = []
    for record in records:
        columns = {k.removeprefix("member_"): v for k, v in record.items() if isinstance(v, list)}
        columns = {k.replace("_member_", "_"): v for k, v in columns.items()}
        for a in range(len(next(iter(columns.values()), ()))):
            row = {"epoch": record["epoch"], "member": a}
            members.append({**row, **{k: v[a] for k, v in columns.items()}})
    return History(members, epochs, best_epoch, stopped)


class Tally:
    """Counts over batches.

    Args:
        members: how many.
        batch: how the members were given their rows, as in :func:`embens.objective`.
        device: where to count.
    """

    def __init__(self, members: int, batch: str = "same", device: torch.device | str = "cpu"):
        self.members, self.batch = members, batch
        self.counts = torch.zeros(4 * members + 2 + members**2, device=device, dtype=torch.float64)
        sizes = (members, members, members, members, 1, 1, members**2)
        (self.loss, self.rows, self.right, self.rated, self.ensemble_right, self.common, both) = (
            self.counts.split(sizes)
        )
        self.both = both.view(members, members)
        self._losses: list[tuple[Tensor, int]] = []
        self._outputs: list[tuple[Tensor, Tensor]] = []
        self._size = 0

    @torch.no_grad()
    def add(self, losses: Tensor, outputs: Any, target: Any, rows: int) -> None:
        """Count a batch: the members' losses, their outputs, the target, the number of rows."""
        self._losses.append((losses.detach(), rows))
        if is_classification(outputs, target, self.batch):
            self._outputs.append((outputs.detach(), target))
            self._size += outputs.numel()
            if self._size > _BUFFER:
                self.flush()

    @torch.no_grad()
    def flush(self) -> None:
        """Count what waits in the buffer."""
        if self._losses:
            self._count_losses()
        if self._outputs:
            axis = 0 if self.batch == "split" else 1
            groups = self._outputs if self.batch == "split" else [self._joined(axis)]
            for outputs, target in groups:
                self._count_right(outputs, target)
        self._losses, self._outputs, self._size = [], [], 0

    def _joined(self, axis: int) -> tuple[Tensor, Tensor]:
        outputs = torch.cat([o for o, _ in self._outputs], axis)
        return outputs, torch.cat([t for _, t in self._outputs], -1).to(outputs.device)

    def _count_losses(self) -> None:
        rows = torch.tensor([r for _, r in self._losses], dtype=torch.float64)
        rows = rows.to(self.counts.device)
        if self.batch == "split":
            for losses, count in self._losses:
                mine = (count - 1 - torch.arange(self.members)) // self.members + 1
                mine = mine.clamp(min=0).to(self.counts)
                self.rows += mine
                self.loss[: len(losses)] += losses * mine[: len(losses)]
        else:
            stacked = torch.stack([losses for losses, _ in self._losses])
            self.loss += rows @ stacked.to(torch.float64)
            self.rows += rows.sum()

    def _count_right(self, outputs: Tensor, target: Tensor) -> None:
        target = target.to(outputs.device)
        rated = (target >= 0) & (target < outputs.shape[-1])  # others are labels to ignore
        right = (outputs.argmax(-1) == target) & rated
        if self.batch == "split":
            of = torch.arange(len(target), device=outputs.device) % self.members
            self.right.index_add_(0, of, right.to(self.counts))
            self.rated.index_add_(0, of, rated.to(self.counts))
            return
        self.right += right.sum(1)
        self.rated += rated.sum(-1)
        if self.batch == "same":
            self.ensemble_right += ((outputs.mean(0).argmax(-1) == target) & rated).sum()
            self.common += rated.sum()
            ones = right.to(torch.float32)
            self.both += ones @ ones.T  # whole numbers, exact below 2²⁴

    def summary(self, prefix: str = "") -> dict[str, Any]:
        """Return the columns of an epoch's record."""
        self.flush()
        losses = self.loss / self.rows
        seen = losses[self.rows > 0]
        return {
            f"{prefix}loss": float(seen.mean()),
            f"{prefix}ensemble_accuracy": float(self.ensemble_right / self.common),
            f"{prefix}correlation": self.correlation(),
            f"{prefix}member_loss": losses.tolist(),
            f"{prefix}member_accuracy": (self.right / self.rated).tolist(),
        }

    def correlation(self) -> float:
        """Return the mean correlation between members being right, from the counts.

        As :func:`embens.metrics.correctness_correlation`; NaN where there is no pair.
        """
        count = float(self.common)
        chance = self.right / count
        varies = (chance > 0) & (chance < 1)
        pairs = int(varies.sum()) * (int(varies.sum()) - 1)
        if self.batch != "same" or count == 0 or pairs == 0:
            return math.nan
        chance = chance[varies]
        deviation = (chance * (1 - chance)).sqrt()
        together = self.both[varies][:, varies] / count
        correlation = (together - chance[:, None] * chance) / (deviation[:, None] * deviation)
        return float((correlation.sum() - correlation.trace()) / pairs)


def is_classification(outputs: Any, target: Any, batch: str = "same") -> bool:
    """Return whether outputs are logits of classes and the target their indices."""
    if not (isinstance(outputs, Tensor) and isinstance(target, Tensor)):
        return False
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        return False
    rows = tuple(outputs.shape[:-1])
    expected = rows[1:] if batch == "same" else rows
    axes = 2 if batch == "split" else 3
    return outputs.dim() == axes and tuple(target.shape) == expected and outputs.shape[-1] > 1
