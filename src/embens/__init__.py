"""embens: embedded ensembles. One neural network, many models inside it."""

from embens import laws, networks
from embens.embed import batch_ensemble, embed, independent, last_layer_dropout, mc_dropout
from embens.ensemble import EmbeddedEnsemble
from embens.storage import load
from embens.training import objective

__all__ = [
    "EmbeddedEnsemble",
    "batch_ensemble",
    "embed",
    "independent",
    "last_layer_dropout",
    "laws",
    "load",
    "mc_dropout",
    "networks",
    "objective",
]
