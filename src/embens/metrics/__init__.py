"""Metrics of an ensemble, as functions of ``(outputs, target)``.

``outputs`` are logits ``(member, batch, class)`` and ``target`` class indices ``(batch,)``.
All is computed on the device of the outputs, in float32 at least, and returned as a tensor.
"""

from embens.metrics.diversity import correctness_correlation, disagreement
from embens.metrics.predictive import (
    brier,
    ensemble_accuracy,
    member_accuracy,
    member_nll,
    nll,
)
from embens.metrics.uncertainty import (
    Reliability,
    expected_calibration_error,
    expected_entropy,
    least_confidence,
    mutual_information,
    ood_auroc,
    predictive_entropy,
    reliability,
)

__all__ = [
    "Reliability",
    "brier",
    "correctness_correlation",
    "disagreement",
    "ensemble_accuracy",
    "expected_calibration_error",
    "expected_entropy",
    "least_confidence",
    "member_accuracy",
    "member_nll",
    "mutual_information",
    "nll",
    "ood_auroc",
    "predictive_entropy",
    "reliability",
]
