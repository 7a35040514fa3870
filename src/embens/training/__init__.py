"""Training: the loop around an objective, its history and its checkpoints."""

from embens.objective import objective
from embens.training.callbacks import CSV, Log
from embens.training.each import EachMember
from embens.training.history import History
from embens.training.loop import fit, linear_decay
from embens.training.passes import clip_gradients_
from embens.training.selection import select
from embens.training.snapshots import snapshots
from embens.training.trainer import Divergence

__all__ = [
    "CSV",
    "Divergence",
    "EachMember",
    "History",
    "Log",
    "clip_gradients_",
    "fit",
    "linear_decay",
    "objective",
    "select",
    "snapshots",
]
