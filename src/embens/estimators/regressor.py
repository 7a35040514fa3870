r"""The regressor: a mixture of Gaussians, one for each member.

Its variance is the members' mean variance plus the variance of their means: aleatoric plus
epistemic; see :mod:`embens.prediction`. Intervals are conformal:
:mod:`embens.estimators.calibration`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embens.estimators import mixture
from embens.estimators.base import TableEnsemble
from embens.estimators.calibration import (
    ADDED,
    as_far_off_as_said,
    best_scale,
    conformal_quantile,
)
from embens.estimators.classifier import Uncertainty
from embens.estimators.heads import LOG_VARIANCES, Gaussians
from embens.estimators.inputs import read_target

try:
    from sklearn.base import RegressorMixin
except ModuleNotFoundError:  # pragma: no cover - said by embens.estimators.base
    raise

if TYPE_CHECKING:
    import numpy as np


class EmbeddedEnsembleRegressor(RegressorMixin, TableEnsemble):
    """Embedded ensemble of perceptrons for numbers that belong to a table's rows.

    Every member gives a mean and a variance; together they are a mixture of Gaussians.

    Args:
        family: as all arguments, see :class:`EmbeddedEnsembleClassifier`.
        members: how many.
        p: of ``batch_ensemble``.
        law: of the masks of the dropout families.
        width: of the hidden layers.
        depth: how many hidden layers.
        dropout: rate of ordinary dropout.
        numerical_embedding: "piecewise", "periodic" or "none".
        scaling: "quantile" or "standard".
        bins: of a numeric column.
        categorical_features: "auto", names, numbers or a mask.
        max_categories: that are kept of a column.
        gamma: gradient scale of the shared parameters.
        lr: rate of AdamW.
        modulation_lr: rate of the individual parameters.
        weight_decay: of the shared parameters.
        batch_size: rows in a step.
        max_epochs: at most.
        patience: epochs without a better held-out score.
        validation_fraction: of rows to hold out: one half to stop by, the other for
            ``predict_interval`` alone, so that its coverage is guaranteed.
        calibrate: choose a factor of the members' standard deviations on the rows to stop by.
        warm_start: a second ``fit`` goes on from the weights of the first.
        random_state: a number makes everything deterministic.
        n_jobs: threads.
        verbose: 1 shows progress.

    Attributes:
        ensemble_: the :class:`embens.EmbeddedEnsemble`; and as for the classifier.
        temperature_: what members' standard deviations are multiplied by, for each target.
        scores_: conformal scores of the calibration rows, ``(row, target)``.

    Example:
        >>> from sklearn.datasets import load_diabetes
        >>> X, y = load_diabetes(return_X_y=True)
        >>> model = EmbeddedEnsembleRegressor(members=4, random_state=0).fit(X, y)
        >>> mean, std = model.predict(X, return_std=True)
        >>> mean.shape, bool((std > 0).all())
        ((442,), True)
    """

    _separate_calibration = True

    def _learn_target(self, y: Any) -> Tensor:
        import numpy as np
        from sklearn.utils.validation import check_array

        y = read_target(y)
        y = check_array(y, ensure_2d=False, dtype="float64", input_name="y", estimator=self)
        if y.ndim == 2 and y.shape[1] == 1:
            import warnings

            from sklearn.exceptions import DataConversionWarning

            warnings.warn(
                "A column-vector y was passed when a 1d array was expected. Please change the "
                "shape of y to (n_samples,), for example using ravel().",
                DataConversionWarning,
                stacklevel=4,
            )
            y = y[:, 0]
        if y.ndim > 2:
            raise ValueError(f"y: expected a column or a table; got an array of {y.ndim} axes")
        if self.warm_start and hasattr(self, "ensemble_"):
            expected = () if self.single_ else (len(self.y_mean_),)
            if y.shape[1:] != expected:
                raise ValueError(
                    f"y: expected the first fit's targets, shape (row, *{expected}); got {y.shape}"
                )
        else:
            self.single_ = y.ndim == 1
        return torch.from_numpy(np.array(y.reshape(len(y), -1)))

    def _learn_classes(self, classes: list[Any], *, single: bool) -> None:
        self.single_ = single

    def _target_values(self, y: np.ndarray) -> Tensor:
        return torch.from_numpy(y.astype("float64"))

    def _scale_target(self, values: Tensor, weights: Tensor | None) -> None:
        weights = torch.ones(len(values), dtype=torch.float64) if weights is None else weights
        share = (weights / weights.sum())[:, None]
        self.y_mean_ = (share * values).sum(0)
        std = (share * (values - self.y_mean_) ** 2).sum(0).sqrt()
        size = values.abs().amax(0).clamp(min=1e-300)
        self.y_std_ = torch.where(std > 1e-12 * size, std, torch.ones_like(std))

    def _make_head(self, weighted: bool) -> Gaussians:
        return Gaussians(len(self.y_mean_), weighted)

    def _to_target(self, values: Tensor) -> Tensor:
        return (values - self.y_mean_) / self.y_std_

    def _calibrate(
        self,
        stop: tuple[Tensor, Tensor],
        calibrate: tuple[Tensor, Tensor],
        weights: Tensor | None,
    ) -> None:
        if self.calibrate:
            mean, std = self._gaussians(stop[0])
            share = torch.ones(len(stop[1])).double() if weights is None else weights
            share = share / share.sum()
            found, rows = [], len(stop[1])
            for m, s, y in zip(mean.unbind(-1), std.unbind(-1), stop[1].unbind(-1), strict=True):

                def loss(t: float, m: Tensor = m, s: Tensor = s, y: Tensor = y) -> Tensor:
                    mine = -rows * (share @ mixture.log_density(m, t * s, y))
                    return mine + ADDED * as_far_off_as_said(t)

                found.append(best_scale(loss))
            self.temperature_ = torch.tensor(found, dtype=torch.float64)
        mean, std = self._gaussians(calibrate[0])
        centre, width = _moments(mean, std)
        self.scores_ = (calibrate[1] - centre).abs() / width

    def _forget_calibration(self) -> None:
        self.temperature_ = torch.ones(len(self.y_mean_), dtype=torch.float64)
        self.scores_ = None

    def _gaussians(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the members' means and standard deviations, ``(member, row, target)``."""
        mean, logarithm = outputs.double().split(len(self.y_mean_), dim=-1)
        std = (logarithm.clamp(*LOG_VARIANCES) / 2).exp() * self.y_std_
        return self.y_mean_ + self.y_std_ * mean, std * self.temperature_

    def _shaped(self, tensor: Tensor) -> np.ndarray:
        return (tensor[..., 0] if self.single_ else tensor).numpy()

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return the mean of the mixture; with ``return_std`` its standard deviation as well."""
        found = [_moments(*self._gaussians(outputs)) for outputs in self._blocks(X)]
        mean, std = (self._shaped(torch.cat(parts)) for parts in zip(*found, strict=True))
        return (mean, std) if return_std else mean

    def predict_members(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return every member's mean and standard deviation, ``(member, row)``."""
        found = [self._gaussians(outputs) for outputs in self._blocks(X)]
        mean, std = (self._shaped(torch.cat(parts, 1)) for parts in zip(*found, strict=True))
        return mean, std

    def predict_uncertainty(self, X: Any) -> Uncertainty:
        """Return the variance of the prediction and its two parts.

        Aleatoric is the members' mean variance, epistemic the variance of their means.
        """
        found = []
        for outputs in self._blocks(X):
            mean, std = self._gaussians(outputs)
            aleatoric, epistemic = (std**2).mean(0), mean.var(0, correction=0)
            found.append((aleatoric + epistemic, aleatoric, epistemic))
        return Uncertainty(*(self._shaped(torch.cat(parts)) for parts in zip(*found, strict=True)))

    def predict_quantiles(
        self, X: Any, quantiles: float | Sequence[float] = (0.05, 0.5, 0.95)
    ) -> np.ndarray:
        """Return quantiles of the mixture, ``(row, quantile)``; not conformal.

        Of a single number ``(row,)``.
        """
        if not isinstance(quantiles, Iterable):
            return self.predict_quantiles(X, (float(quantiles),))[:, 0]
        found = []
        for outputs in self._blocks(X):
            mean, std = self._gaussians(outputs)
            levels = [mixture.quantile(mean, std, level) for level in quantiles]
            found.append(torch.stack(levels, 1))
        result = torch.cat(found)
        return (result[..., 0] if self.single_ else result).numpy()

    def predict_interval(self, X: Any, coverage: float = 0.9) -> np.ndarray:
        """Return conformal intervals, ``(row, 2)``: lower and upper end.

        They hold a new target with a chance of at least ``coverage``, on average over rows, if
        rows are alike those that were fitted (exchangeable), however good the model. Of several
        targets ``(row, 2, target)``, each with its own guarantee.
        """
        self._fitted("ensemble_")
        if self.scores_ is None:
            raise ValueError(
                "predict_interval needs rows that were held out, and this fit held out none: the "
                "table has less than 50 rows, or validation_fraction=0. Pass "
                "validation_fraction=0.3, or use predict_quantiles, which guarantees nothing."
            )
        factors = [conformal_quantile(column, coverage) for column in self.scores_.T]
        factor = torch.tensor(factors, dtype=torch.float64)
        found = []
        for outputs in self._blocks(X):
            mean, std = _moments(*self._gaussians(outputs))
            found.append(torch.stack([mean - factor * std, mean + factor * std], 1))
        result = torch.cat(found)
        return (result[..., 0] if self.single_ else result).numpy()

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def _moments(mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of the mixture."""
    return mean.mean(0), ((std**2).mean(0) + mean.var(0, correction=0)).sqrt()
