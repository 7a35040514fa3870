r"""Heads: what a target is, what a network's outputs say about it, and how well they do.

A head learns a target, turns it into a tensor, is the criterion of :func:`embens.fit` for one
member and the metric for the ensemble, is calibrated on held-out rows, and reads predictions from
outputs. The metric is the negative logarithm of the *mixture* of the members,

.. math::
    -\frac1n \sum_i \log \frac1M \sum_a p_a(y_i \mid x_i),

for which, unlike for the mean of the members' own losses, disagreement counts. Outputs are
``(member, row, output)``. Weights of rows, if there are any, ride in the last column of the target
and have mean 1.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from sklearn.utils.multiclass import check_classification_targets
from torch import Tensor
from torch.nn.functional import one_hot

from embens.estimators.tables import place, read_target
from embens.uncertainty import best_scale

REFINED = 256  # held-out rows, at most, that the temperature of an epoch is chosen by


@dataclass(frozen=True, eq=False, kw_only=True)
class Head(ABC):
    """What both heads have in common."""

    single: bool = True  # the target is one column and not a table
    weighted: bool = False  # its tensor ends with a column of weights
    scores: Tensor | None = None  # conformal ones of held-out rows, (row, target)
    detached: ClassVar[bool] = False  # whether the second half of outputs only looks
    sites: ClassVar[str] = "hidden"  # where members differ
    half: ClassVar[bool] = False  # whether steps may be made in bfloat16
    apart: ClassVar[int] = 4  # every so-manieth held-out row is for conformal scores alone

    def scaled(self, values: Tensor, weights: Tensor) -> Any:
        """Return the head that knows the scale of the training part's values."""
        return self

    def groups(self, values: Tensor) -> Tensor | None:
        """Return the classes whose shares held-out rows should keep, if there are any."""
        return None

    def pack(self, values: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return what the criterion and the metric take as target, of values and weights."""
        columns = [values, weights[:, None]] if self.weighted and weights is not None else [values]
        return torch.cat([column.to(dtype) for column in columns], 1)

    @abstractmethod
    def losses(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the losses ``(…, row, target)``, of one member or of all at once."""

    def criterion(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the losses by row, with their weights."""
        losses = self.losses(outputs, target).sum(-1)
        return losses * target[..., -1] if self.weighted else losses

    criterion.over_members = True  # type: ignore[attr-defined]

    @abstractmethod
    def log_mixture(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the log-likelihood of the mixture, ``(row, target)``."""

    def metric(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the mixture's negative log-likelihood, the mean over rows."""
        return self.average(-self.log_mixture(outputs, target).sum(-1), target)

    def average(self, losses: Tensor, target: Tensor) -> Tensor:
        """Return the mean over rows, by their weights."""
        if self.weighted:
            return (losses * target[:, -1]).sum() / target[:, -1].sum()
        return losses.mean()

    @abstractmethod
    def tempered(self, outputs: Tensor, target: Tensor) -> Any:
        """Return the head with the temperature that suits rows that were not trained on."""

    def refined(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the metric at the best temperature, which is what training is stopped by.

        A network that has become too certain may still be the one that knows most (Berta et al.,
        2025). The temperature is that of some of the rows.
        """
        return self.tempered(outputs[:, :REFINED], target[:REFINED]).metric(outputs, target)


def log_mean(logarithms: Tensor) -> Tensor:
    """Return the logarithm of the mean over members."""
    return logarithms.logsumexp(0) - math.log(len(logarithms))


def as_columns(y: np.ndarray, expected: int) -> list[np.ndarray]:
    """Return the targets one by one; a warm start must have as many as before."""
    columns = [y] if y.ndim == 1 else list(y.T)
    if len(columns) != expected:
        raise ValueError(f"y: expected the first fit's {expected} targets; got {len(columns)}")
    return columns


@dataclass(frozen=True, eq=False)
class Classes(Head):
    """Logits of one or several labels, one after another."""

    labels: tuple[np.ndarray, ...]  # the classes of each, in order
    temperature: float = 1.0  # what logits are divided by at prediction
    sites: ClassVar[str] = "first"
    half: ClassVar[bool] = True

    @staticmethod
    def read(y: Any) -> np.ndarray:
        """Return a user's target as an array, ``(row,)`` or ``(row, target)``, checked."""
        y = read_target(y)
        check_classification_targets(y)
        return y

    @classmethod
    def learn(cls, y: np.ndarray, options: Any, known: Any = None) -> Self:
        """Return the head of a target, by its values and classes that are known beforehand."""
        columns, single = ([y] if y.ndim == 1 else list(y.T)), y.ndim == 1
        if known is not None:
            several = [known] if single else known
            columns = [np.concatenate(pair) for pair in zip(columns, several, strict=True)]
        labels = tuple(np.unique(column) for column in columns)
        head = cls(labels, single=single)
        if single and len(head.labels[0]) == 1:
            raise ValueError(
                f"y has one class only, {head.labels[0].item()!r}: there is nothing to tell apart. "
                "At least two classes are needed."
            )
        if not head.multilabel:
            return head
        return replace(head, labels=tuple(np.array([0, 1], dtype=c.dtype) for c in labels))

    @property
    def multilabel(self) -> bool:
        return not self.single and all(set(c.tolist()) <= {0, 1} for c in self.labels)

    @property
    def classes(self) -> Any:
        return self.labels[0] if self.single else list(self.labels)

    @property
    def sizes(self) -> list[int]:
        return [len(classes) for classes in self.labels]

    @property
    def outputs(self) -> int:
        """How many outputs the network needs."""
        return sum(self.sizes)

    def values(self, y: np.ndarray) -> Tensor:
        """Return a target as numbers ``(row, target)``."""
        codes, columns = [], as_columns(y, len(self.labels))
        for column, classes in zip(columns, self.labels, strict=True):
            if len(rows := np.flatnonzero(~np.isin(column, classes))):
                raise ValueError(
                    f"y has a class that was not there in the first fit: {column[rows[0]]!r} in "
                    f"{place(rows)}. A warm start can't add classes; pass warm_start=False."
                )
            codes.append(np.searchsorted(classes, column))
        return torch.from_numpy(np.stack(codes, 1))

    def numbers(self, values: Tensor) -> Tensor:
        """Return numbers whose means say something of a target: 1 for a class."""
        sizes = zip(values.long().T, self.sizes, strict=True)
        columns = [one_hot(codes, size)[:, size == 2 :] for codes, size in sizes]
        return torch.cat(columns, 1).double()

    def groups(self, values: Tensor) -> Tensor | None:
        return values[:, 0] if values.shape[1] == 1 else None

    def losses(self, outputs: Tensor, target: Tensor) -> Tensor:
        target, found = target.view(len(target), -1), []
        for k, logits in enumerate(outputs.split(self.sizes, dim=-1)):
            index = target[:, k].long().expand(logits.shape[:-1]).unsqueeze(-1)
            found.append(logits.log_softmax(-1).gather(-1, index))
        return -torch.cat(found, -1)

    def log_mixture(self, outputs: Tensor, target: Tensor) -> Tensor:
        return log_mean(-self.losses(outputs / self.temperature, target))

    def tempered(self, outputs: Tensor, target: Tensor) -> Self:
        outputs, rows = outputs.double(), outputs.shape[1]

        def loss(t: float) -> Tensor:  # with a row whose class may be any
            labels = (outputs / t).split(self.sizes, dim=-1)
            any_class = -torch.stack([log_mean(x.log_softmax(-1)).mean() for x in labels]).sum()
            return rows * replace(self, temperature=t).metric(outputs, target) + any_class

        return replace(self, temperature=best_scale(loss))

    def scored(self, outputs: Tensor, target: Tensor) -> Self:
        """Return the head with conformal scores of rows that nothing else was chosen by."""
        return replace(self, scores=-self.log_mixture(outputs.double(), target).exp())

    def probabilities(self, outputs: Tensor) -> list[Tensor]:
        """Return the members' probabilities of each label, ``(member, row, class)``."""
        parts = (outputs.double() / self.temperature).split(self.sizes, dim=-1)
        return [logits.softmax(-1) for logits in parts]

    def summarise(self, outputs: Tensor) -> tuple[Tensor, ...]:
        """Return the prediction: mean probabilities of each label."""
        return tuple(p.mean(0) for p in self.probabilities(outputs))
