r"""Sample weights: the loss of a member is a weighted mean over rows.

.. math:: L_a = \frac{\sum_i w_i \ell_{ai}}{\sum_i w_i}

The sums are over the rows of a batch, as for the class weights of torch's cross-entropy. A row of
weight 0 has no effect, and a row of weight 2 counts as two rows.
"""

import copy
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embens.losses import Criterion, gaussian_nll, ignored_label, squared_error


class WeightedTarget(NamedTuple):
    """A target and the weights of its rows, which a weighted criterion takes apart.

    Attributes:
        target: The target of the criterion.
        weight: Sample weights ``(row,)``.
    """

    target: Any
    weight: Tensor


def weighted(criterion: Criterion) -> Criterion:
    """Return a criterion of one member's outputs and a :class:`WeightedTarget`.

    Args:
        criterion: A loss of torch, or a function that returns one loss per row.

    Returns:
        The weighted criterion.

    Raises:
        ValueError: If the criterion has class weights, or returns one loss for all rows.

    Example:
        >>> outputs, target = torch.tensor([[1.0], [5.0]]), torch.zeros(2)
        >>> weight = torch.tensor([3.0, 1.0])
        >>> weighted(squared_error)(outputs, WeightedTarget(target, weight))
        tensor(7.)
    """
    by_row = _without_reduction(criterion)
    ignored = ignored_label(criterion)

    def mean(outputs: Any, packed: WeightedTarget) -> Tensor:
        target, weight = packed
        losses = by_row(outputs, target)
        rows = len(weight)
        if losses.dim() == 0 or len(losses) != rows:
            raise ValueError(
                f"sample weights need a criterion that returns {rows} losses, one for each row, "
                f"got shape {tuple(losses.shape)}. Use reduction='none'."
            )
        weight = weight.to(losses)
        counts = torch.ones_like(losses)
        if ignored is not None and not target.is_floating_point():
            counts = (target != ignored).to(losses)
        # Positions of a row share its weight; those with ignored labels do not count.
        has_label = counts
        if counts.dim() > 1:
            has_label = counts.flatten(1).any(1).to(losses)
        weight = weight * has_label
        losses = losses.reshape(rows, -1).sum(1) / counts.reshape(rows, -1).sum(1).clamp(min=1)
        total = weight.sum()
        return (weight * losses).sum() / torch.where(total > 0, total, 1.0)

    return mean


def _without_reduction(criterion: Any) -> Any:
    """Return a loss of torch or of embens with one value per row; other functions unchanged."""
    if criterion is squared_error:
        return _squared_errors
    if criterion is gaussian_nll:
        return criterion
    function = getattr(criterion, "func", criterion)
    options = getattr(criterion, "keywords", {})
    class_weight = getattr(criterion, "weight", options.get("weight"))
    if ignored_label(criterion) is not None and class_weight is not None:
        raise ValueError(
            "class weights and sample weights cannot be combined. Multiply the sample weights: "
            "(x, y, w * class_weight[y])."
        )
    if isinstance(criterion, nn.modules.loss._Loss):
        criterion = copy.copy(criterion)
        criterion.reduction = "none"
        return functools.partial(_call_aligned, criterion)
    if getattr(function, "__module__", "") == F.__name__:
        return functools.partial(_call_aligned, functools.partial(criterion, reduction="none"))
    return criterion


def _squared_errors(outputs: Tensor, target: Tensor) -> Tensor:
    return (outputs - target.reshape(outputs.shape)).square()


def _call_aligned(criterion: Any, outputs: Tensor, target: Tensor) -> Tensor:
    """Call a loss of torch with targets ``(n,)`` in the shape of outputs ``(n, 1)``."""
    if target.is_floating_point() and target.numel() == outputs.numel():
        target = target.reshape(outputs.shape)
    return criterion(outputs, target)
