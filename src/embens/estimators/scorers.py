"""Scorers of regressors that predict a distribution, for ``scoring=`` of scikit-learn's tools.

Greater is better, as scikit-learn wants it: both are negative. Classifiers have scikit-learn's own
``"neg_log_loss"``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embens.estimators import mixture

if TYPE_CHECKING:
    import numpy as np


def neg_nll(estimator: Any, X: Any, y: Any, *, sample_weight: Any = None) -> float:
    """Return the mean log-density of targets under the predicted mixture."""
    import numpy as np

    return float(np.average(score_rows(mixture.log_density, estimator, X, y), 0, sample_weight))


def neg_crps(estimator: Any, X: Any, y: Any, *, sample_weight: Any = None) -> float:
    """Return the mean continuous ranked probability score, negative, in units of the target."""
    import numpy as np

    return -float(np.average(score_rows(mixture.crps, estimator, X, y), 0, sample_weight))


def score_rows(
    score: Callable[[Tensor, Tensor, Tensor], Tensor], estimator: Any, X: Any, y: Any
) -> np.ndarray:
    """Return a score of each row, the mean over targets, by members' means and deviations."""
    import numpy as np
    from sklearn.base import is_regressor

    if not is_regressor(estimator):
        raise TypeError(
            f"expected an EmbeddedEnsembleRegressor; got {type(estimator).__name__}. For a "
            "classifier use scoring='neg_log_loss'."
        )
    mean, std = map(torch.from_numpy, estimator.predict_members(X))
    target = torch.from_numpy(np.array(y, dtype="float64").reshape(mean.shape[1:]))
    return score(mean, std, target).reshape(len(target), -1).mean(1).numpy()
