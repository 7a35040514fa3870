r"""Metrics of an ensemble, as functions of ``(outputs, target)``.

``outputs`` are logits ``(member, batch, class)`` and ``target`` class indices ``(batch,)``. All is
computed on the device of the outputs, in float32 at least, and returned as a tensor.

Two means over members are in use, and they differ. ``ensemble_accuracy`` takes the class with the
largest *mean output*, as the paper does. All else takes the *mean probability*, the predictive
distribution of the mixture of members,

.. math::
    \bar p(c \mid x) = \frac1M \sum_a \mathrm{softmax}(f_a(x))_c .

Entropies are in nats, one value per sample. Not here: scores of outputs that are not classes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import one_hot

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

Outputs: TypeAlias = "Float[Tensor, 'member batch class']"
Target: TypeAlias = "Int[Tensor, ' batch']"
Ignored: TypeAlias = "Int[Tensor, ' batch'] | None"  # accepted, so that all are called alike


def ensemble_accuracy(outputs: Outputs, target: Target) -> Float[Tensor, ""]:
    """Fraction of samples whose class has the largest mean output."""
    outputs, target = _check(outputs, target)
    return (outputs.mean(0).argmax(-1) == target).to(outputs.dtype).mean()


def member_accuracy(outputs: Outputs, target: Target) -> Float[Tensor, " member"]:
    """Accuracy of each member by itself."""
    outputs, target = _check(outputs, target)
    return (outputs.argmax(-1) == target).to(outputs.dtype).mean(1)


def nll(outputs: Outputs, target: Target) -> Float[Tensor, ""]:
    r"""Negative log-likelihood :math:`-\log \bar p(y \mid x)`, mean in nats; differentiable."""
    outputs, target = _check(outputs, target)
    return -_log_mean_probability(outputs).gather(1, target[:, None]).mean()


def member_nll(outputs: Outputs, target: Target) -> Float[Tensor, " member"]:
    """Negative log-likelihood of each member by itself; its mean is the members' mean loss."""
    outputs, target = _check(outputs, target)
    index = target[None, :, None].expand(len(outputs), -1, 1)
    return -_log_probabilities(outputs).gather(2, index).mean((1, 2))


def brier(outputs: Outputs, target: Target) -> Float[Tensor, ""]:
    r"""Brier score of the mean probability, from 0 (best) to 2; differentiable.

    .. math::
        \frac1n \sum_i \sum_c \big(\bar p(c \mid x_i) - \delta_{c y_i}\big)^2

    With two classes this is twice the score that is often quoted for binary targets.
    """
    outputs, target = _check(outputs, target)
    truth = one_hot(target, outputs.shape[-1])
    return (_log_mean_probability(outputs).exp() - truth).square().sum(-1).mean()


def correctness_correlation(outputs: Outputs, target: Target) -> Float[Tensor, ""]:
    """Pearson correlation between members being right (1) or wrong (0), averaged over pairs.

    Members that are right on all samples, or on none, have no correlation and leave the pairs;
    where no pair is left, it is NaN, with a warning.

    Example:
        >>> right, wrong = [1.0, 0.0], [0.0, 1.0]
        >>> outputs = torch.tensor([[right, right, wrong, wrong], [wrong, wrong, right, right]])
        >>> correctness_correlation(outputs, torch.zeros(4, dtype=torch.int64)).item()
        -1.0
    """
    outputs, target = _check(outputs, target)
    correct = outputs.argmax(-1) == target
    correct = correct[correct.any(1) & ~correct.all(1)].to(outputs.dtype)
    if (members := len(correct)) < 2:
        reason = f"{members} of {len(outputs)} members are right on some samples, wrong on others"
        return _without_pairs(outputs, "correctness_correlation", f"{reason}; take more samples")
    return (torch.corrcoef(correct).sum() - members) / (members * (members - 1))


def disagreement(outputs: Outputs, target: Ignored = None) -> Float[Tensor, ""]:
    """Fraction of samples on which two members predict different classes, averaged over pairs."""
    outputs = _check_outputs(outputs)
    members, _, classes = outputs.shape
    if members < 2:
        return _without_pairs(outputs, "disagreement", "outputs have 1 member, not several")
    votes = one_hot(outputs.argmax(-1), classes).sum(0)
    agreeing = (votes * (votes - 1)).sum(1) / (members * (members - 1))
    return 1 - agreeing.to(outputs.dtype).mean()


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
    """
    confidence, correct, membership = _binned(outputs, target, bins)
    return ((correct - confidence) @ membership).abs().sum() / len(correct)


def _binned(outputs: Tensor, target: Tensor, bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the confidence and correctness of each sample, and its bin as ``(batch, bin)``."""
    if not isinstance(bins, int) or bins < 1:
        raise ValueError(f"bins: expected a positive integer, got {bins!r}; 15 is usual")
    outputs, target = _check(outputs, target)
    confidence, predicted = _log_mean_probability(outputs).exp().max(-1)
    edges = torch.linspace(0, 1, bins + 1, dtype=outputs.dtype, device=outputs.device)
    index = torch.bucketize(confidence.detach(), edges[1:-1], right=True)
    correct = (predicted == target).to(outputs.dtype)
    return confidence, correct, one_hot(index, bins).to(outputs.dtype)


def predictive_entropy(outputs: Outputs, target: Ignored = None) -> Float[Tensor, " batch"]:
    r"""Entropy of the mean probability, :math:`H(\bar p)`: the total uncertainty of each sample."""
    log_mean = _log_mean_probability(_check_outputs(outputs))
    return -(log_mean.exp() * log_mean).sum(-1)


def mutual_information(outputs: Outputs, target: Ignored = None) -> Float[Tensor, " batch"]:
    r"""Mutual information between the class and the member: the epistemic part, per sample.

    .. math::
        I = H(\bar p) - \frac1M \sum_a H(p_a) = \frac1M \sum_a \mathrm{KL}(p_a \,\|\, \bar p)

    Computed from the right-hand side; what rounding makes negative is set to 0.
    """
    outputs = _check_outputs(outputs)
    log_members, log_mean = _log_probabilities(outputs), _log_mean_probability(outputs)
    divergence = (log_members.exp() * (log_members - log_mean)).sum(-1)
    return divergence.mean(0).clamp(min=0)


def least_confidence(outputs: Outputs, target: Ignored = None) -> Float[Tensor, " batch"]:
    r"""Probability of not being the predicted class, :math:`1 - \max_c \bar p_c`, per sample.

    Summed over the other classes, so that confident samples keep their order.
    """
    probability = _log_mean_probability(_check_outputs(outputs)).exp()
    return probability.scatter(-1, probability.argmax(-1, keepdim=True), 0).sum(-1)


def ood_auroc(
    outputs: Outputs,
    target: Bool[Tensor, " batch"] | Int[Tensor, " batch"] | Float[Tensor, "member other class"],
    *,
    score: Callable[[Tensor], Tensor] = mutual_information,
) -> Float[Tensor, ""]:
    """Chance that a sample out of distribution scores higher than one within; ties count half.

    The area under the ROC curve, from the exact rank statistic. The target are logits on samples
    out of the distribution; or, if ``outputs`` has samples of both kinds, which of them are (true
    or 1). The ``score`` is an uncertainty of each sample: :func:`mutual_information`,
    :func:`predictive_entropy`, :func:`least_confidence`.
    """
    outputs = _check_outputs(outputs)
    if not isinstance(target, Tensor):
        raise TypeError(f"target: expected a tensor, got {type(target).__name__}")
    if target.is_floating_point():
        other, (members, batch, classes) = _check_outputs(target), outputs.shape
        if (len(other), other.shape[-1]) != (members, classes):
            raise ValueError(
                f"target: expected logits like outputs, {tuple(outputs.shape)} but for the batch, "
                f"got {tuple(other.shape)}; use the same members and classes"
            )
        outputs = torch.cat([outputs, other.to(outputs.device)], 1)
        target = torch.arange(outputs.shape[1]) >= batch
    if target.shape != outputs.shape[1:2] or target.unique().tolist() != [0, 1]:
        got = f"shape {tuple(target.shape)} and the values {target.unique().tolist()[:5]}"
        expected = f"{outputs.shape[1]} marks, 1 where out of distribution, of both kinds"
        raise ValueError(f"target: expected {expected}, got {got}")
    scores, marks = score(outputs), target.bool().to(outputs.device)
    if scores.shape != marks.shape or scores.isnan().any():
        got = f"shape {tuple(scores.shape)}" if scores.shape != marks.shape else "NaN"
        raise ValueError(f"score: expected one number per sample, {tuple(marks.shape)}, got {got}")
    within, out = scores[~marks].detach().sort().values, scores[marks].detach()
    pairs = sum(int(torch.searchsorted(within, out, right=ties).sum()) for ties in (False, True))
    return outputs.new_tensor(pairs / (2 * len(within) * len(out)))


def _check_outputs(outputs: Tensor) -> Tensor:
    """Return logits in float32 at least, or say what is wrong."""
    expected = "outputs: expected finite logits (member, batch, class) of floating type"
    if not isinstance(outputs, Tensor):
        raise TypeError(f"{expected}, got {type(outputs).__name__}; convert with torch.as_tensor")
    if not outputs.is_floating_point():
        raise TypeError(f"{expected}, got {outputs.dtype}; pass the logits, not predicted classes")
    shape = tuple(outputs.shape)
    if len(shape) != 3:
        got = f"shape {shape}; for a single model add the member axis: outputs.unsqueeze(0)"
    elif 0 in shape:
        got = f"the empty shape {shape}; pass at least one member and one sample"
    elif shape[-1] < 2:
        both = "torch.cat([torch.zeros_like(z), z], -1)"
        got = f"a single class in shape {shape}; for one logit z pass both classes: {both}"
    elif not (finite := outputs.isfinite()).all():
        got = f"{int((~finite).sum())} values that are NaN or infinite; look for a diverged run"
    else:
        return outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    raise ValueError(f"{expected}, got {got}")


def _check(outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return checked outputs and class indices as int64, or say what is wrong."""
    outputs = _check_outputs(outputs)
    _, batch, classes = outputs.shape
    expected = f"target: expected {batch} class indices from 0 to {classes - 1}, shape ({batch},)"
    if not isinstance(target, Tensor):
        raise TypeError(f"{expected}, got {type(target).__name__}; convert with torch.as_tensor")
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise TypeError(f"{expected}, got {target.dtype}; convert with target.long()")
    target = target.to(device=outputs.device, dtype=torch.int64)
    if target.shape != (batch,):
        got = f"shape {tuple(target.shape)}; squeeze a column, take the argmax of one-hot rows"
    elif target.min() < 0 or target.max() >= classes:
        got = f"indices from {int(target.min())} to {int(target.max())}"
    else:
        return outputs, target
    raise ValueError(f"{expected}, got {got}")


def _log_probabilities(outputs: Tensor) -> Tensor:
    """Return the members' log-probabilities, finite also where a probability underflows to 0."""
    return outputs.log_softmax(-1).clamp(min=torch.finfo(outputs.dtype).min)


def _log_mean_probability(outputs: Tensor) -> Tensor:
    return _log_probabilities(outputs).logsumexp(0) - math.log(len(outputs))


def _without_pairs(outputs: Tensor, name: str, reason: str) -> Tensor:
    message = f"{name} is NaN: expected at least two members to pair, but {reason}"
    warnings.warn(message, RuntimeWarning, stacklevel=3)
    return outputs.new_tensor(torch.nan)
