"""Regressor: a mixture of Gaussians with conformal intervals, and scorers for distributions."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from sklearn.base import RegressorMixin
from sklearn.utils import check_consistent_length
from torch import Tensor

from embens.conformal import conformal_quantile
from embens.mixtures import crps, negative_log_likelihood, quantile
from embens.tabular.estimator import TableEstimator, Uncertainty
from embens.tabular.gaussians import GaussianHead


def neg_nll(estimator: Any, X: Any, y: Any, *, sample_weight: Any = None) -> float:
    """Score a regressor by the mean log-density of the targets; a scorer for ``scoring=``.

    Args:
        estimator: A fitted :class:`EmbeddedEnsembleRegressor`.
        X: The rows.
        y: Their targets.
        sample_weight: ``(row,)``.

    Returns:
        The weighted mean over rows, averaged over targets; higher is better.

    Example:
        >>> from sklearn.datasets import load_diabetes
        >>> X, y = load_diabetes(return_X_y=True)
        >>> model = EmbeddedEnsembleRegressor(members=2, max_epochs=2, tune=False).fit(X, y)
        >>> neg_nll(model, X, y) < 0
        True
    """
    scores = _score_rows(negative_log_likelihood, estimator, X, y)
    return -float(np.average(scores, weights=sample_weight))


def neg_crps(estimator: Any, X: Any, y: Any, *, sample_weight: Any = None) -> float:
    """Score a regressor by its negative CRPS, in units of the target; a scorer for ``scoring=``.

    Args:
        estimator: A fitted :class:`EmbeddedEnsembleRegressor`.
        X: The rows.
        y: Their targets.
        sample_weight: ``(row,)``.

    Returns:
        The weighted mean over rows, averaged over targets; higher is better.

    Example:
        >>> from sklearn.datasets import load_diabetes
        >>> X, y = load_diabetes(return_X_y=True)
        >>> model = EmbeddedEnsembleRegressor(members=2, max_epochs=2, tune=False).fit(X, y)
        >>> neg_crps(model, X, y) < 0
        True
    """
    scores = _score_rows(crps, estimator, X, y)
    return -float(np.average(scores, weights=sample_weight))


def _score_rows(
    score: Callable[[Tensor, Tensor, Tensor], Tensor], estimator: Any, X: Any, y: Any
) -> np.ndarray:
    """Return the score of each row, averaged over targets."""
    if not hasattr(estimator, "predict_mixture"):
        raise TypeError(
            f"This scorer needs an EmbeddedEnsembleRegressor, got {type(estimator).__name__}. Use "
            "scoring='neg_log_loss' for classifiers."
        )
    y = GaussianHead.read(y)
    check_consistent_length(X, y)
    mean, std = estimator.predict_mixture(X)
    target = torch.tensor(y.reshape(mean.shape[1:]))
    scores = score(torch.from_numpy(mean), torch.from_numpy(std), target)
    return scores.reshape(len(target), -1).mean(1).numpy()


@dataclass(eq=False, repr=False)
class EmbeddedEnsembleRegressor(RegressorMixin, TableEstimator):
    """Embedded ensemble of perceptrons for regression on tables.

    Every member predicts a few Gaussians; the prediction is their mixture. The arguments are those
    of :class:`EmbeddedEnsembleClassifier`, except ``class_weight``, and the following.

    Args:
        loss: "quantile" (nine levels), "likelihood" of a Gaussian, "squared" for the mean with a
            variance that does not train the hidden layers, or "student", the likelihood of
            Student's t, for outliers. See :mod:`embens.tabular.gaussians`.
        target_transform: "none", "log" or "quantile" (to normal scores), inverted in predictions;
            "auto" chooses the best held-out CRPS if the target is skewed and ``tune`` is on.
        metric: Metric of early stopping, "nll", "crps" or "rmse"; "auto" depends on the loss.
        validation_fraction: Fraction of rows to hold out with ``folds=1``. Half of them are for
            early stopping, the other half only for ``predict_interval``, so that its coverage is
            guaranteed.
        calibrate: Whether to fit a factor of the standard deviations on the validation rows.

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
    head_class: ClassVar[Any] = GaussianHead
    scoring: ClassVar[Any] = staticmethod(neg_crps)

    def _to_numpy(self, tensor: Tensor) -> np.ndarray:
        """Return an array, without the last axis (target) if the target is a vector."""
        if self.head_.single:
            tensor = tensor[..., 0]
        return tensor.numpy()

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return the mean of the mixture.

        Args:
            X: The rows.
            return_std: Whether to return the standard deviation as well.

        Returns:
            The mean, ``(row,)`` or ``(row, target)``; a pair of mean and standard deviation with
            ``return_std``.

        Example:
            >>> from sklearn.datasets import load_diabetes
            >>> X, y = load_diabetes(return_X_y=True)
            >>> model = EmbeddedEnsembleRegressor(members=2, max_epochs=2, tune=False)
            >>> model = model.fit(X, y)
            >>> model.predict(X).shape
            (442,)
        """
        if not return_std:
            (mean,) = self._predict_blocks(X, GaussianHead.predict_mean)
            return self._to_numpy(mean)
        mean, std = self._predict_blocks(X, GaussianHead.summarise)
        return self._to_numpy(mean), self._to_numpy(std)

    def predict_members(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and standard deviation of each member.

        Args:
            X: The rows.

        Returns:
            Two arrays ``(member, row)``, or ``(member, row, target)`` for several targets.

        Example:
            >>> from sklearn.datasets import load_diabetes
            >>> X, y = load_diabetes(return_X_y=True)
            >>> model = EmbeddedEnsembleRegressor(members=2, max_epochs=2, tune=False)
            >>> model = model.fit(X, y)
            >>> mean, std = model.predict_members(X)
            >>> mean.shape
            (2, 442)
        """
        mean, std = self._predict_blocks(X, GaussianHead.member_moments, 1)
        return self._to_numpy(mean), self._to_numpy(std)

    def predict_mixture(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and standard deviation of each Gaussian of the mixture.

        Args:
            X: The rows.

        Returns:
            Two arrays ``(component, row)``, or ``(component, row, target)`` for several targets.

        Example:
            >>> from sklearn.datasets import load_diabetes
            >>> X, y = load_diabetes(return_X_y=True)
            >>> model = EmbeddedEnsembleRegressor(members=2, max_epochs=2, tune=False)
            >>> model = model.fit(X, y)
            >>> mean, std = model.predict_mixture(X)
            >>> mean.shape  # nine Gaussians of each member
            (18, 442)
        """
        mean, std = self._predict_blocks(X, GaussianHead.mixture, 1)
        return self._to_numpy(mean), self._to_numpy(std)

    def predict_uncertainty(self, X: Any) -> Uncertainty:
        """Return the variance of the prediction and its two parts.

        Aleatoric is the mean variance of the members, epistemic the variance of their means.

        Args:
            X: The rows.

        Returns:
            Three arrays ``(row,)``, or ``(row, target)`` for several targets.

        Example:
            >>> from sklearn.datasets import load_diabetes
            >>> X, y = load_diabetes(return_X_y=True)
            >>> model = EmbeddedEnsembleRegressor(members=2, max_epochs=2, tune=False)
            >>> model = model.fit(X, y)
            >>> total, aleatoric, epistemic = model.predict_uncertainty(X)
            >>> total.shape
            (442,)
        """
        aleatoric, epistemic = self._predict_blocks(X, _variances)
        aleatoric, epistemic = self._to_numpy(aleatoric), self._to_numpy(epistemic)
        return Uncertainty(aleatoric + epistemic, aleatoric, epistemic)

    def predict_quantiles(
        self, X: Any, quantiles: float | Sequence[float] = (0.05, 0.5, 0.95)
    ) -> np.ndarray:
        """Return quantiles of the mixture; they have no coverage guarantee.

        They respect the fitted values of the target: none is negative if no fitted value is, none
        is outside 0 and 1 if all fitted values are between them, and they are integers if all
        fitted values are.

        Args:
            X: The rows.
            quantiles: One level or several, between 0 and 1.

        Returns:
            ``(row, quantile)``, or ``(row,)`` for one level; one more axis for several targets.

        Example:
            >>> from sklearn.datasets import load_diabetes
            >>> X, y = load_diabetes(return_X_y=True)
            >>> model = EmbeddedEnsembleRegressor(members=2, max_epochs=2, tune=False)
            >>> model = model.fit(X, y)
            >>> model.predict_quantiles(X, (0.1, 0.9)).shape
            (442, 2)
        """
        if not isinstance(quantiles, Iterable):
            return self.predict_quantiles(X, [quantiles])[:, 0]
        levels = list(quantiles)

        def compute(head: GaussianHead, outputs: Tensor) -> list[Tensor]:
            mean, std = head.mixture(outputs)
            values = torch.stack([quantile(mean, std, level) for level in levels], 1)
            return [head.within_bounds(values)]

        (values,) = self._predict_blocks(X, compute)
        return self._to_numpy(values)

    def predict_interval(self, X: Any, coverage: float = 0.9) -> np.ndarray:
        """Return conformal prediction intervals.

        An interval contains a new target with probability at least ``coverage``, on average over
        rows that are exchangeable with the fitted ones, for any model. With several folds this
        holds approximately: the scores are those of each group on the rows that it has not seen,
        corrected for the smaller error of the mean of the groups, and the ends are means over the
        groups. The ends respect the fitted values of the target as those of
        :meth:`predict_quantiles` do; of an integer target they are the first and the last integer
        inside.

        Args:
            X: The rows.
            coverage: The probability, between 0 and 1.

        Returns:
            Lower and upper end, ``(row, 2)``; for several targets ``(row, 2, target)``, each with
            a separate guarantee.

        Example:
            >>> from sklearn.datasets import load_diabetes
            >>> X, y = load_diabetes(return_X_y=True)
            >>> model = EmbeddedEnsembleRegressor(members=2, max_epochs=2, tune=False)
            >>> model = model.fit(X, y)
            >>> model.predict_interval(X, coverage=0.9).shape  # warns: 44 calibration rows
            (442, 2)
        """
        scores = self.conformal_scores(coverage)
        factors = [conformal_quantile(column, coverage) for column in scores.T]
        half_width = torch.tensor(factors, dtype=torch.float64)
        groups = len(getattr(self.ensemble_, "groups", [self.ensemble_]))

        def mean_of_groups(head: GaussianHead, outputs: Tensor) -> list[Tensor]:
            # Not the mixture of all groups, which is wider than the groups that were calibrated.
            moments = [head.summarise(part) for part in outputs.chunk(groups)]
            return [torch.stack(parts).mean(0) for parts in zip(*moments, strict=True)]

        mean, std = self._predict_blocks(X, mean_of_groups)
        low, high = mean - half_width * std, mean + half_width * std
        ends = self.head_.interval_within_bounds(low, high)
        return self._to_numpy(torch.stack(ends, 1))


def _variances(head: GaussianHead, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean variance of the members and the variance of their means."""
    mean, std = head.member_moments(outputs)
    return (std**2).mean(0), mean.var(0, correction=0)
