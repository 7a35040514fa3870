"""Training: the objective with its gradient scale."""

from embens.training.objective import objective

__all__ = ["objective"]
