r"""How well the ensemble knows what it does not know.

All of it is about the mean probability :math:`\bar p` of :mod:`embens.metrics.predictive`, and the
predicted class is its largest. Entropies are in nats, one value per sample.

Not here: scores of outputs that are not classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from embens.metrics.predictive import (
    Ignored,
    Outputs,
    Target,
    check,
    check_outputs,
    log_mean_probability,
    log_probabilities,
)

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


class Reliability(NamedTuple):
    """A reliability diagram: one value per bin of confidence, NaN where a bin is empty."""

    confidence: Float[Tensor, " bin"]
    accuracy: Float[Tensor, " bin"]
    samples: Float[Tensor, " bin"]


def reliability(outputs: Outputs, target: Target, *, bins: int = 15) -> Reliability:
    """Mean confidence and accuracy in bins of equal width of the predicted class's probability."""
    confidence, correct, membership = _binned(outputs, target, bins)
    samples = membership.sum(0)
    return Reliability(confidence @ membership / samples, correct @ membership / samples, samples)


def expected_calibration_error(
    outputs: Outputs, target: Target, *, bins: int = 15
) -> Float[Tensor, ""]:
    r"""Mean distance between confidence and accuracy over the bins of :func:`reliability`.

    .. math::
        \sum_b \frac{n_b}{n} \left| \mathrm{accuracy}_b - \mathrm{confidence}_b \right|

    Example:
        >>> outputs = torch.tensor([[[0.0, 0.0], [0.0, 0.0]]])
        >>> expected_calibration_error(outputs, torch.tensor([0, 1])).item()
        0.0
    """
    confidence, correct, membership = _binned(outputs, target, bins)
    return ((correct - confidence) @ membership).abs().sum() / len(correct)


def _binned(outputs: Tensor, target: Tensor, bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return each sample's confidence, correctness and membership ``(batch, bin)`` in a bin."""
    if not isinstance(bins, int) or bins < 1:
        raise ValueError(f"bins: expected a positive integer, got {bins!r}; 15 is usual")
    outputs, target = check(outputs, target)
    confidence, predicted = log_mean_probability(outputs).exp().max(-1)
    edges = torch.linspace(0, 1, bins + 1, dtype=outputs.dtype, device=outputs.device)
    index = torch.bucketize(confidence.detach(), edges[1:-1], right=True)
    return (
        confidence,
        (predicted == target).to(outputs.dtype),
        one_hot(index, bins).to(outputs.dtype),
    )


def predictive_entropy(outputs: Outputs, target: Ignored = None) -> Float[Tensor, " batch"]:
    r"""Entropy of the mean probability, :math:`H(\bar p)`: the total uncertainty of each sample."""
    log_mean = log_mean_probability(check_outputs(outputs))
    return -(log_mean.exp() * log_mean).sum(-1)


def expected_entropy(outputs: Outputs, target: Ignored = None) -> Float[Tensor, " batch"]:
    r"""Mean entropy of members, :math:`\frac1M \sum_a H(p_a)`: the aleatoric part."""
    log_members = log_probabilities(check_outputs(outputs))
    return -(log_members.exp() * log_members).sum(-1).mean(0)


def mutual_information(outputs: Outputs, target: Ignored = None) -> Float[Tensor, " batch"]:
    r"""Mutual information between the class and the member: the epistemic part, per sample.

    .. math::
        I = H(\bar p) - \frac1M \sum_a H(p_a) = \frac1M \sum_a \mathrm{KL}(p_a \,\|\, \bar p)

    Computed from the right-hand side; what rounding makes negative is set to 0.

    Example:
        >>> outputs = torch.tensor([[[1e4, 0.0]], [[0.0, 1e4]]])
        >>> mutual_information(outputs).exp().item()
        2.0
    """
    outputs = check_outputs(outputs)
    log_members, log_mean = log_probabilities(outputs), log_mean_probability(outputs)
    divergence = (log_members.exp() * (log_members - log_mean)).sum(-1)
    return divergence.mean(0).clamp(min=0)


def least_confidence(outputs: Outputs, target: Ignored = None) -> Float[Tensor, " batch"]:
    r"""Probability of not being the predicted class, :math:`1 - \max_c \bar p_c`, per sample.

    Summed over the other classes, so that confident samples keep their order.
    """
    probability = log_mean_probability(check_outputs(outputs)).exp()
    return probability.scatter(-1, probability.argmax(-1, keepdim=True), 0).sum(-1)


def ood_auroc(
    outputs: Outputs,
    target: Bool[Tensor, " batch"] | Int[Tensor, " batch"] | Float[Tensor, "member other class"],
    *,
    score: Callable[[Tensor], Tensor] = mutual_information,
) -> Float[Tensor, ""]:
    """Chance that a sample out of distribution scores higher than one within; ties count half.

    The area under the ROC curve, from the exact rank statistic.

    Args:
        outputs: Logits on samples within the distribution, or on samples of both kinds.
        target: Logits on samples out of the distribution; or, if ``outputs`` has both kinds,
            which samples are out of the distribution (true or 1).
        score: Uncertainty of each sample, larger out of the distribution: of this module
            :func:`mutual_information`, :func:`predictive_entropy`, :func:`least_confidence`.

    Example:
        >>> alike, apart = [[2.0, 0.0], [2.0, 0.0]], [[2.0, 0.0], [0.0, 2.0]]
        >>> outputs = torch.tensor([alike, apart]).transpose(0, 1)
        >>> ood_auroc(outputs, torch.tensor([0, 1])).item()
        1.0
    """
    outputs = check_outputs(outputs)
    if not isinstance(target, Tensor):
        raise TypeError(
            "target: expected logits out of distribution, or a mark for each sample, "
            f"got {type(target).__name__}; convert with torch.as_tensor"
        )
    if target.is_floating_point():
        other = check_outputs(target)
        if (len(other), other.shape[-1]) != (len(outputs), outputs.shape[-1]):
            raise ValueError(
                f"target: expected logits out of distribution like outputs, {tuple(outputs.shape)} "
                f"but for the batch, got {tuple(other.shape)}; use the same members and classes"
            )
        within, out = _scores(score, outputs), _scores(score, other)
    else:
        marks, scores = _check_marks(outputs, target), _scores(score, outputs)
        within, out = scores[~marks], scores[marks]
    within = within.sort().values
    pairs = sum(int(torch.searchsorted(within, out, right=ties).sum()) for ties in (False, True))
    return outputs.new_tensor(pairs / (2 * len(within) * len(out)))


def _scores(score: Callable[[Tensor], Tensor], outputs: Tensor) -> Tensor:
    scores = score(outputs)
    if not isinstance(scores, Tensor) or scores.shape != outputs.shape[1:2]:
        got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(
            f"score: expected a function that returns one value per sample, shape "
            f"{tuple(outputs.shape[1:2])}, got {got}; reduce over members and classes"
        )
    if scores.isnan().any():
        raise ValueError("score: expected numbers, got NaN; see what the score makes of outputs")
    return scores.detach()


def _check_marks(outputs: Tensor, target: Tensor) -> Tensor:
    expected = f"target: expected {outputs.shape[1]} marks, true or 1 where out of distribution"
    if target.shape != outputs.shape[1:2]:
        raise ValueError(
            f"{expected}, got shape {tuple(target.shape)}; "
            "pass one mark per sample, or the logits out of distribution"
        )
    values = set(target.unique().tolist())
    if values != {0, 1}:
        raise ValueError(
            f"{expected}, got the values {sorted(values)}; pass samples of both kinds, 0 and 1"
        )
    return target.to(device=outputs.device, dtype=torch.bool)
