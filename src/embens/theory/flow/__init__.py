"""Training in the limit: squared loss in closed form, cross-entropy by integration."""

from embens.theory.flow.classification import (
    CrossEntropySettings,
    Performance,
    centred_targets,
    cross_entropy_flow,
    performance,
)
from embens.theory.flow.flow import FlowSettings, GradientFlow, gradient_descent, gradient_flow

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
