"""scikit-learn estimators for tables.

``EmbeddedEnsembleClassifier`` and ``EmbeddedEnsembleRegressor`` preprocess, tune, train and
calibrate by themselves. ``load`` reads files that they ``save``. ``neg_nll`` and ``neg_crps`` are
scorers for ``scoring=``.
"""

try:
    from embens.tabular.estimator import Uncertainty, load
except ModuleNotFoundError as error:  # pragma: no cover
    raise ModuleNotFoundError(f"{error}. pip install 'embens[tabular]'") from None
from embens.tabular.classifier import EmbeddedEnsembleClassifier
from embens.tabular.regressor import EmbeddedEnsembleRegressor, neg_crps, neg_nll

__all__ = [
    "EmbeddedEnsembleClassifier",
    "EmbeddedEnsembleRegressor",
    "Uncertainty",
    "load",
    "neg_crps",
    "neg_nll",
]
