"""The infinite-width limit: kernels of an ensemble, its training, its regime.

``docs/theory.md`` derives what is computed here.
"""

from embens.theory.blocks import kernels
from embens.theory.classification import cross_entropy_flow
from embens.theory.duals import register as register_activation
from embens.theory.expectations import Dual
from embens.theory.files import load_kernels, write_kernels
from embens.theory.flow import Flow, gradient_descent, gradient_flow
from embens.theory.gamma import natural_gamma
from embens.theory.kernel import Kernels, MemberKernel
from embens.theory.limit import Limit
from embens.theory.performance import Performance, centred_targets, performance
from embens.theory.regime import Regime, RegimeReport, regime
from embens.theory.rules import propagate
from embens.theory.state import State

__all__ = [
    "Dual",
    "Flow",
    "Kernels",
    "Limit",
    "MemberKernel",
    "Performance",
    "Regime",
    "RegimeReport",
    "State",
    "centred_targets",
    "cross_entropy_flow",
    "gradient_descent",
    "gradient_flow",
    "kernels",
    "load_kernels",
    "natural_gamma",
    "performance",
    "propagate",
    "regime",
    "register_activation",
    "write_kernels",
]
