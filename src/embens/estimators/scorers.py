"""Scorers of regressors that predict a distribution, for ``scoring=`` of scikit-learn's tools.

Greater is better, as scikit-learn wants it: both are negative. Classifiers have scikit-learn's own
``"neg_log_loss"``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from embens.estimators import mixture

if TYPE_CHECKING:
    from torch import Tensor


def neg_nll(estimator: Any, X: Any, y: Any, *, sample_weight: Any = None) -> float:
    """Return the mean log-density of targets under the predicted mixture."""
    return _mean(mixture.log_density(*_members_and_target(estimator, X, y)), sample_weight)


def neg_crps(estimator: Any, X: Any, y: Any, *, sample_weight: Any = None) -> float:
    """Return the mean continuous ranked probability score, negative, in units of the target."""
    return -_mean(mixture.crps(*_members_and_target(estimator, X, y)), sample_weight)


def _mean(scores: Tensor, weights: Any) -> float:
    """Return the mean over rows, and targets."""
    import numpy as np

    rows = scores.reshape(len(scores), -1).mean(1)
    return float(np.average(rows.numpy(), weights=weights))


def _members_and_target(estimator: Any, X: Any, y: Any) -> tuple[Tensor, Tensor, Tensor]:
    import numpy as np
    from sklearn.base import is_regressor

    if not is_regressor(estimator):
        raise TypeError(
            f"expected an EmbeddedEnsembleRegressor; got {type(estimator).__name__}. For a "
            "classifier use scoring='neg_log_loss'."
        )
    mean, std = estimator.predict_members(X)
    target = torch.from_numpy(np.array(y, dtype="float64").reshape(mean.shape[1:]))
    return torch.from_numpy(mean), torch.from_numpy(std), target
