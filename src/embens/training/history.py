"""What happened in a run: two tables, and the sums behind their rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from embens.checks import check_choice

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

_BUFFER = 2**20  # numbers


@dataclass(frozen=True)
class History:
    """The course of a run.

    Attributes:
        members: one row for each epoch and member: ``epoch``, ``member``, ``loss``, ``accuracy``
            and, with validation data, ``validation_loss``, ``validation_accuracy``.
        epochs: one row for each epoch: ``epoch``, ``loss`` (mean of the members'),
            ``ensemble_accuracy``, ``correlation`` (of being right, between members), the same with
            ``validation_`` before, ``metric`` (what early stopping goes by), ``lr`` (of the shared
            parameters, gamma included) and ``modulation_lr``, ``gradient_norm_shared`` and
            ``gradient_norm_individual`` (at the first step of the epoch, as the optimizer gets
            them) and ``seconds``.
        best_epoch: the epoch with the best metric, if there was validation data.
        stopped: why the run ended: "epochs" (all done), "patience" or "time".

    Values on the training data are those of the steps as they went. What is not defined (the
    accuracy of a regression, a correlation without pairs, columns of parameters that don't exist)
    is NaN.
    """

    members: list[dict[str, Any]] = field(repr=False)
    epochs: list[dict[str, Any]] = field(repr=False)
    best_epoch: int | None = None
    stopped: Literal["epochs", "patience", "time"] = "epochs"

    def to_pandas(self, table: Literal["epochs", "members"] = "epochs") -> pandas.DataFrame:
        """Return one of the two tables as a data frame."""
        import pandas

        return pandas.DataFrame(getattr(self, check_choice("table", table, ("epochs", "members"))))

    def plot(self) -> Figure:
        """Return a figure of losses and, for classes, accuracies: members thin, the ensemble bold.

        Validation is dashed, the best epoch a vertical line.
        """
        from matplotlib.figure import Figure

        rated = any(not math.isnan(row["ensemble_accuracy"]) for row in self.epochs)
        pairs = {"loss": "loss", "accuracy": "ensemble_accuracy"} if rated else {"loss": "loss"}
        figure = Figure(figsize=(5.0 * len(pairs), 3.5), layout="constrained")
        epochs = [row["epoch"] for row in self.epochs]
        for place, (own, joint) in enumerate(pairs.items(), 1):
            axes = figure.add_subplot(1, len(pairs), place, xlabel="epoch", ylabel=own)
            for prefix, style, name in (("", "-", "training"), ("validation_", "--", "validation")):
                values = [row.get(prefix + own, math.nan) for row in self.members]
                members = len(values) // max(len(epochs), 1)
                for a in range(members):
                    axes.plot(epochs, values[a::members], "C0" + style, lw=0.5, alpha=0.5)
                values = [row.get(prefix + joint, math.nan) for row in self.epochs]
                axes.plot(epochs, values, "k" + style, label=name)
            if self.best_epoch is not None:
                axes.axvline(self.best_epoch, color="grey", lw=0.5)
            axes.legend()
        return figure


def history_of(records: Sequence[dict[str, Any]], best_epoch: int | None, stopped: Any) -> History:
    """Return the tables of a run's records: a dict for each epoch, lists being by member."""
    epochs = [{k: v for k, v in r.items() if not isinstance(v, list)} for r in records]
    members = []
    for record in records:
        columns = {k.replace("member_", ""): v for k, v in record.items() if isinstance(v, list)}
        for a in range(len(next(iter(columns.values()), ()))):
            row = {"epoch": record["epoch"], "member": a}
            members.append({**row, **{k: v[a] for k, v in columns.items()}})
    return History(members, epochs, best_epoch, stopped)


class Tally:
    """Sums over batches, by name.

    For each member ``loss``, over ``rows`` samples; ``right``, the correct answers among ``rated``
    ones (labels to ignore are not). Where all members see the same rows ``together``, the rows on
    which both of two members are right, and ``ensemble``, those on which the mean output is.
    Batches wait in a buffer and are counted many at a time: on small networks a dozen small
    operations at each step would be felt.
    """

    def __init__(self, members: int, batch: str = "same", device: torch.device | str = "cpu"):
        self.members, self.batch = members, batch
        shapes = dict.fromkeys(("loss", "rows", "right", "rated"), (members,))
        shapes |= {"together": (members, members), "ensemble": ()}
        self.sums = {
            name: torch.zeros(shape, device=device, dtype=torch.float64)
            for name, shape in shapes.items()
        }
        self._losses: list[tuple[Tensor, int]] = []
        self._answers: list[tuple[Tensor, Tensor]] = []
        self._size = 0

    def add(self, losses: Tensor, outputs: Any, target: Any, rows: int) -> None:
        self._losses.append((losses.detach(), rows))
        if self._are_classes(outputs, target):
            self._answers.append((outputs.detach(), target))
            self._size += outputs.numel()
            if self._size > _BUFFER:
                self.flush()

    def _are_classes(self, outputs: Any, target: Any) -> bool:
        """Return whether outputs are logits of classes and the target their indices."""
        if not (isinstance(outputs, Tensor) and isinstance(target, Tensor)):
            return False
        if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
            return False
        if outputs.dim() != (2 if self.batch == "split" else 3) or outputs.shape[-1] < 2:
            return False
        return target.shape == (outputs[0] if self.batch == "same" else outputs).shape[:-1]

    @torch.no_grad()
    def flush(self) -> None:
        if self._losses:
            losses, rows = map(list, zip(*self._losses, strict=True))
            weights = [[count] for count in rows]
            if self.batch == "split":  # in a small batch the last members may have no rows
                mine = range(self.members)
                weights = [[len(range(a, count, self.members)) for a in mine] for count in rows]
                losses = [F.pad(some, (0, self.members - len(some))) for some in losses]
            weights = torch.tensor(weights, dtype=torch.float64).to(self.sums["loss"].device)
            self.sums["loss"] += (weights * torch.stack(losses)).sum(0)
            self.sums["rows"] += weights.sum(0)
            self._losses = []
        if not self._answers:
            return
        outputs = torch.cat([o for o, _ in self._answers], 0 if self.batch == "split" else 1)
        target = torch.cat([t for _, t in self._answers], -1).to(outputs.device)
        rated = (target >= 0) & (target < outputs.shape[-1])  # others are labels to ignore
        right = (outputs.max(-1).indices == target) & rated  # faster than argmax
        if self.batch == "split":  # rows of other members are not mine
            owner = torch.cat([torch.arange(len(t)) % self.members for _, t in self._answers])
            mine = owner.to(outputs.device) == torch.arange(self.members)[:, None].to(owner)
            right, rated = right & mine, rated & mine
        self.sums["right"] += right.sum(1)
        self.sums["rated"] += rated.sum(-1)
        if self.batch == "same":
            ones = right.to(torch.float32)
            self.sums["together"] += ones @ ones.T  # whole numbers, exact below 2²⁴
            self.sums["ensemble"] += ((outputs.mean(0).max(-1).indices == target) & rated).sum()
        self._answers, self._size = [], 0

    def summary(self, prefix: str = "") -> dict[str, Any]:
        self.flush()
        sums = {name: value.cpu() for name, value in self.sums.items()}
        losses = sums["loss"] / sums["rows"]
        accuracy = sums["ensemble"] / sums["rated"][0] if self.batch == "same" else math.nan
        columns = {
            "loss": float(losses[sums["rows"] > 0].mean()),
            "ensemble_accuracy": float(accuracy),
            "correlation": self.correlation(),
            "member_loss": losses.tolist(),
            "member_accuracy": (sums["right"] / sums["rated"]).tolist(),
        }
        return {prefix + name: value for name, value in columns.items()}

    def correlation(self) -> float:
        """Return :func:`embens.metrics.correctness_correlation`; NaN where there is no pair."""
        count = float(self.sums["rated"][0])
        chance = self.sums["right"].cpu() / count
        varies = (chance > 0) & (chance < 1)
        if self.batch != "same" or (members := int(varies.sum())) < 2:
            return math.nan
        chance = chance[varies]
        deviation = (chance * (1 - chance)).sqrt()
        together = self.sums["together"].cpu()[varies][:, varies] / count
        correlation = (together - chance[:, None] * chance) / (deviation[:, None] * deviation)
        return float((correlation.sum() - correlation.trace()) / (members * (members - 1)))
