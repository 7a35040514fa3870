"""The regressor: a mixture of Gaussians, one or a few for each member, with conformal intervals.

``neg_nll`` and ``neg_crps`` are scorers for ``scoring=``, greater is better; classifiers have
``"neg_log_loss"``.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from sklearn.base import RegressorMixin
from sklearn.utils import check_consistent_length
from torch import Tensor

from embens.estimators import gaussians
from embens.estimators.base import TableEnsemble, Uncertainty, looked_up
from embens.estimators.gaussians import Gaussians
from embens.uncertainty import conformal_quantile


@dataclass(eq=False, repr=False)
class EmbeddedEnsembleRegressor(RegressorMixin, TableEnsemble):
    """Embedded ensemble of perceptrons for numbers that belong to a table's rows.

    Every member gives a few Gaussians; together they are the mixture that is predicted. Arguments
    are those of :class:`EmbeddedEnsembleClassifier`, but for a few.

    Args:
        loss: "quantile", of nine levels; "likelihood" of a Gaussian; "squared" for the mean alone,
            and a variance that only looks; "student", the likelihood of Student's t, for outliers.
            See :mod:`embens.estimators.gaussians`.
        target_transform: back again in every prediction: "none", "log", "quantile" (to normal
            scores); "auto": what has the best held-out CRPS, where the target is skewed and
            ``tune`` is on.
        metric: that training is stopped by: "nll", "crps" or "rmse" on held-out rows; "auto": as
            the loss suggests.
        validation_fraction: of rows to hold out: one half to stop by, the other for
            ``predict_interval`` alone, so that its coverage is guaranteed.
        calibrate: choose a factor of the members' standard deviations on the rows to stop by.

    Example:
        >>> from sklearn.datasets import load_diabetes
        >>> X, y = load_diabetes(return_X_y=True)
        >>> model = EmbeddedEnsembleRegressor(members=4, random_state=0).fit(X, y)
        >>> mean, std = model.predict(X, return_std=True)
        >>> mean.shape, bool((std > 0).all())
        ((442,), True)
    """

    _: KW_ONLY
    loss: str = "quantile"
    target_transform: str = "auto"
    metric: str = "auto"
    head = Gaussians

    temperature_ = looked_up("head.temperature", "Factors of members' standard deviations.")

    def _shaped(self, *found: Tensor) -> list[np.ndarray]:
        return [(tensor[..., 0] if self.head_.single else tensor).numpy() for tensor in found]

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return the mean of the mixture; with ``return_std`` its standard deviation as well."""
        mean, std = self._shaped(*self._read(X, Gaussians.summarise))
        return (mean, std) if return_std else mean

    def predict_members(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return every member's mean and standard deviation, ``(member, row)``."""
        mean, std = self._shaped(*self._read(X, Gaussians.moments, 1))
        return mean, std

    def predict_mixture(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and deviation of every Gaussian of the mixture, ``(part, row)``."""
        mean, std = self._shaped(*self._read(X, Gaussians.parts, 1))
        return mean, std

    def predict_uncertainty(self, X: Any) -> Uncertainty:
        """Return the variance of the prediction and its two parts.

        Aleatoric is the members' mean variance, epistemic the variance of their means.
        """

        def variances(head: Gaussians, outputs: Tensor) -> tuple[Tensor, Tensor]:
            mean, std = head.moments(outputs)
            return (std**2).mean(0), mean.var(0, correction=0)

        aleatoric, epistemic = self._shaped(*self._read(X, variances))
        return Uncertainty(aleatoric + epistemic, aleatoric, epistemic)

    def predict_quantiles(
        self, X: Any, quantiles: float | Sequence[float] = (0.05, 0.5, 0.95)
    ) -> np.ndarray:
        """Return quantiles of the mixture, ``(row, quantile)``; not conformal.

        Of a single number ``(row,)``.
        """
        levels = quantiles if isinstance(quantiles, Iterable) else [float(quantiles)]

        def read(head: Gaussians, outputs: Tensor) -> list[Tensor]:
            mean, std = head.parts(outputs)
            return [torch.stack([gaussians.quantile(mean, std, level) for level in levels], 1)]

        (found,) = self._shaped(*self._read(X, read))
        return found if isinstance(quantiles, Iterable) else found[:, 0]

    def predict_interval(self, X: Any, coverage: float = 0.9) -> np.ndarray:
        """Return conformal intervals, ``(row, 2)``: lower and upper end.

        They hold a new target with a chance of at least ``coverage``, on average over rows, if
        rows are alike those that were fitted (exchangeable), however good the model. Of several
        targets ``(row, 2, target)``, each with its own guarantee.
        """
        factors = [conformal_quantile(column, coverage) for column in self.conformal_scores().T]
        factor = torch.tensor(factors, dtype=torch.float64)
        mean, std = self._read(X, Gaussians.summarise)
        (found,) = self._shaped(torch.stack([mean - factor * std, mean + factor * std], 1))
        return found


def neg_nll(estimator: Any, X: Any, y: Any, *, sample_weight: Any = None) -> float:
    """Return the mean log-density of targets under the predicted mixture."""
    return float(np.average(score_rows(gaussians.log_density, estimator, X, y), 0, sample_weight))


def neg_crps(estimator: Any, X: Any, y: Any, *, sample_weight: Any = None) -> float:
    """Return the mean continuous ranked probability score, negative, in units of the target."""
    return -float(np.average(score_rows(gaussians.crps, estimator, X, y), 0, sample_weight))


def score_rows(
    score: Callable[[Tensor, Tensor, Tensor], Tensor], estimator: Any, X: Any, y: Any
) -> np.ndarray:
    """Return a score of each row, the mean over targets, by members' means and deviations."""
    if not hasattr(estimator, "predict_mixture"):
        raise TypeError("this score is for regressors; classifiers have scoring='neg_log_loss'")
    y = Gaussians.read(y)
    check_consistent_length(X, y)
    mean, std = map(torch.from_numpy, estimator.predict_mixture(X))
    target = torch.tensor(y.reshape(mean.shape[1:]))
    return score(mean, std, target).reshape(len(target), -1).mean(1).numpy()


EmbeddedEnsembleRegressor.scoring = staticmethod(neg_crps)
