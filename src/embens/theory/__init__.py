"""The infinite-width limit: kernels of an ensemble, its training, its regime.

``docs/theory-derivations.md`` derives the formulas.
"""

from embens.theory.activations import register as register_activation
from embens.theory.archive import load_kernels, write_kernels
from embens.theory.blocks import kernels
from embens.theory.capacity import BestMembers, best_members
from embens.theory.classification import (
    CrossEntropySettings,
    Performance,
    centred_targets,
    cross_entropy_flow,
    performance,
)
from embens.theory.dynamics import (
    FlowSettings,
    GradientFlow,
    gradient_descent,
    gradient_flow,
    posterior,
)
from embens.theory.expectations import Dual
from embens.theory.fluctuation import effective_width, fluctuation
from embens.theory.interference import interference, interference_terms
from embens.theory.kernel import Kernels, MemberKernel, natural_gamma
from embens.theory.limit import Limit
from embens.theory.moments import State
from embens.theory.recursion import propagate
from embens.theory.regime import Regime, RegimeReport, regime

__all__ = [
    "BestMembers",
    "CrossEntropySettings",
    "Dual",
    "FlowSettings",
    "GradientFlow",
    "Kernels",
    "Limit",
    "MemberKernel",
    "Performance",
    "Regime",
    "RegimeReport",
    "State",
    "best_members",
    "centred_targets",
    "cross_entropy_flow",
    "effective_width",
    "fluctuation",
    "gradient_descent",
    "gradient_flow",
    "interference",
    "interference_terms",
    "kernels",
    "load_kernels",
    "natural_gamma",
    "performance",
    "posterior",
    "propagate",
    "regime",
    "register_activation",
    "write_kernels",
]
