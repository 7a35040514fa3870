"""Training: the loop around an objective, its history and its checkpoints."""

from embens.objective import objective
from embens.training.history import History
from embens.training.loop import fit
from embens.training.selection import select
from embens.training.settings import linear_decay
from embens.training.trainer import Divergence

__all__ = ["Divergence", "History", "fit", "linear_decay", "objective", "select"]
