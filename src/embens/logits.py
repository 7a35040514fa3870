"""Logits of a classifier ``(member, batch, class)``: probabilities, and checks with a fix."""

import math

import torch
from torch import Tensor

FLATTEN_POSITIONS = (
    "Make the positions of images or tokens rows: outputs.movedim(2, -1).flatten(1, -2) if classes "
    "are axis 2, as in images, otherwise outputs.flatten(1, -2); target.flatten()."
)
"""How to get rows from outputs with more axes."""


def log_probabilities(outputs: Tensor) -> Tensor:
    """Return the members' log-probabilities, finite where a probability underflows to 0.

    Args:
        outputs: Logits ``(member, batch, class)``.

    Returns:
        Logarithms ``(member, batch, class)``.

    Example:
        >>> log_probabilities(torch.zeros(3, 1, 2)).shape
        torch.Size([3, 1, 2])
    """
    return outputs.log_softmax(-1).clamp(min=torch.finfo(outputs.dtype).min)


def log_mean_probability(outputs: Tensor) -> Tensor:
    r"""Return the logarithm of the mean probability, :math:`\log \bar p`.

    Args:
        outputs: Logits ``(member, batch, class)``.

    Returns:
        Logarithms ``(batch, class)``.

    Example:
        >>> log_mean_probability(torch.zeros(3, 1, 2)).exp()
        tensor([[0.5000, 0.5000]])
    """
    return log_probabilities(outputs).logsumexp(0) - math.log(len(outputs))


def check_outputs(outputs: Tensor) -> Tensor:
    """Check logits and convert them to float32 or higher precision.

    Args:
        outputs: Finite logits ``(member, batch, class)``.

    Returns:
        The logits.

    Raises:
        TypeError: If they are no floating tensor.
        ValueError: If the shape is wrong, or a value is not finite.

    Example:
        >>> check_outputs(torch.zeros(3, 1, 2, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    expected = "outputs must be finite floating logits (member, batch, class)"
    if not isinstance(outputs, Tensor):
        kind = type(outputs).__name__
        fix = "Pass prediction.members" if kind == "Prediction" else "Convert with torch.as_tensor"
        raise TypeError(f"{expected}, got {kind}. {fix}.")
    if not outputs.is_floating_point():
        raise TypeError(f"{expected}, got {outputs.dtype}. Pass logits, not predicted classes.")
    shape = tuple(outputs.shape)
    if len(shape) > 3:
        raise ValueError(f"{expected}, got shape {shape}. {FLATTEN_POSITIONS}")
    if len(shape) < 3:
        raise ValueError(
            f"{expected}, got shape {shape}. For a single model add the member axis: "
            "outputs.unsqueeze(0)."
        )
    if 0 in shape:
        raise ValueError(
            f"{expected}, got the empty shape {shape}. Pass at least one member and one sample."
        )
    if shape[-1] < 2:
        raise ValueError(
            f"{expected}, got a single class in shape {shape}. For one logit z per sample pass "
            "torch.cat([torch.zeros_like(z), z], -1)."
        )
    finite = outputs.isfinite()
    if not finite.all():
        count = int((~finite).sum())
        raise ValueError(
            f"{expected}, got {count} values that are NaN or infinite. Did the training diverge?"
        )
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))


def check_labelled(outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Check logits and class indices; convert the indices to int64.

    Args:
        outputs: Finite logits ``(member, batch, class)``.
        target: Class indices ``(batch,)``.

    Returns:
        The logits as :func:`check_outputs` returns them, and the indices on their device.

    Raises:
        TypeError: If the target is no integer tensor.
        ValueError: If its shape is wrong, or an index is out of range.

    Example:
        >>> outputs, target = check_labelled(torch.zeros(3, 2, 2), torch.tensor([0, 1]))
        >>> target.dtype
        torch.int64
    """
    outputs = check_outputs(outputs)
    _, batch, classes = outputs.shape
    expected = f"target must be {batch} class indices from 0 to {classes - 1}, shape ({batch},)"
    if not isinstance(target, Tensor):
        kind = type(target).__name__
        raise TypeError(f"{expected}, got {kind}. Convert with torch.as_tensor.")
    if target.is_floating_point() or target.is_complex():
        raise TypeError(
            f"{expected}, got {target.dtype}. For values (regression) use embens.evaluate, for "
            "rows of probabilities their argmax."
        )
    if target.dtype == torch.bool:
        raise TypeError(f"{expected}, got {target.dtype}. Convert with target.long().")
    if target.shape != (batch,):
        raise ValueError(
            f"{expected}, got shape {tuple(target.shape)}. Squeeze a column; take the argmax of "
            "one-hot rows."
        )
    target = target.to(device=outputs.device, dtype=torch.int64)
    smallest = int(target.min())
    largest = int(target.max())
    if smallest < 0 or largest >= classes:
        raise ValueError(f"{expected}, got indices from {smallest} to {largest}.")
    return outputs, target
