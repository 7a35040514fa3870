r"""Heads: how a target is represented, trained, scored, calibrated and predicted.

A head does everything that depends on the kind of target. It converts the target to a tensor,
computes the training loss of each member and the validation metric of the ensemble, and turns
network outputs into predictions. This file has the base class and the head of classes. The
regression head is in :mod:`embens.tabular.gaussians`.

Outputs are ``(member, row, output)``. Target tensors are ``(row, target + 1)``; their last column
has the sample weights. The default metric is the negative log-likelihood of the *mixture* of the
members,

.. math::
    -\frac1n \sum_i \log \frac1M \sum_a p_a(y_i \mid x_i).

Unlike the mean of the members' losses, it rewards disagreement.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, ClassVar, Self

import narwhals.stable.v2 as nw
import numpy as np
import pandas
import torch
from narwhals.dependencies import is_into_dataframe
from sklearn.utils import column_or_1d
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array
from torch import Tensor
from torch.nn.functional import one_hot

from embens.mixtures import best_scale
from embens.tabular.defaults import Arguments
from embens.tabular.frames import describe_rows

MIXTURE_EXPONENT = 1 / 3  # many groups together have the temperature T / T^(1/3), one group T


def read_target(y: Any) -> np.ndarray:
    """Return a target as an array, ``(row,)`` or ``(row, target)``.

    A table with one column becomes a vector.

    Raises:
        ValueError: If a value is missing or infinite; the message names its row.
    """
    if type(y).__module__.startswith("pyarrow") and not is_into_dataframe(y):
        y = np.array(y.to_pylist())
    y = nw.from_native(y, allow_series=True, pass_through=True)
    names = [getattr(y, "name", None)]
    if hasattr(y, "columns"):
        names = list(y.columns)
    if hasattr(y, "to_numpy"):
        y = y.to_numpy()
    y = np.asarray(y)
    invalid = pandas.isna(y)
    problem = "NaN: the target is missing"
    if not invalid.any() and y.dtype.kind in "fO":
        invalid = (y == math.inf) | (y == -math.inf)
        problem = "infinity"
    if invalid.any():
        cells = np.argwhere(invalid)
        column = 0
        if y.ndim == 2 and len(names) > 1:
            column = cells[0, 1]
        place = describe_rows(cells[:, 0], names[column])
        raise ValueError(f"Input y contains {problem} in {place}. Remove such rows.")
    if y.ndim == 2 and y.shape[1] == 1:
        return column_or_1d(y, warn=True)
    return y


def split_targets(y: np.ndarray, expected: int) -> list[np.ndarray]:
    """Return the columns of a target.

    Raises:
        ValueError: If their number differs from the first fit.
    """
    columns = [y]
    if y.ndim == 2:
        columns = list(y.T)
    if len(columns) != expected:
        raise ValueError(
            f"y must have {expected} targets, as in the first fit, got {len(columns)}."
        )
    return columns


def read_weights(sample_weight: Any, rows: int) -> Tensor:
    """Return the sample weights as float64 ``(row,)``.

    Args:
        sample_weight: One weight for each row, one number for all rows, or None for 1.
        rows: The number of rows.
    """
    if sample_weight is None:
        return torch.ones(rows, dtype=torch.float64)
    if isinstance(sample_weight, Real):
        sample_weight = np.full(rows, float(sample_weight))
    weights = check_array(
        sample_weight,
        ensure_2d=False,
        dtype="float64",
        ensure_non_negative=True,
        input_name="sample_weight",
    )
    if weights.shape != (rows,):
        raise ValueError(f"sample_weight must have shape ({rows},), got {weights.shape}.")
    if not weights.any():
        raise ValueError("sample_weight must have a positive value, but all weights are zero.")
    return torch.tensor(weights)


def class_weight_factors(class_weight: Any, y: np.ndarray, weights: Tensor) -> Tensor:
    """Return the factors of the sample weights by class, ``(row,)``.

    "balanced" counts only rows whose weight is not 0.
    """
    used = weights.nonzero().squeeze(1)
    factors = torch.ones_like(weights)
    is_valid = True
    if isinstance(class_weight, dict):
        is_valid = all(isinstance(factor, Real) for factor in class_weight.values())
    if is_valid:
        factors[used] = torch.tensor(compute_sample_weight(class_weight, y[used.numpy()]))
        is_valid = bool((factors.isfinite() & (factors >= 0)).all() and factors[used].any())
    if not is_valid:
        raise ValueError(
            "class_weight must have numbers that are not negative, at least one of them "
            f"positive, got {class_weight!r}."
        )
    return factors


@dataclass(frozen=True, eq=False, kw_only=True)
class Head(ABC):
    """Base class of the heads.

    Attributes:
        single: Whether the target is a vector, not a table.
        scores: Conformal scores of held-out rows, ``(row, target)``.
        detached: Whether the second half of the outputs does not train the hidden layers.
        constant_name: Name of the prediction of :meth:`constant_outputs`.
        default_sites: Where members differ by default.
        calibration_stride: Every ``calibration_stride``-th held-out row is reserved for
            conformal scores.
    """

    single: bool = True
    scores: Tensor | None = None
    detached: ClassVar[bool] = False
    constant_name: ClassVar[str]
    default_sites: ClassVar[str] = "hidden"
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
            y: The target of all rows.
            arguments: Arguments of the estimator.
            classes: All classes of a classifier, if ``y`` does not have all of them.
        """

    @property
    @abstractmethod
    def outputs(self) -> int:
        """Number of network outputs."""

    @abstractmethod
    def values(self, y: np.ndarray) -> Tensor:
        """Return a target as a tensor ``(row, target)``: codes of classes, or numbers."""

    @abstractmethod
    def scaled(self, values: Tensor, weights: Tensor) -> Self:
        """Return the head with the location and scale of the training rows."""

    def with_range(self, values: Tensor) -> Self:
        """Return the head with the range of all rows of the first fit; classes have no range."""
        return self

    def with_wider_range(self, values: Tensor) -> Self:
        """Return the head of an earlier fit with a range that includes further rows."""
        return self

    @abstractmethod
    def strata(self, values: Tensor) -> np.ndarray | None:
        """Return the classes ``(row,)`` by which held-out rows are stratified, if any."""

    @abstractmethod
    def pack(self, values: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the target tensor: what the network learns, then weights."""

    @abstractmethod
    def statistics_target(self, values: Tensor) -> Tensor:
        """Return numbers ``(row, number)`` whose category means are inputs of the network."""

    @abstractmethod
    def criterion(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the weighted training losses ``(…, row)`` of one member or of all members."""

    @abstractmethod
    def constant_outputs(self, target: Tensor) -> Tensor:
        """Return the outputs ``(1, 1, output)`` of the best prediction that ignores all columns."""

    @abstractmethod
    def metric(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the weighted mean over rows of the loss of the ensemble."""

    @abstractmethod
    def calibrated(self, outputs: Tensor, target: Tensor) -> Self:
        """Return the head with the best temperature for held-out rows."""

    def for_mixture_of_groups(self, groups: int) -> Self:
        """Return the head of a group with the temperature of a mixture of several groups."""
        return self

    @abstractmethod
    def with_scores(self, outputs: Tensor, target: Tensor) -> Self:
        """Return the head with the conformal scores of rows that nothing else has used."""

    def for_mean_of_groups(self, outputs: Tensor, fold_of_row: Tensor) -> Self:
        """Return the head with scores of the mean of groups; those of classes stay as they are.

        Args:
            outputs: Outputs of all groups for some training rows, ``(group, member, row, output)``.
            fold_of_row: The group that has not seen a row, ``(row,)``.
        """
        return self

    @abstractmethod
    def summarise(self, outputs: Tensor) -> tuple[Tensor, ...]:
        """Return the prediction of the ensemble, one or several tensors ``(row, …)``."""


@dataclass(frozen=True, eq=False)
class ClassHead(Head):
    """Logits of one or several labels, concatenated.

    Attributes:
        labels: The sorted classes of each label.
        temperature: Divisor of the logits in predictions.
    """

    labels: tuple[np.ndarray, ...]
    temperature: float = 1.0
    constant_name: ClassVar[str] = "the class frequencies"
    default_sites: ClassVar[str] = "first"

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

    def scaled(self, values: Tensor, weights: Tensor) -> Self:
        return self  # classes have no scale

    def strata(self, values: Tensor) -> np.ndarray | None:
        if values.shape[1] > 1:
            return None
        return values[:, 0].numpy()

    def pack(self, values: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.cat([values.to(dtype), weights[:, None].to(dtype)], 1)

    def statistics_target(self, values: Tensor) -> Tensor:
        columns = []
        for codes, size in zip(values.long().T, self.sizes, strict=True):
            indicators = one_hot(codes, size)
            if size == 2:  # the two indicators add up to 1
                indicators = indicators[:, 1:]
            columns.append(indicators)
        return torch.cat(columns, 1).double()

    def log_probabilities(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the log-probabilities of the true classes, ``(…, row, label)``."""
        # A plain gather over all members is faster than cross_entropy member by member.
        columns = []
        for k, logits in enumerate(outputs.split(self.sizes, dim=-1)):
            index = target[:, k].long().expand(logits.shape[:-1]).unsqueeze(-1)
            columns.append(logits.log_softmax(-1).gather(-1, index))
        return torch.cat(columns, -1)

    def criterion(self, outputs: Tensor, target: Tensor) -> Tensor:
        return -self.log_probabilities(outputs, target).sum(-1) * target[:, -1]

    def constant_outputs(self, target: Tensor) -> Tensor:
        frequencies = []
        for k, size in enumerate(self.sizes):
            indicators = one_hot(target[:, k].long(), size).to(target)
            # A class without rows is as frequent as half a row: its logarithm is finite.
            frequencies.append((target[:, -1] @ indicators).clamp(min=0.5))
        return torch.cat(frequencies).log().view(1, 1, -1)

    def log_likelihood(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the log-likelihood of the mean probability, ``(row, label)``."""
        log_probabilities = self.log_probabilities(outputs / self.temperature, target)
        return log_mean(log_probabilities)

    def metric(self, outputs: Tensor, target: Tensor) -> Tensor:
        losses = -self.log_likelihood(outputs, target).sum(-1)
        weights = target[:, -1].to(losses)
        return losses @ weights / weights.sum()

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

    def for_mixture_of_groups(self, groups: int) -> Self:
        """Return the head of a group with the temperature of a mixture of several groups.

        The temperature of a group is above 1 if it is too confident. Groups err on different rows,
        so their mean probability is less confident than that of one group and needs a temperature
        closer to 1. The exponent was measured with four groups (ADR 9).
        """
        overconfidence = max(1.0, self.temperature)
        exponent = MIXTURE_EXPONENT * (1 - 1 / groups)
        return replace(self, temperature=self.temperature / overconfidence**exponent)

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


def log_mean(logarithms: Tensor) -> Tensor:
    """Return the logarithm of the mean over the first axis."""
    return logarithms.logsumexp(0) - math.log(len(logarithms))


def calibrate_head(
    head: Any, outputs: Tensor, target: Tensor, train_target: Tensor, can_calibrate: bool
) -> tuple[Any, dict[str, Any], str]:
    """Fit the temperature of a head to outputs, and compare them with a constant prediction.

    Args:
        head: The head; its temperature and scores are not used.
        outputs: ``(member, row, output)``.
        target: Targets of the same rows.
        train_target: Targets of the training rows, for the constant prediction.
        can_calibrate: Whether to fit the temperature; the rows have to be held out.

    Returns:
        The calibrated head, the losses, and a sentence if the outputs are worse than the best
        constant prediction, else "".
    """
    head = replace(head, temperature=1.0, scores=None)
    constant = head.constant_outputs(train_target).expand(1, len(target), -1)
    losses = {
        "ensemble": float(head.metric(outputs, target)),
        "members": [float(head.metric(member, target)) for member in outputs.split(1)],
        "constant": float(head.metric(constant, target)),
    }
    if can_calibrate:
        head = head.calibrated(outputs, target)
    loss = float(head.metric(outputs, target))
    problem = ""
    if loss > losses["constant"]:
        problem = (
            f"The ensemble is worse than a constant prediction: its loss is {loss:.4g} on "
            f"{len(target)} rows, that of {head.constant_name} is {losses['constant']:.4g}. Train "
            "longer, or check that the columns of X explain y."
        )
    return head, losses, problem
