"""scikit-learn estimators for tables.

``EmbeddedEnsembleClassifier`` and ``EmbeddedEnsembleRegressor`` preprocess, tune, train and
calibrate by themselves. ``load`` reads files that they ``save``. ``neg_nll`` and ``neg_crps`` are
scorers for ``scoring=``.

A fit goes through these files, in this order:

1. ``estimator`` (with ``classifier``, ``regressor``): arguments, ``fit``, predictions.
2. ``defaults``: valid arguments and the values of "auto".
3. ``frames``: read a table. ``targets``, ``gaussians``: heads, which read the target, are the
   likelihood and turn outputs into predictions.
4. ``preparation``: split the rows and encode them. ``columns``, ``bins``: learn the encoding;
   ``selection``: choose the columns of a wide table.
5. ``pipeline``: search, training, calibration; ``groups``: the same with cross-fitting.
6. ``perceptron``: encoder, network, ensemble. ``descent``: the training loop.

Predictions use ``predictor``. ``display``, ``storage`` and ``parsing`` show, save and load a model.
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
