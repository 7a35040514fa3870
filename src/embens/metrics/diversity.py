r"""How much members differ from one another, as means over pairs of members :math:`a \ne b`.

Both means are taken from sums over members, without a matrix of pairs. Where no pair is left
there is nothing to average: NaN, with a warning.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from embens.metrics.predictive import Ignored, Outputs, Target, check, check_outputs

if TYPE_CHECKING:
    from jaxtyping import Float


def correctness_correlation(outputs: Outputs, target: Target) -> Float[Tensor, ""]:
    r"""Pearson correlation between members being right, averaged over pairs.

    Member :math:`a` is right (1) or wrong (0) on each sample. With its standardised values
    :math:`z_a(x)`, the sum of all correlations is a mean square, and of :math:`M` members

    .. math::
        \frac{1}{M(M-1)} \sum_{a \ne b} \rho_{ab}
        = \frac{\big\langle \big(\sum_a z_a(x)\big)^2 \big\rangle_x - M}{M(M-1)} .

    Members that are right on all samples, or on none, have no correlation and leave the pairs.

    Example:
        >>> right, wrong = [1.0, 0.0], [0.0, 1.0]
        >>> outputs = torch.tensor([[right, right, wrong, wrong], [wrong, wrong, right, right]])
        >>> correctness_correlation(outputs, torch.zeros(4, dtype=torch.int64)).item()
        -1.0
    """
    outputs, target = check(outputs, target)
    correct = outputs.argmax(-1) == target
    correct = correct[correct.any(1) & ~correct.all(1)].to(outputs.dtype)
    if len(correct) < 2:
        return _without_pairs(
            outputs,
            "correctness_correlation",
            f"{len(correct)} of {len(outputs)} members are right on some samples and wrong on "
            "others; take more samples",
        )
    deviation, mean = torch.std_mean(correct, 1, correction=0, keepdim=True)
    total = ((correct - mean) / deviation).sum(0).square().mean()
    return (total - len(correct)) / (len(correct) * (len(correct) - 1))


def disagreement(outputs: Outputs, target: Ignored = None) -> Float[Tensor, ""]:
    """Fraction of samples on which two members predict different classes, averaged over pairs.

    Example:
        >>> disagreement(torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]], [[0.0, 1.0]]])).item()
        0.6666666...
    """
    outputs = check_outputs(outputs)
    members, batch, classes = outputs.shape
    if members < 2:
        return _without_pairs(
            outputs, "disagreement", "outputs have 1 member; an ensemble has several"
        )
    predicted = outputs.argmax(-1).T
    votes = torch.zeros(batch, classes, dtype=torch.int64, device=outputs.device)
    votes.scatter_add_(1, predicted, torch.ones_like(predicted))
    agreeing = (votes * (votes - 1)).sum(1) / (members * (members - 1))
    return 1 - agreeing.to(outputs.dtype).mean()


def _without_pairs(outputs: Tensor, name: str, reason: str) -> Tensor:
    message = f"{name} is NaN: expected at least two members to pair, but {reason}"
    warnings.warn(message, RuntimeWarning, stacklevel=3)
    return outputs.new_tensor(torch.nan)
