"""scikit-learn estimators for tables.

``EmbeddedEnsembleClassifier`` and ``EmbeddedEnsembleRegressor`` preprocess, train and calibrate by
themselves. ``load`` reads files that they ``save``. ``neg_nll`` and ``neg_crps`` are
scorers for ``scoring=``.

A fit goes through these files, in this order. The last column has the parts of scikit-learn with
the same task; ADR 12 says why some of them are not used.

=================== ============================================= =================================
file                task                                          scikit-learn
=================== ============================================= =================================
estimator           ``fit`` and blocks of predictions             BaseEstimator
classifier,         predictions and their documentation           ClassifierMixin, RegressorMixin
regressor
defaults            valid arguments, values of "auto"             parameter constraints
frames              read and validate ``X``                       validate_data
targets, gaussians  read ``y``, loss, metric, calibration         TransformedTargetRegressor,
                                                                  CalibratedClassifierCV
preparation         split the rows and encode them                train_test_split
columns             encode the columns                            ColumnTransformer, OneHotEncoder,
                                                                  TargetEncoder
bins                bins and scores of numeric columns            KBinsDiscretizer, RobustScaler,
                                                                  QuantileTransformer
selection           columns of a wide table                       SelectFromModel
groups              training and calibration with cross-fitting   cross_val_predict
pipeline            the same with one split; search               HalvingGridSearchCV
perceptron          inputs, network, ensemble                     MLPClassifier
layers              layers that only some arguments use
descent             training loop                                 MLPClassifier.fit
=================== ============================================= =================================

Fitted values pass from file to file in two frozen dataclasses: ``preparation.Prepared`` has the
encoded rows, ``pipeline.Fitted`` has everything that predictions need. A *head*
(``targets.Head``) is all that depends on the kind of target.

Predictions use ``predictor`` and ``first_layer``. ``display``, ``storage`` and ``parsing`` show,
save and load a model.
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
