"""Dual activations: expectations of an activation under a normal law."""

from embens.theory.duals.expectations import Dual
from embens.theory.duals.registry import by_quadrature, dual, register

__all__ = ["Dual", "by_quadrature", "dual", "register"]
