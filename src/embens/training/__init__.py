"""Training: the objective with its gradient scale, rates, and the loop around them."""

from embens.training.history import History
from embens.training.loop import fit
from embens.training.objective import objective
from embens.training.rates import linear_decay, shared_rate_factor
from embens.training.run import Divergence

__all__ = ["Divergence", "History", "fit", "linear_decay", "objective", "shared_rate_factor"]
