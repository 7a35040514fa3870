r"""How well the ensemble and its members predict.

Two means over members are in use, and they differ. ``ensemble_accuracy`` takes the class with the
largest *mean output* :math:`\frac1M\sum_a f_a(x)`, as the paper does. What scores probabilities
(``nll``, ``brier`` and all of :mod:`embens.metrics.uncertainty`) takes the *mean probability*

.. math::
    \bar p(c \mid x) = \frac1M \sum_a \mathrm{softmax}(f_a(x))_c ,

the predictive distribution of the mixture of members. It is kept as a logarithm, so that a
probability that underflows to 0 costs a large number and never NaN.

The types and checks of the arguments, which all metrics share, are here too.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import one_hot

if TYPE_CHECKING:
    from jaxtyping import Float, Int

Outputs: TypeAlias = "Float[Tensor, 'member batch class']"
Target: TypeAlias = "Int[Tensor, ' batch']"
Ignored: TypeAlias = "Int[Tensor, ' batch'] | None"
"""A target that plays no part, and is accepted so that all metrics are called alike."""


def check_outputs(outputs: Tensor) -> Tensor:
    """Return logits ``(member, batch, class)`` in float32 at least, or say what is wrong."""
    expected = "outputs: expected finite logits (member, batch, class) of floating type"
    if not isinstance(outputs, Tensor):
        raise TypeError(f"{expected}, got {type(outputs).__name__}; convert with torch.as_tensor")
    if not outputs.is_floating_point():
        raise TypeError(f"{expected}, got {outputs.dtype}; pass the logits, not predicted classes")
    if outputs.ndim != 3:
        raise ValueError(
            f"{expected}, got shape {tuple(outputs.shape)}; "
            "for a single model add the member axis with outputs.unsqueeze(0)"
        )
    if 0 in outputs.shape:
        raise ValueError(
            f"{expected}, got the empty shape {tuple(outputs.shape)}; "
            "pass at least one member and one sample"
        )
    if outputs.shape[-1] < 2:
        raise ValueError(
            f"{expected}, got a single class in shape {tuple(outputs.shape)}; for one logit z "
            "per sample pass both classes: torch.cat([torch.zeros_like(z), z], -1)"
        )
    if not outputs.isfinite().all():
        count = outputs.numel() - int(outputs.isfinite().sum())
        raise ValueError(
            f"{expected}, got {count} values that are NaN or infinite; "
            "look for a diverged run, or clamp log-probabilities of 0"
        )
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))


def check(outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return checked outputs and class indices ``(batch,)`` as int64, or say what is wrong."""
    outputs = check_outputs(outputs)
    _, batch, classes = outputs.shape
    expected = f"target: expected {batch} class indices from 0 to {classes - 1}, shape ({batch},)"
    if not isinstance(target, Tensor):
        raise TypeError(f"{expected}, got {type(target).__name__}; convert with torch.as_tensor")
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise TypeError(f"{expected}, got {target.dtype}; convert with target.long()")
    if target.shape != (batch,):
        raise ValueError(
            f"{expected}, got shape {tuple(target.shape)}; "
            "squeeze a column, take the argmax of one-hot rows"
        )
    target = target.to(device=outputs.device, dtype=torch.int64)
    least, most = (int(bound) for bound in target.aminmax())
    if least < 0 or most >= classes:
        raise ValueError(
            f"{expected}, got indices from {least} to {most}; leave out samples without a label, "
            "or check that the network has an output for every class"
        )
    return outputs, target


def log_probabilities(outputs: Tensor) -> Tensor:
    """Return the members' log-probabilities, finite also where a probability underflows to 0."""
    return outputs.log_softmax(-1).clamp(min=torch.finfo(outputs.dtype).min)


def log_mean_probability(outputs: Tensor) -> Tensor:
    """Return the logarithm of the mean probability, ``(batch, class)``."""
    return log_probabilities(outputs).logsumexp(0) - math.log(len(outputs))


def ensemble_accuracy(outputs: Outputs, target: Target) -> Float[Tensor, ""]:
    """Fraction of samples whose class has the largest mean output.

    Example:
        >>> outputs = torch.tensor([[[3.0, 0.0]], [[0.0, 1.0]]])
        >>> ensemble_accuracy(outputs, torch.tensor([0])).item()
        1.0
    """
    outputs, target = check(outputs, target)
    return (outputs.mean(0).argmax(-1) == target).to(outputs.dtype).mean()


def member_accuracy(outputs: Outputs, target: Target) -> Float[Tensor, " member"]:
    """Accuracy of each member by itself."""
    outputs, target = check(outputs, target)
    return (outputs.argmax(-1) == target).to(outputs.dtype).mean(1)


def nll(outputs: Outputs, target: Target) -> Float[Tensor, ""]:
    r"""Negative log-likelihood of the mean probability, in nats; differentiable.

    .. math::
        -\frac1n \sum_i \log \bar p(y_i \mid x_i)

    Never above the mean of :func:`member_nll`, by Jensen's inequality.

    Example:
        >>> outputs = torch.tensor([[[1e4, 0.0]], [[0.0, 1e4]]])
        >>> round(nll(outputs, torch.tensor([0])).exp().item(), 5)
        2.0
    """
    outputs, target = check(outputs, target)
    return -log_mean_probability(outputs).gather(1, target[:, None]).mean()


def member_nll(outputs: Outputs, target: Target) -> Float[Tensor, " member"]:
    """Negative log-likelihood of each member by itself; its mean is the members' mean loss."""
    outputs, target = check(outputs, target)
    index = target[None, :, None].expand(len(outputs), -1, 1)
    return -log_probabilities(outputs).gather(2, index).mean((1, 2))


def brier(outputs: Outputs, target: Target) -> Float[Tensor, ""]:
    r"""Brier score of the mean probability, from 0 (best) to 2; differentiable.

    .. math::
        \frac1n \sum_i \sum_c \big(\bar p(c \mid x_i) - \delta_{c y_i}\big)^2

    With two classes this is twice the score that is often quoted for binary targets.
    """
    outputs, target = check(outputs, target)
    truth = one_hot(target, outputs.shape[-1])
    return (log_mean_probability(outputs).exp() - truth).square().sum(-1).mean()
