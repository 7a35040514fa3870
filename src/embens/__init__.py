"""embens: embedded ensembles. One neural network, many models inside it."""

from importlib import import_module as _import_module

from embens import data, finite, laws, metrics, networks, theory
from embens.embedding.families import (
    batch_ensemble,
    embed,
    independent,
    last_layer_dropout,
    mc_dropout,
)
from embens.ensemble import EmbeddedEnsemble
from embens.ensemble.surgery import load
from embens.finite import diagnose
from embens.objective import objective
from embens.prediction import Prediction, predict
from embens.reading import register_layer
from embens.training import Divergence, History, fit

__all__ = [
    "Divergence",
    "EmbeddedEnsemble",
    "History",
    "Prediction",
    "batch_ensemble",
    "data",
    "diagnose",
    "embed",
    "finite",
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
    "register_layer",
    "theory",
]


def __getattr__(name: str):
    """Import ``embens.estimators`` when it is asked for: it needs scikit-learn."""
    if name == "estimators":
        return _import_module("embens.estimators")
    raise AttributeError(f"module 'embens' has no attribute {name!r}")
