r"""Metrics of ensembles of classifiers, as functions of ``(outputs, target)``.

``outputs`` are logits ``(member, batch, class)`` and ``target`` class indices ``(batch,)``.
Metrics are computed on the device of the outputs, in float32 or higher precision, and returned as
tensors.

Two averages over members are in use. ``ensemble_accuracy`` predicts the class with the largest
*mean output*, as in the paper. All other metrics of the ensemble use the *mean probability*, the
predictive distribution of the mixture of members:

.. math::
    \bar p(c \mid x) = \frac1M \sum_a \mathrm{softmax}(f_a(x))_c .

Entropies and log-likelihoods are in nats. For regression see :func:`embens.evaluate`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from embens.logits import check_labelled, check_outputs, log_mean_probability, log_probabilities

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

Outputs: TypeAlias = "Float[Tensor, 'member batch class']"
Target: TypeAlias = "Int[Tensor, ' batch']"
Ignored: TypeAlias = "Int[Tensor, ' batch'] | None"  # so that all metrics have the same signature


# --- Accuracy and proper scores ------------------------------------------------------------------


def ensemble_accuracy(outputs: Outputs, target: Target) -> Float[Tensor, ""]:
    """Accuracy of the class with the largest mean output.

    Args:
        outputs: Logits ``(member, batch, class)``.
        target: Class indices ``(batch,)``.

    Returns:
        The fraction of correct predictions.

    Example:
        >>> outputs = torch.tensor([[[4.0, 0.0]], [[0.0, 1.0]]])
        >>> ensemble_accuracy(outputs, torch.tensor([0])).item()
        1.0
    """
    outputs, target = check_labelled(outputs, target)
    correct = outputs.mean(0).argmax(-1) == target
    return correct.to(outputs.dtype).mean()


def member_accuracy(outputs: Outputs, target: Target) -> Float[Tensor, " member"]:
    """Accuracy of each member.

    Args:
        outputs: Logits ``(member, batch, class)``.
        target: Class indices ``(batch,)``.

    Returns:
        The fraction of correct predictions of each member, ``(member,)``.

    Example:
        >>> outputs = torch.tensor([[[4.0, 0.0]], [[0.0, 1.0]]])
        >>> member_accuracy(outputs, torch.tensor([0]))
        tensor([1., 0.])
    """
    outputs, target = check_labelled(outputs, target)
    correct = outputs.argmax(-1) == target
    return correct.to(outputs.dtype).mean(1)


def nll(outputs: Outputs, target: Target) -> Float[Tensor, ""]:
    r"""Negative log-likelihood of the mean probability, :math:`-\log \bar p(y \mid x)`.

    Args:
        outputs: Logits ``(member, batch, class)``.
        target: Class indices ``(batch,)``.

    Returns:
        The mean over the batch, in nats; differentiable.

    Example:
        >>> nll(torch.zeros(3, 1, 2), torch.tensor([0]))  # log 2
        tensor(0.6931)
    """
    outputs, target = check_labelled(outputs, target)
    log_likelihood = log_mean_probability(outputs).gather(1, target[:, None])
    return -log_likelihood.mean()


def member_nll(outputs: Outputs, target: Target) -> Float[Tensor, " member"]:
    """Negative log-likelihood of each member.

    Args:
        outputs: Logits ``(member, batch, class)``.
        target: Class indices ``(batch,)``.

    Returns:
        The mean over the batch, in nats, ``(member,)``; differentiable.

    Example:
        >>> member_nll(torch.zeros(3, 1, 2), torch.tensor([0]))
        tensor([0.6931, 0.6931, 0.6931])
    """
    outputs, target = check_labelled(outputs, target)
    index = target[None, :, None].expand(len(outputs), -1, 1)
    return -log_probabilities(outputs).gather(2, index).mean((1, 2))


def brier(outputs: Outputs, target: Target) -> Float[Tensor, ""]:
    r"""Brier score of the mean probability, from 0 (best) to 2.

    .. math::
        \frac1n \sum_i \sum_c \big(\bar p(c \mid x_i) - \delta_{c y_i}\big)^2

    With two classes it is twice the score that is common for binary targets.

    Args:
        outputs: Logits ``(member, batch, class)``.
        target: Class indices ``(batch,)``.

    Returns:
        The mean over the batch; differentiable.

    Example:
        >>> brier(torch.zeros(3, 1, 2), torch.tensor([0]))
        tensor(0.5000)
    """
    outputs, target = check_labelled(outputs, target)
    probabilities = log_mean_probability(outputs).exp()
    errors = probabilities - one_hot(target, outputs.shape[-1])
    return errors.square().sum(-1).mean()


# --- Diversity -----------------------------------------------------------------------------------


def correctness_correlation(outputs: Outputs, target: Target) -> Float[Tensor, ""]:
    """Pearson correlation of the members' correctness (1 or 0), averaged over pairs of members.

    Members that are correct on all samples, or on none, have no correlation and are left out. If no
    pair remains, the result is NaN with a warning.

    Args:
        outputs: Logits ``(member, batch, class)``.
        target: Class indices ``(batch,)``.

    Returns:
        The correlation, from -1 to 1.

    Example:
        >>> right, wrong = [1.0, 0.0], [0.0, 1.0]
        >>> outputs = torch.tensor([[right, right, wrong, wrong], [wrong, wrong, right, right]])
        >>> correctness_correlation(outputs, torch.zeros(4, dtype=torch.int64)).item()
        -1.0
    """
    outputs, target = check_labelled(outputs, target)
    correct = outputs.argmax(-1) == target
    varies = correct.any(1) & ~correct.all(1)
    correct = correct[varies].to(outputs.dtype)
    members = len(correct)
    if members < 2:
        message = (
            "correctness_correlation is NaN: it needs two members that are correct on some samples "
            f"and wrong on others, got {members} of {len(outputs)} members. Use more samples."
        )
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return outputs.new_tensor(torch.nan)
    # The diagonal of the correlation matrix consists of ones.
    pair_sum = torch.corrcoef(correct).sum() - members
    return pair_sum / (members * (members - 1))


def disagreement(outputs: Outputs, target: Ignored = None) -> Float[Tensor, ""]:
    """Fraction of samples with different predictions, averaged over pairs of members.

    With a single member the result is NaN with a warning.

    Args:
        outputs: Logits ``(member, batch, class)``.
        target: Not used.

    Returns:
        The fraction, from 0 to 1.

    Example:
        >>> disagreement(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])).item()
        1.0
    """
    outputs = check_outputs(outputs)
    members, _, classes = outputs.shape
    if members < 2:
        message = "disagreement is NaN: it needs at least two members, got 1."
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return outputs.new_tensor(torch.nan)
    votes = one_hot(outputs.argmax(-1), classes).sum(0)
    agreement = (votes * (votes - 1)).sum(1) / (members * (members - 1))
    return 1 - agreement.to(outputs.dtype).mean()


# --- Calibration ---------------------------------------------------------------------------------


class Reliability(NamedTuple):
    """Reliability diagram with one value per confidence bin; NaN for empty bins.

    Attributes:
        confidence: Mean confidence ``(bin,)``.
        accuracy: Fraction of correct predictions ``(bin,)``.
        samples: Number of samples ``(bin,)``.

    Example:
        >>> diagram = reliability(torch.zeros(3, 4, 2), torch.tensor([0, 0, 0, 1]), bins=2)
        >>> diagram.samples
        tensor([0., 4.])
    """

    confidence: Float[Tensor, " bin"]
    accuracy: Float[Tensor, " bin"]
    samples: Float[Tensor, " bin"]


def reliability(outputs: Outputs, target: Target, *, bins: int = 15) -> Reliability:
    """Mean confidence and accuracy in bins of equal width.

    The confidence is the mean probability of the predicted class.

    Args:
        outputs: Logits ``(member, batch, class)``.
        target: Class indices ``(batch,)``.
        bins: Number of bins.

    Returns:
        Confidence, accuracy and number of samples per bin.

    Example:
        >>> diagram = reliability(torch.zeros(3, 4, 2), torch.tensor([0, 0, 0, 1]), bins=2)
        >>> diagram.confidence[1].item(), diagram.accuracy[1].item(), diagram.samples.tolist()
        (0.5, 0.75, [0.0, 4.0])
    """
    confidence, correct, membership = _assign_bins(outputs, target, bins)
    samples = membership.sum(0)
    mean_confidence = confidence @ membership / samples
    accuracy = correct @ membership / samples
    return Reliability(mean_confidence, accuracy, samples)


def expected_calibration_error(
    outputs: Outputs,
    target: Target,
    *,
    bins: int = 15,
) -> Float[Tensor, ""]:
    r"""Expected calibration error, the weighted gap between confidence and accuracy.

    .. math::
        \sum_b \frac{n_b}{n} \left| \mathrm{accuracy}_b - \mathrm{confidence}_b \right|

    Args:
        outputs: Logits ``(member, batch, class)``.
        target: Class indices ``(batch,)``.
        bins: Number of bins, as in :func:`reliability`.

    Returns:
        The error, from 0 to 1.

    Example:
        >>> expected_calibration_error(torch.zeros(3, 4, 2), torch.tensor([0, 0, 0, 1])).item()
        0.25
    """
    confidence, correct, membership = _assign_bins(outputs, target, bins)
    return ((correct - confidence) @ membership).abs().sum() / len(correct)


def _assign_bins(outputs: Tensor, target: Tensor, bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return confidence and correctness ``(batch,)``, and bins as one-hot rows ``(batch, bin)``."""
    if not isinstance(bins, int) or bins < 1:
        raise ValueError(f"bins must be a positive integer, got {bins!r}.")
    outputs, target = check_labelled(outputs, target)
    confidence, predicted = log_mean_probability(outputs).exp().max(-1)
    edges = torch.linspace(0, 1, bins + 1, dtype=outputs.dtype, device=outputs.device)
    # Without the outer edges a confidence of exactly 1 belongs to the last bin.
    index = torch.bucketize(confidence.detach(), edges[1:-1], right=True)
    correct = (predicted == target).to(outputs.dtype)
    return confidence, correct, one_hot(index, bins).to(outputs.dtype)


# --- Uncertainty ---------------------------------------------------------------------------------


def predictive_entropy(outputs: Outputs, target: Ignored = None) -> Float[Tensor, " batch"]:
    r"""Entropy of the mean probability, :math:`H(\bar p)`: the total uncertainty.

    Args:
        outputs: Logits ``(member, batch, class)``.
        target: Not used.

    Returns:
        One value per sample ``(batch,)``, in nats.

    Example:
        >>> predictive_entropy(torch.zeros(3, 1, 2))  # log 2
        tensor([0.6931])
    """
    log_mean = log_mean_probability(check_outputs(outputs))
    return -(log_mean.exp() * log_mean).sum(-1)


def mutual_information(outputs: Outputs, target: Ignored = None) -> Float[Tensor, " batch"]:
    r"""Mutual information between class and member: the epistemic part of the uncertainty.

    .. math::
        I = H(\bar p) - \frac1M \sum_a H(p_a) = \frac1M \sum_a \mathrm{KL}(p_a \,\|\, \bar p)

    Args:
        outputs: Logits ``(member, batch, class)``.
        target: Not used.

    Returns:
        One value per sample ``(batch,)``, in nats, at least 0.

    Example:
        >>> mutual_information(torch.tensor([[[99.0, 0.0]], [[0.0, 99.0]]]))  # log 2
        tensor([0.6931])
    """
    outputs = check_outputs(outputs)
    # The mean divergence is more accurate than the difference of entropies for similar members.
    log_members = log_probabilities(outputs)
    log_mean = log_mean_probability(outputs)
    divergence = (log_members.exp() * (log_members - log_mean)).sum(-1)
    return divergence.mean(0).clamp(min=0)


def least_confidence(outputs: Outputs, target: Ignored = None) -> Float[Tensor, " batch"]:
    r"""Probability that the predicted class is wrong, :math:`1 - \max_c \bar p_c`.

    Args:
        outputs: Logits ``(member, batch, class)``.
        target: Not used.

    Returns:
        One value per sample ``(batch,)``.

    Example:
        >>> least_confidence(torch.zeros(3, 1, 4)).item()
        0.75
    """
    probabilities = log_mean_probability(check_outputs(outputs)).exp()
    # We add up the other classes. Near 1 the difference 1 − p would round to 0 and lose the order.
    predicted = probabilities.argmax(-1, keepdim=True)
    return probabilities.scatter(-1, predicted, 0).sum(-1)


def ood_auroc(
    outputs: Outputs,
    target: Bool[Tensor, " batch"] | Int[Tensor, " batch"] | Float[Tensor, "member other class"],
    *,
    score: Callable[[Tensor], Tensor] = mutual_information,
) -> Float[Tensor, ""]:
    """Area under the ROC curve for detecting out-of-distribution samples.

    It is the probability that a sample out of distribution has a higher score than one in
    distribution, computed exactly; ties count one half.

    Args:
        outputs: Logits ``(member, batch, class)``.
        target: Logits ``(member, other, class)`` of samples out of distribution. If ``outputs``
            contain samples of both kinds: flags ``(batch,)``, true or 1 for out of distribution.
        score: Uncertainty per sample, such as :func:`mutual_information`,
            :func:`predictive_entropy` or :func:`least_confidence`.

    Returns:
        The area, from 0 to 1.

    Example:
        >>> sure, unsure = torch.tensor([[[9.0, 0.0]]]), torch.tensor([[[1.0, 0.0]]])
        >>> ood_auroc(sure, unsure, score=predictive_entropy).item()
        1.0
    """
    outputs, is_ood = _join_ood_samples(check_outputs(outputs), target)
    scores = score(outputs).detach()
    if scores.shape != is_ood.shape:
        raise ValueError(
            f"score must return one number per sample, shape {tuple(is_ood.shape)}, got shape "
            f"{tuple(scores.shape)}."
        )
    if scores.isnan().any():
        raise ValueError("score must return one number per sample, got NaN.")
    inside = scores[~is_ood].sort().values
    outside = scores[is_ood]
    # The first count excludes ties and the second includes them, so that a tie counts one half.
    below = int(torch.searchsorted(inside, outside, right=False).sum())
    below_or_equal = int(torch.searchsorted(inside, outside, right=True).sum())
    pairs = len(inside) * len(outside)
    return outputs.new_tensor((below + below_or_equal) / (2 * pairs))


def _join_ood_samples(outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits of all samples and a mask ``(batch,)`` of those out of distribution."""
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a tensor, got {type(target).__name__}.")
    members, batch, classes = outputs.shape
    if target.is_floating_point():
        ood_outputs = check_outputs(target)
        if ood_outputs.shape[0] != members or ood_outputs.shape[2] != classes:
            raise ValueError(
                f"target must be logits ({members}, other, {classes}) like outputs, got shape "
                f"{tuple(ood_outputs.shape)}."
            )
        outputs = torch.cat([outputs, ood_outputs.to(outputs.device)], 1)
        target = torch.arange(outputs.shape[1]) >= batch
    values = target.unique().tolist()
    if target.shape != (outputs.shape[1],) or values != [0, 1]:
        raise ValueError(
            f"target must be {outputs.shape[1]} flags, 1 for samples out of distribution, with "
            f"both values, got shape {tuple(target.shape)} with the values {values[:5]}."
        )
    return outputs, target.bool().to(outputs.device)
