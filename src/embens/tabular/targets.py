r"""Output heads: how a target is represented, trained, scored and predicted.

A head learns the values of a target and converts it to a tensor. It is the training criterion of
one member and the validation metric of the ensemble. It is calibrated on held-out rows and turns
network outputs into predictions. The default metric is the negative log-likelihood of the *mixture*
of the members,

.. math::
    -\frac1n \sum_i \log \frac1M \sum_a p_a(y_i \mid x_i).

Unlike the mean of the members' losses, it rewards disagreement. Outputs are
``(member, row, output)``. If rows have weights, these are the last column of the target tensor and
have mean 1.

This file has the head of classes; the head of numbers is in :mod:`embens.tabular.gaussians`.
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

from embens.tabular.defaults import Arguments
from embens.tabular.frames import describe_rows, read_target
from embens.uncertainty import best_scale

TEMPERATURE_ROWS = 256  # held-out rows that choose the temperature of an epoch


@dataclass(frozen=True, eq=False, kw_only=True)
class Head(ABC):
    """Base class of the heads.

    Attributes:
        single: whether the target is a vector, not a table.
        weighted: whether the target tensor ends with a column of weights.
        scores: conformal scores of held-out rows, ``(row, target)``.
        detached: whether the second half of the outputs does not train the hidden layers.
        default_sites: where members differ by default.
        allows_bfloat16: whether the network may run in bfloat16 during training.
        calibration_stride: every ``calibration_stride``-th held-out row is reserved for
            conformal scores.
    """

    single: bool = True
    weighted: bool = False
    scores: Tensor | None = None
    detached: ClassVar[bool] = False
    default_sites: ClassVar[str] = "hidden"
    allows_bfloat16: ClassVar[bool] = False
    calibration_stride: ClassVar[int] = 4

    @staticmethod
    @abstractmethod
    def read(y: Any) -> np.ndarray:
        """Validate a target and return it as an array, ``(row,)`` or ``(row, target)``."""

    @classmethod
    @abstractmethod
    def learn(cls, y: np.ndarray, arguments: Arguments, classes: Any = None) -> Self:
        """Return the head for a target.

        Args:
            y: the target of all rows.
            arguments: of the estimator.
            classes: all classes of a classifier, if ``y`` does not have all of them.
        """

    @property
    @abstractmethod
    def outputs(self) -> int:
        """Number of network outputs."""

    @abstractmethod
    def values(self, y: np.ndarray) -> Tensor:
        """Return a target as a tensor ``(row, target)``: codes of classes, or numbers."""

    @abstractmethod
    def statistics_target(self, values: Tensor) -> Tensor:
        """Return numbers ``(row, number)`` whose category means are inputs of the network."""

    def scaled(self, values: Tensor, weights: Tensor) -> Self:
        """Return the head with the location and scale of the training rows."""
        return self

    def strata(self, values: Tensor) -> Tensor | None:
        """Return the classes ``(row,)`` by which held-out rows are stratified, if any."""
        return None

    def pack(self, values: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the target tensor of the criterion and the metric: values, then weights."""
        if self.weighted and weights is not None:
            return torch.cat([values.to(dtype), weights[:, None].to(dtype)], 1)
        return values.to(dtype)

    @abstractmethod
    def losses(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the losses ``(…, row, target)`` of one member or of all members."""

    def criterion(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the weighted training losses ``(…, row)``."""
        losses = self.losses(outputs, target).sum(-1)
        if self.weighted:
            losses = losses * target[..., -1]
        return losses

    # embens.objective calls such a criterion once for all members, which is faster.
    criterion.over_members = True  # type: ignore[attr-defined]

    @abstractmethod
    def log_likelihood(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the log-likelihood of the mixture, ``(row, target)``."""

    def metric(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the mean negative log-likelihood of the mixture."""
        return self.average(-self.log_likelihood(outputs, target).sum(-1), target)

    def average(self, losses: Tensor, target: Tensor) -> Tensor:
        """Return the weighted mean over rows."""
        if self.weighted:
            weights = target[:, -1]
            return (losses * weights).sum() / weights.sum()
        return losses.mean()

    @abstractmethod
    def calibrated(self, outputs: Tensor, target: Tensor) -> Self:
        """Return the head with the best temperature for held-out rows."""

    def calibrated_metric(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the metric at the best temperature, which early stopping minimises.

        An overconfident network can still be the most informative one (Berta et al., 2025). The
        temperature is fitted to a part of the rows to save time.
        """
        head = self.calibrated(outputs[:, :TEMPERATURE_ROWS], target[:TEMPERATURE_ROWS])
        return head.metric(outputs, target)

    @abstractmethod
    def with_scores(self, outputs: Tensor, target: Tensor) -> Self:
        """Return the head with the conformal scores of rows that nothing else has used."""

    @abstractmethod
    def summarise(self, outputs: Tensor) -> tuple[Tensor, ...]:
        """Return the prediction of the ensemble, one or several tensors ``(row, …)``."""


def log_mean(logarithms: Tensor) -> Tensor:
    """Return the logarithm of the mean over the first axis."""
    return logarithms.logsumexp(0) - math.log(len(logarithms))


def split_targets(y: np.ndarray, expected: int) -> list[np.ndarray]:
    """Return the columns of a target.

    Raises:
        ValueError: if their number differs from the first fit.
    """
    columns = [y]
    if y.ndim == 2:
        columns = list(y.T)
    if len(columns) != expected:
        raise ValueError(
            f"y must have {expected} targets, as in the first fit, got {len(columns)}."
        )
    return columns


@dataclass(frozen=True, eq=False)
class ClassHead(Head):
    """Logits of one or several labels, concatenated.

    Attributes:
        labels: the sorted classes of each label.
        temperature: divisor of the logits in predictions.
    """

    labels: tuple[np.ndarray, ...]
    temperature: float = 1.0
    default_sites: ClassVar[str] = "first"
    allows_bfloat16: ClassVar[bool] = True

    @staticmethod
    def read(y: Any) -> np.ndarray:
        y = read_target(y)
        check_classification_targets(y)
        return y

    @classmethod
    def learn(cls, y: np.ndarray, arguments: Arguments, classes: Any = None) -> Self:
        single = y.ndim == 1
        columns = [y]
        if not single:
            columns = list(y.T)
        if classes is not None:
            declared = classes
            if single:
                declared = [classes]
            columns = [np.concatenate(pair) for pair in zip(columns, declared, strict=True)]
        labels = tuple(np.unique(column) for column in columns)
        if single and len(labels[0]) == 1:
            raise ValueError(
                f"y has only one class, {labels[0].item()!r}. At least two classes are needed."
            )
        head = cls(labels, single=single)
        if head.is_multilabel:  # a label may have one value only in these rows
            labels = tuple(np.array([0, 1], dtype=label.dtype) for label in labels)
            head = replace(head, labels=labels)
        return head

    @property
    def is_multilabel(self) -> bool:
        """Whether there are several labels, all of them 0 or 1."""
        return not self.single and all(set(label.tolist()) <= {0, 1} for label in self.labels)

    @property
    def classes(self) -> Any:
        """The classes, or a list of classes for several labels."""
        if self.single:
            return self.labels[0]
        return list(self.labels)

    @property
    def sizes(self) -> list[int]:
        """Number of classes of each label."""
        return [len(label) for label in self.labels]

    @property
    def outputs(self) -> int:
        return sum(self.sizes)

    def values(self, y: np.ndarray) -> Tensor:
        codes = []
        for column, label in zip(split_targets(y, len(self.labels)), self.labels, strict=True):
            unknown = np.flatnonzero(~np.isin(column, label))
            if len(unknown):
                raise ValueError(
                    f"y has the class {column[unknown[0]]!r} in {describe_rows(unknown)}, which "
                    "was not in the first fit. A warm start cannot add classes; use "
                    "warm_start=False."
                )
            codes.append(np.searchsorted(label, column))
        return torch.from_numpy(np.stack(codes, 1))

    def statistics_target(self, values: Tensor) -> Tensor:
        columns = []
        for codes, size in zip(values.long().T, self.sizes, strict=True):
            indicators = one_hot(codes, size)
            if size == 2:  # the two indicators add up to 1
                indicators = indicators[:, 1:]
            columns.append(indicators)
        return torch.cat(columns, 1).double()

    def strata(self, values: Tensor) -> Tensor | None:
        if values.shape[1] > 1:
            return None
        return values[:, 0]

    def losses(self, outputs: Tensor, target: Tensor) -> Tensor:
        # A plain gather over all members is faster than cross_entropy member by member.
        target = target.view(len(target), -1)
        log_probabilities = []
        for k, logits in enumerate(outputs.split(self.sizes, dim=-1)):
            index = target[:, k].long().expand(logits.shape[:-1]).unsqueeze(-1)
            log_probabilities.append(logits.log_softmax(-1).gather(-1, index))
        return -torch.cat(log_probabilities, -1)

    def log_likelihood(self, outputs: Tensor, target: Tensor) -> Tensor:
        return log_mean(-self.losses(outputs / self.temperature, target))

    def calibrated(self, outputs: Tensor, target: Tensor) -> Self:
        outputs = outputs.double()
        rows = outputs.shape[1]

        def loss(temperature: float) -> Tensor:
            # One added row whose classes are equally likely: without it the best temperature of
            # a classifier that makes no error would be 0.
            added = torch.zeros((), dtype=torch.float64)
            for logits in (outputs / temperature).split(self.sizes, dim=-1):
                added = added - log_mean(logits.log_softmax(-1)).mean()
            head = replace(self, temperature=temperature)
            return rows * head.metric(outputs, target) + added

        return replace(self, temperature=best_scale(loss))

    def with_scores(self, outputs: Tensor, target: Tensor) -> Self:
        # The score of a row is minus the probability of its class: unlikely classes score high.
        return replace(self, scores=-self.log_likelihood(outputs.double(), target).exp())

    def probabilities(self, outputs: Tensor) -> list[Tensor]:
        """Return the members' probabilities of each label, ``(member, row, class)``."""
        logits = (outputs.double() / self.temperature).split(self.sizes, dim=-1)
        return [label_logits.softmax(-1) for label_logits in logits]

    def summarise(self, outputs: Tensor) -> tuple[Tensor, ...]:
        """Return the mean probabilities of each label, ``(row, class)``."""
        return tuple(probabilities.mean(0) for probabilities in self.probabilities(outputs))
