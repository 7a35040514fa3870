"""embens: embedded ensembles. Many models inside one PyTorch network."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

from embens import laws, networks
from embens.embed import batch_ensemble, embed
from embens.ensemble.module import EmbeddedEnsemble
from embens.families import (
    adapt,
    independent,
    last_layer_dropout,
    low_rank,
    masksembles,
    mc_dropout,
)
from embens.losses import gaussian_nll
from embens.optim import objective
from embens.prediction import Prediction  # torch.load of a prediction needs it
from embens.sites import register_layer

if _TYPE_CHECKING:
    from embens import finite, metrics, tabular, theory, training
    from embens.comparison import Comparison, compare
    from embens.ensemble.export import to_onnx
    from embens.ensemble.loading import load
    from embens.evaluation import evaluate
    from embens.finite import diagnose
    from embens.inference import predict
    from embens.training import Divergence, History, fit

__all__ = [
    "Comparison",
    "Divergence",
    "EmbeddedEnsemble",
    "History",
    "Prediction",
    "adapt",
    "batch_ensemble",
    "compare",
    "diagnose",
    "embed",
    "evaluate",
    "finite",
    "fit",
    "gaussian_nll",
    "independent",
    "last_layer_dropout",
    "laws",
    "load",
    "low_rank",
    "masksembles",
    "mc_dropout",
    "metrics",
    "networks",
    "objective",
    "predict",
    "register_layer",
    "tabular",
    "theory",
    "to_onnx",
    "training",
]

_ROOMS = ("finite", "metrics", "tabular", "theory", "training")
_HOMES = {
    "Comparison": "embens.comparison",
    "Divergence": "embens.training",
    "History": "embens.training",
    "compare": "embens.comparison",
    "diagnose": "embens.finite",
    "evaluate": "embens.evaluation",
    "fit": "embens.training",
    "load": "embens.ensemble.loading",
    "predict": "embens.inference",
    "to_onnx": "embens.ensemble.export",
}
"""Public names that are imported when they are first used, and where they are defined."""


def __getattr__(name: str):
    """Import rooms and functions that are large, or that need more than torch, on first use."""
    if name in _ROOMS:
        return _import_module(f"embens.{name}")
    if name in _HOMES:
        return getattr(_import_module(_HOMES[name]), name)
    if name == "__version__":
        return _import_module("importlib.metadata").version("embens")
    raise AttributeError(f"module 'embens' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
