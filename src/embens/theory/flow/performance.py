r"""How good an infinitely wide ensemble will be: accuracy, likelihood and calibration.

Classes are learnt by regression on centred one-hot targets, so that all is Gaussian
(:mod:`embens.theory.flow`); the outputs of drawn ensembles are scored as logits by
:mod:`embens.metrics`. Accuracy does not depend on the ``scale`` of targets where they outweigh the
prior; likelihood and calibration do, since logits that are ``scale`` apart are that sure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from embens import metrics
from embens.theory.flow.flow import GradientFlow

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass(frozen=True)
class Performance:
    """Expected quality of an ensemble over initialisations.

    Attributes:
        accuracy: of the ensemble, from the mean output.
        member_accuracy: of a member alone.
        nll: negative log-likelihood of the mean probability.
        brier: its Brier score.
        calibration_error: its expected calibration error.
        error: standard errors of all these, by name; from the draws alone, on the given test data.
    """

    accuracy: float
    member_accuracy: float
    nll: float
    brier: float
    calibration_error: float
    error: dict[str, float]


def centred_targets(
    labels: Int[Tensor, " n"], classes: int, *, scale: float = 1.0
) -> Float[Tensor, "n class"]:
    """Return one-hot targets whose mean over classes is 0.

    Example:
        >>> centred_targets(torch.tensor([1]), classes=4, scale=4.0).tolist()
        [[-1.0, 3.0, -1.0, -1.0]]
    """
    return scale * (one_hot(labels.long(), classes).double() - 1 / classes)


def performance(
    flow: GradientFlow,
    labels: Int[Tensor, " test"],
    *,
    t: float = math.inf,
    draws: int = 32,
    generator: torch.Generator | None = None,
) -> Performance:
    """Return what an infinitely wide ensemble is expected to achieve on its test data.

    Args:
        flow: of targets with one output for each class, such as :func:`centred_targets`.
        labels: class of each test sample.
        t: when training stops.
        draws: of how many ensembles, on all test samples together; the mean over them is returned.
        generator: draws them.
    """
    if flow.targets.dim() != 2:
        raise ValueError(
            "performance needs targets with one output for each class, (n, class); got "
            f"{tuple(flow.targets.shape)}. Train on centred_targets(labels, classes)."
        )
    if draws < 1:
        raise ValueError(f"draws must be at least 1; got {draws}.")
    measures = {
        "accuracy": metrics.ensemble_accuracy,
        "member_accuracy": lambda f, y: metrics.member_accuracy(f, y).mean(),
        "nll": metrics.nll,
        "brier": metrics.brier,
        "calibration_error": metrics.expected_calibration_error,
    }
    drawn = flow.sample(t, draws, generator=generator)
    found = {
        name: torch.stack([measure(outputs, labels) for outputs in drawn])
        for name, measure in measures.items()
    }
    error = {
        n: v.std().item() / math.sqrt(draws) if draws > 1 else math.nan for n, v in found.items()
    }
    return Performance(**{n: v.mean().item() for n, v in found.items()}, error=error)
