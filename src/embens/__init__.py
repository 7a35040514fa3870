"""embens: embedded ensembles. One neural network, many models inside it."""

from embens import data, laws, metrics, networks
from embens.embed import batch_ensemble, embed, independent, last_layer_dropout, mc_dropout
from embens.ensemble import EmbeddedEnsemble
from embens.prediction import Prediction, predict
from embens.storage import load
from embens.training import Divergence, History, fit, objective

__all__ = [
    "Divergence",
    "EmbeddedEnsemble",
    "History",
    "Prediction",
    "batch_ensemble",
    "data",
    "embed",
    "fit",
    "independent",
    "last_layer_dropout",
    "laws",
    "load",
    "mc_dropout",
    "metrics",
    "networks",
    "objective",
    "predict",
]
