"""Estimators for tables, as scikit-learn users expect them. Importing this needs scikit-learn.

``EmbeddedEnsembleClassifier`` and ``EmbeddedEnsembleRegressor`` do everything by themselves;
``load`` reads what they ``save``; ``neg_nll`` and ``neg_crps`` are scorers for ``scoring=``.
"""

try:
    from embens.estimators.base import Uncertainty, load
except ModuleNotFoundError as error:  # pragma: no cover
    raise ModuleNotFoundError(f"{error}. pip install 'embens[estimators]'") from None
from embens.estimators.classifier import EmbeddedEnsembleClassifier
from embens.estimators.regressor import EmbeddedEnsembleRegressor, neg_crps, neg_nll

__all__ = [
    "EmbeddedEnsembleClassifier",
    "EmbeddedEnsembleRegressor",
    "Uncertainty",
    "load",
    "neg_crps",
    "neg_nll",
]
