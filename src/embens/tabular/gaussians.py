r"""Regression head: each member predicts a few Gaussians of equal weight.

========== ================== ==================================================================
loss       Gaussians          outputs for each target
========== ================== ==================================================================
likelihood 1                  mean and log-variance
squared    1                  the same; the variance does not train the hidden layers
student    5                  the same; one mean, and scales that approximate Student's t with
                              4 degrees of freedom
quantile   9                  nine quantiles, each the centre of a Gaussian
========== ================== ==================================================================

With a transform of the target, every Gaussian becomes eight in the units of the target. So for
every loss the prediction is a mixture of Gaussians (:mod:`embens.mixtures`).
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from sklearn.utils.validation import check_array
from torch import Tensor

from embens.mixtures import best_scale, crps, negative_log_likelihood
from embens.tabular.defaults import Arguments
from embens.tabular.targets import Head, read_target, split_targets

MIN_LOG_VARIANCE = -10.0  # bounds of a member's prediction, for a target of variance 1
MAX_LOG_VARIANCE = 10.0
KNOTS = 200  # of the quantile transform
MIN_SKEWNESS = 2.0  # a target is transformed only if its skewness is larger
PRIOR_ROWS = 30  # rows that regularise the factor of the standard deviations
COMPONENT_WIDTH = 0.6  # relative to the split Gaussian; wide enough for a sum without bumps


def _split_gaussian(count: int) -> tuple[Tensor, float]:
    """Return normal quantiles of equal weight and the factor that shrinks them.

    Components of width :data:`COMPONENT_WIDTH` at the shrunk quantiles together have variance 1.
    """
    points = torch.special.ndtri((torch.arange(count, dtype=torch.float64) + 0.5) / count)
    shrinkage = math.sqrt((1 - COMPONENT_WIDTH**2) / float(points.square().mean()))
    return points, shrinkage


# Constants, because an ONNX export cannot compute them.
EIGHT_POINTS, EIGHT_SHRINKAGE = _split_gaussian(8)
NINE_POINTS, NINE_SHRINKAGE = _split_gaussian(9)
LEVELS = (torch.arange(9) + 0.5) / 9  # of the quantiles that are learned
STUDENT_SCALES = torch.tensor([1.939, 1.350, 1.092, 0.906, 0.717])
"""Square root of 4/chi² at the levels .1, .3, …, .9, with 4 degrees of freedom."""


@dataclass(frozen=True, eq=False)
class GaussianHead(Head):
    """Standardised targets as mixtures of Gaussians.

    Attributes:
        targets: Number of targets.
        loss: "quantile", "likelihood", "squared" or "student".
        stopping: Metric of early stopping, "nll", "crps" or "rmse".
        transform: "none", "log" or "quantile".
        knots: Parameters of the transform: ``(2, knot, target)`` values and normal scores for
            "quantile", ``(1, target)`` offsets for "log", None for "none".
        mean: Mean of each transformed target.
        std: Standard deviation of each transformed target.
        smallest: Smallest fitted value of each target; with the largest it gives the bounds.
        largest: Largest fitted value of each target.
        integer: Whether all fitted values of each target are integers.
        temperature: Factor of the predicted standard deviations.
    """

    targets: int
    loss: str = "likelihood"
    stopping: str = "nll"
    transform: str = "none"
    knots: Tensor | None = None
    mean: Tensor | float = 0.0
    std: Tensor | float = 1.0
    smallest: Tensor | float = -math.inf
    largest: Tensor | float = math.inf
    integer: Tensor | bool = False
    temperature: Tensor | float = 1.0
    constant_name: ClassVar[str] = "the mean and spread of all rows"
    calibration_stride: ClassVar[int] = 2

    @staticmethod
    def read(y: Any) -> np.ndarray:
        y = read_target(y)
        try:
            return check_array(y, ensure_2d=False, dtype="float64", input_name="y")
        except ValueError as error:
            raise ValueError(f"y must be numeric for a regressor: {error}") from None

    @classmethod
    def learn(cls, y: np.ndarray, arguments: Arguments, classes: Any = None) -> Self:
        stopping = arguments.metric
        if stopping == "auto":
            stopping = {"squared": "rmse", "quantile": "crps"}.get(arguments.loss, "nll")
        transform = arguments.target_transform
        if transform == "auto":
            transform = "none"
        return cls(y[:1].size, arguments.loss, stopping, transform, single=y.ndim == 1)

    @property
    def detached(self) -> bool:  # type: ignore[override]
        return self.loss == "squared"

    @property
    def outputs(self) -> int:
        if self.loss == "quantile":
            return len(LEVELS) * self.targets
        return 2 * self.targets

    # Transform and scale of the target

    def scaled(self, values: Tensor, weights: Tensor) -> Self:
        if len(values) < 2:
            raise ValueError("A regressor needs at least two training rows, got n_samples=1.")
        size = values.abs().amax(0)
        if ((size > 1e150) | ((size < 1e-150) & (size > 0))).any():
            raise ValueError(
                f"y has values of size {size.tolist()}, whose squares float64 cannot represent. "
                "Rescale it."
            )
        head = replace(self, knots=self._find_knots(values))
        values = head._transform(values)
        share = (weights / weights.sum())[:, None]
        mean = (share * values).sum(0)
        std = (share * (values - mean) ** 2).sum(0).sqrt()
        is_constant = std <= 1e-12 * values.abs().amax(0)
        return replace(head, mean=mean, std=torch.where(is_constant, 1.0, std))

    def _find_knots(self, values: Tensor) -> Tensor | None:
        if self.transform == "none":
            return None
        if self.transform == "log":
            if (values < 0).any():
                raise ValueError(
                    "target_transform='log' needs targets that are not negative, got "
                    f"{values.min().item():g}."
                )
            # Zeros are shifted by half of the smallest positive value.
            smallest = values.where(values > 0, math.inf).amin(0)
            has_zero = (values == 0).any(0)
            return torch.where(has_zero, smallest / 2, 0.0)[None]
        levels = torch.linspace(0.5 / KNOTS, 1 - 0.5 / KNOTS, KNOTS, dtype=torch.float64)
        # A tiny slope makes tied quantiles distinct, so that the transform can be inverted.
        size = values.abs().amax(0)
        size = torch.where(size == 0, 1.0, size)
        slope = 1e-9 * torch.arange(KNOTS)[:, None] * values.std(0).maximum(1e-6 * size)
        scores = torch.special.ndtri(levels)[:, None].expand(-1, self.targets)
        return torch.stack([values.quantile(levels, dim=0) + slope, scores])

    def _transform(self, values: Tensor) -> Tensor:
        if self.knots is None:
            return values
        if self.transform == "log":
            # Held-out values can be smaller than all training values: their logarithm is finite.
            return (values + self.knots[0]).clamp(min=1e-150).log()
        return _interpolate(values, self.knots[0], self.knots[1])

    def _invert(self, values: Tensor) -> Tensor:
        if self.knots is None:
            return values
        if self.transform == "log":
            return values.clamp(max=300.0).exp() - self.knots[0]
        return _interpolate(values, self.knots[1], self.knots[0])

    def values(self, y: np.ndarray) -> Tensor:
        columns = split_targets(y, self.targets)
        return torch.stack([torch.tensor(column.astype("float64")) for column in columns], 1)

    def strata(self, values: Tensor) -> np.ndarray | None:
        return None  # numbers have no classes

    def statistics_target(self, values: Tensor) -> Tensor:
        return self.standardise(values)

    def standardise(self, values: Tensor) -> Tensor:
        """Return transformed values of mean 0 and variance 1."""
        return (self._transform(values) - self.mean) / self.std

    def pack(self, values: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.cat([self.standardise(values), weights[:, None]], 1).to(dtype)

    def unpack(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values of a target tensor in their original units, and the weights."""
        target = target.double()
        return self._invert(self.mean + self.std * target[:, :-1]), target[:, -1]

    # Range of the target

    def with_range(self, values: Tensor) -> Self:
        integer = (values == values.round()).all(0)
        return replace(self, smallest=values.amin(0), largest=values.amax(0), integer=integer)

    def with_wider_range(self, values: Tensor) -> Self:
        return replace(
            self,
            smallest=torch.minimum(torch.as_tensor(self.smallest), values.amin(0)),
            largest=torch.maximum(torch.as_tensor(self.largest), values.amax(0)),
            integer=torch.as_tensor(self.integer) & (values == values.round()).all(0),
        )

    def clip(self, values: Tensor) -> Tensor:
        """Clip means, quantiles or ends of intervals to the bounds of the target.

        The bounds are a guess from the n fitted values: 0 if none is negative, 0 and 1 if all lie
        between them, and the value itself if all are equal. A new value from the same distribution
        is outside with a probability of at most 2 / (n + 1).
        """
        smallest = torch.as_tensor(self.smallest).to(values)
        largest = torch.as_tensor(self.largest).to(values)
        is_constant = smallest == largest
        lower = torch.where(smallest >= 0, 0.0, -math.inf).to(values)
        upper = torch.where((smallest >= 0) & (largest <= 1), 1.0, math.inf).to(values)
        lower = torch.where(is_constant, smallest, lower)
        upper = torch.where(is_constant, largest, upper)
        return values.maximum(lower).minimum(upper)

    def within_bounds(self, values: Tensor) -> Tensor:
        """Return quantiles as values that the target can have: clipped, and rounded if integer."""
        values = self.clip(values)
        return torch.where(torch.as_tensor(self.integer), values.round(), values)

    def interval_within_bounds(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ends of intervals as values that the target can have.

        They contain the same possible values as before: the ends are clipped, and of an integer
        target they are the smallest and the largest integer inside. An interval without an integer
        becomes the integer that is nearest to its centre.
        """
        low, high = self.clip(low), self.clip(high)
        nearest = ((low + high) / 2).round()
        is_empty = low.ceil() > high.floor()
        first = torch.where(is_empty, nearest, low.ceil())
        last = torch.where(is_empty, nearest, high.floor())
        integer = torch.as_tensor(self.integer)
        return torch.where(integer, first, low), torch.where(integer, last, high)

    # Components of the mixture

    def components(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return standardised means and deviations, ``(member, component, row, target)``."""
        if self.loss == "quantile":
            return self._quantile_components(outputs)
        mean, log_variance = outputs.chunk(2, dim=-1)
        std = (log_variance.clamp(MIN_LOG_VARIANCE, MAX_LOG_VARIANCE) / 2).exp().unsqueeze(-3)
        if self.loss == "student":
            std = std * STUDENT_SCALES.to(std)[:, None, None]
        return mean.unsqueeze(-3).expand_as(std), std

    def _quantile_components(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Centre a Gaussian at each quantile, with a width from the distance of its neighbours."""
        # Sorting makes quantiles that cross each other consistent.
        centres = outputs.unflatten(-1, (self.targets, -1)).sort(-1).values
        slopes = centres.diff(dim=-1) / NINE_POINTS.diff().to(centres)
        inner = (slopes[..., 1:] + slopes[..., :-1]) / 2
        widths = torch.cat([slopes[..., :1], inner, slopes[..., -1:]], -1)
        widths = widths.clamp(min=math.exp(MIN_LOG_VARIANCE / 2))
        # Shrink the centres, so that the mixture of wide components keeps the variance.
        middle = centres.mean(-1, keepdim=True)
        centres = middle + NINE_SHRINKAGE * (centres - middle)
        return centres.movedim(-1, 1), COMPONENT_WIDTH * widths.movedim(-1, 1)

    def member_components(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and deviations in units of the target, ``(member, component, …)``."""
        mean, std = self.components(outputs.double())
        mean = self.mean + self.std * mean
        std = self.std * std * self.temperature
        if self.knots is None:
            return mean, std
        # A Gaussian is not Gaussian after the inverse transform. Eight narrow components are
        # nearly linear there: each is mapped by its two ends.
        points = EIGHT_SHRINKAGE * EIGHT_POINTS[:, None, None]
        centres = mean.unsqueeze(2) + std.unsqueeze(2) * points
        half_width = COMPONENT_WIDTH * std.unsqueeze(2)
        low = self._invert(centres - half_width)
        high = self._invert(centres + half_width)
        std = ((high - low) / 2).clamp(min=1e-300)
        return ((low + high) / 2).flatten(1, 2), std.flatten(1, 2)

    def mixture(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and deviations of the whole mixture, ``(component, row, target)``."""
        mean, std = self.member_components(outputs)
        return mean.flatten(0, 1), std.flatten(0, 1)

    def member_moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return each member's mean and standard deviation, ``(member, row, target)``."""
        mean, std = self.member_components(outputs)
        return mean.mean(1), ((std**2).mean(1) + mean.var(1, correction=0)).sqrt()

    def predict_mean(self, outputs: Tensor) -> tuple[Tensor, ...]:
        """Return the mean of :meth:`summarise` only, which is much faster without a transform."""
        if self.knots is not None:
            return self.summarise(outputs)[:1]
        mean = outputs.double().mean(0)
        if self.loss == "quantile":
            mean = mean.unflatten(-1, (self.targets, -1)).mean(-1)
        else:
            mean, _ = mean.chunk(2, dim=-1)
        mean = self.mean + self.std * mean
        return (self.clip(mean),)

    def summarise(self, outputs: Tensor) -> tuple[Tensor, ...]:
        """Return mean, clipped, and standard deviation of the mixture, ``(row, target)``."""
        mean, std = self.mixture(outputs)
        spread = ((std**2).mean(0) + mean.var(0, correction=0)).sqrt()
        return self.clip(mean.mean(0)), spread

    # Losses, metrics and calibration

    def criterion(self, outputs: Tensor, target: Tensor) -> Tensor:
        losses = self.losses(outputs, target[..., :-1])
        return losses.sum(-1) * target[..., -1]

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the training losses of standardised values, ``(…, row, target)``."""
        if self.loss == "quantile":
            error = y.unsqueeze(-1) - outputs.unflatten(-1, (self.targets, -1))
            levels = LEVELS.to(error)
            return 2 * torch.maximum(levels * error, (levels - 1) * error).mean(-1)
        if self.loss == "squared":
            mean, log_variance = outputs.chunk(2, dim=-1)
            log_variance = log_variance.clamp(MIN_LOG_VARIANCE, MAX_LOG_VARIANCE)
            square = (y - mean).square()
            # The variance fits the error, and its gradient does not reach the mean.
            variance_loss = log_variance + square.detach() * (-log_variance).exp()
            return 0.5 * (square + variance_loss)
        mean, std = self.components(outputs)
        return negative_log_likelihood(mean.movedim(-3, 0), std.movedim(-3, 0), y)

    def constant_outputs(self, target: Tensor) -> Tensor:
        if self.loss == "quantile":
            quantiles = target[:, :-1].quantile(LEVELS.to(target), dim=0)
            return quantiles.T.reshape(1, 1, -1)
        return target.new_zeros(1, 1, self.outputs)  # mean 0 and variance 1

    def standard_mixture(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the standardised mixture, ``(component, row, target)``."""
        mean, std = self.components(outputs)
        return mean.flatten(0, 1), self.temperature * std.flatten(0, 1)

    def metric(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the metric of early stopping."""
        target = target.double()
        weights = target[:, -1]
        if self.stopping == "rmse":
            mean, _ = self.summarise(outputs)
            values, _ = self.unpack(target)
            losses = ((values - mean) / self.std).square()
            return (losses.sum(-1) @ weights / weights.sum()).sqrt()
        mean, std = self.standard_mixture(outputs.double())
        if self.stopping == "nll":
            losses = negative_log_likelihood(mean, std, target[:, :-1])
        else:
            # The CRPS of the transformed target: its mixture has an eighth of the components. In
            # float32, because a CRPS of 36 components takes as long as the predictions.
            losses = self.std * crps(mean.float(), std.float(), target[:, :-1].float()).double()
        return losses.sum(-1) @ weights / weights.sum()

    def crps(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the mean CRPS in units of the target, summed over targets."""
        mean, std = self.mixture(outputs)
        values, weights = self.unpack(target)
        return crps(mean, std, values).sum(-1) @ weights / weights.sum()

    def calibrated(self, outputs: Tensor, target: Tensor) -> Self:
        factors = [self._best_factor(k, outputs, target) for k in range(self.targets)]
        return replace(self, temperature=torch.tensor(factors, dtype=torch.float64))

    def _best_factor(self, k: int, outputs: Tensor, target: Tensor) -> float:
        """Return the factor of the standard deviations of target ``k``."""
        mean, std = self.components(outputs.double())
        mean = mean[..., k].flatten(0, 1)
        std = std[..., k].flatten(0, 1)
        y = target[:, k].double()
        weights = target[:, -1].double()

        def loss(factor: float) -> Tensor:
            losses = negative_log_likelihood(mean, factor * std, y)
            # Prior: rows whose error is one predicted standard deviation.
            prior = math.log(factor) + 0.5 / factor**2
            return len(y) * (weights @ losses) / weights.sum() + PRIOR_ROWS * prior

        return best_scale(loss)

    def with_scores(self, outputs: Tensor, target: Tensor) -> Self:
        mean, std = self.summarise(outputs)
        return replace(self, scores=(self.unpack(target)[0] - mean).abs() / std)

    def for_mean_of_groups(self, outputs: Tensor, fold_of_row: Tensor) -> Self:
        r"""Return the head with smaller scores, because the mean of groups has a smaller error.

        The scores are errors of the group that has not seen a row. The mean of :math:`K` groups has

        .. math::
            E[\text{error of the mean}^2] = E[\text{error of a group}^2]
            - (1 - \tfrac1K)\, E[\text{variance between groups}] ,

        all in units of the predicted variance, for rows that no group has seen. There are none. The
        variance between the :math:`K - 1` groups that have seen a row is smaller, because training
        brings them closer to its target. Training does the same to the members of a group. So the
        variance is multiplied by that of the members of the group that has not seen the row,
        divided by that of the members of the other groups. Two groups get no correction.
        """
        if self.scores is None or len(outputs) < 3:
            return self
        moments = [self.summarise(group) for group in outputs]
        means, stds = (torch.stack(parts) for parts in zip(*moments, strict=True))
        groups, rows = means.shape[:2]
        predicted_variance = stds[fold_of_row, torch.arange(rows)].square()
        variance = _of_other_groups(means, fold_of_row).var(0) / predicted_variance
        smallest = torch.finfo(variance.dtype).tiny  # all scores of a constant target are 0
        share = variance.mean(0) / self.scores.square().mean(0).clamp(min=smallest)
        if outputs.shape[1] > 1:
            share = share * self._growth_of_variance(outputs, fold_of_row, predicted_variance)
        # If errors came from the variance between groups alone, the share would be 1.
        factor = (1 - (1 - 1 / groups) * share.clamp(max=1.0)).sqrt()
        return replace(self, scores=factor * self.scores)

    def _growth_of_variance(
        self, outputs: Tensor, fold_of_row: Tensor, predicted_variance: Tensor
    ) -> Tensor:
        """Return the variance between the members of a group, unseen rows ÷ training rows.

        Args:
            outputs: ``(group, member, row, output)``.
            fold_of_row: The group that has not seen a row, ``(row,)``.
            predicted_variance: The unit of variances, ``(row, target)``.

        Returns:
            A ratio of at least 1 for each target.
        """
        means = torch.stack([self.member_moments(group)[0] for group in outputs])
        variances = means.var(1) / predicted_variance
        unseen = variances[fold_of_row, torch.arange(len(fold_of_row))].mean(0)
        seen = _of_other_groups(variances, fold_of_row).mean((0, 1))
        return (unseen / seen.clamp(min=torch.finfo(seen.dtype).tiny)).clamp(min=1.0)


def _of_other_groups(values: Tensor, fold_of_row: Tensor) -> Tensor:
    """Return the values of the groups that have seen a row, ``(group - 1, row, …)``."""
    groups, rows = values.shape[:2]
    others = torch.arange(groups - 1)[:, None].expand(-1, rows)
    others = others + (others >= fold_of_row)  # skip the group that has not seen the row
    return values[others, torch.arange(rows)]


def _interpolate(values: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Interpolate between knots ``(knot, target)`` linearly, and extrapolate beyond them."""
    columns = []
    for value, knots, results in zip(values.unbind(-1), x.unbind(-1), y.unbind(-1), strict=True):
        index = torch.searchsorted(knots.contiguous(), value.contiguous())
        index = index.clamp(1, len(knots) - 1)
        slope = (results[index] - results[index - 1]) / (knots[index] - knots[index - 1])
        columns.append(results[index - 1] + slope * (value - knots[index - 1]))
    return torch.stack(columns, -1)
