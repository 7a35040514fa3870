"""Training in the limit: squared loss in closed form, cross-entropy by integration."""

from embens.theory.flow.classification import CrossEntropySettings, cross_entropy_flow
from embens.theory.flow.flow import FlowSettings, GradientFlow, gradient_descent, gradient_flow
from embens.theory.flow.performance import Performance, centred_targets, performance

__all__ = [
    "CrossEntropySettings",
    "FlowSettings",
    "GradientFlow",
    "Performance",
    "centred_targets",
    "cross_entropy_flow",
    "gradient_descent",
    "gradient_flow",
    "performance",
]
