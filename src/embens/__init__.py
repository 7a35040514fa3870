"""embens: embedded ensembles. One neural network, many models inside it."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

from embens import laws, metrics, networks
from embens.embedding.families import (
    adapt,
    batch_ensemble,
    bayesian,
    embed,
    independent,
    join,
    last_layer_dropout,
    low_rank,
    masksembles,
    mc_dropout,
    mimo,
    rank1,
)
from embens.ensemble import EmbeddedEnsemble
from embens.ensemble.export import to_onnx
from embens.ensemble.surgery import load
from embens.objective import gaussian_nll, objective
from embens.prediction import Prediction, predict
from embens.reading import register_layer

if _TYPE_CHECKING:
    from embens import finite, theory
    from embens.finite import advise, diagnose, forecast
    from embens.training import Divergence, EachMember, History, fit, select, snapshots

__all__ = [
    "Divergence",
    "EachMember",
    "EmbeddedEnsemble",
    "History",
    "Prediction",
    "adapt",
    "advise",
    "batch_ensemble",
    "bayesian",
    "diagnose",
    "embed",
    "finite",
    "fit",
    "forecast",
    "gaussian_nll",
    "independent",
    "join",
    "last_layer_dropout",
    "laws",
    "load",
    "low_rank",
    "masksembles",
    "mc_dropout",
    "metrics",
    "mimo",
    "networks",
    "objective",
    "predict",
    "rank1",
    "register_layer",
    "select",
    "snapshots",
    "theory",
    "to_onnx",
]


def __getattr__(name: str):
    """Import what is large, or needs more than torch, when it is asked for."""
    if name in ("estimators", "finite", "theory", "training"):
        return _import_module(f"embens.{name}")
    if name in ("Divergence", "EachMember", "History", "fit", "select", "snapshots"):
        return getattr(_import_module("embens.training"), name)
    if name in ("advise", "diagnose", "forecast"):
        return getattr(_import_module("embens.finite"), name)
    if name == "__version__":
        return _import_module("importlib.metadata").version("embens")
    raise AttributeError(f"module 'embens' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "estimators", "__version__"})
