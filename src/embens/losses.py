"""Losses of the members of an ensemble, ``(member,)``, and the criteria they are made of.

A criterion is a function of one member's outputs and the target. Cross-entropy and squared error
are computed for all members at once; any other criterion is called for one member after another.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from embens.checks import check_choice, name_rows

Criterion = Callable[[Any, Any], Tensor]
BatchKind = Literal["same", "own", "split"]
Of = Literal["members", "mean", "moments"]

BATCH_KINDS = ("same", "own", "split")
LOSSES_OF = ("members", "mean", "moments")
IGNORED = -100  # the label that cross-entropy leaves out, as in torch
TOO_FEW_OUTPUTS = "integer targets imply cross-entropy, which needs at least two outputs"
FLOATING_TARGETS = "Pass target.float() for squared error, or a criterion."
FEW_CLASSES = 32  # up to here a softmax over the last but one axis is faster than over the last


def member_losses(
    outputs: Any,
    target: Any,
    criterion: Criterion | None = None,
    *,
    batch: BatchKind = "same",
    of: Of = "members",
    members: int | None = None,
) -> Tensor:
    """Return the losses of all members that have rows; see :func:`embens.objective`.

    Args:
        outputs: Outputs of an ensemble, ``(member, batch, …)``, or a dictionary or tuple of them;
            ``(batch, …)`` if the batch was split.
        target: Passed to the criterion with each member's outputs.
        criterion: A function of one member's ``(outputs, target)``; None: by the target.
        batch: How the ensemble was called.
        of: What the criterion is applied to.
        members: Number of members; required for a split batch.

    Returns:
        Losses ``(member,)``.

    Example:
        >>> member_losses(torch.tensor([[[1.0]], [[3.0]]]), torch.zeros(1))
        tensor([1., 9.])
    """
    length = _check_batch(outputs, batch, of, members)
    if criterion is None:
        outputs = logits_of(outputs)
        criterion = default_criterion(outputs, target, batch, of)
    if of != "members":
        merge = _mean_over_members
        if of == "moments":
            merge = _mixture_moments
        # The merged outputs are those of an ensemble of one member, whose loss is every member's.
        merged = tree_map(lambda output: merge(output).unsqueeze(0), outputs)
        return member_losses(merged, target, criterion).expand(length)
    if criterion is F.mse_loss:
        criterion = squared_error
    if criterion is squared_error or criterion is F.cross_entropy:
        _check_tensors(outputs, target)
    if batch == "same":
        if criterion is F.cross_entropy:
            return _cross_entropies(outputs, target)
        if criterion is squared_error:
            return (outputs - _match(target, outputs.shape[1:])).square().flatten(1).mean(1)
        if getattr(criterion, "over_members", False):
            return _losses_over_members(criterion, outputs, target, length)
    if batch == "own":
        _check_own_target(target, length)
    return _losses_one_by_one(outputs, target, criterion, batch, length, members)


def _check_batch(outputs: Any, batch: str, of: str, members: int | None) -> int:
    """Validate the options; return the length of the first axis of the outputs."""
    if batch not in BATCH_KINDS or of not in LOSSES_OF:
        check_choice("batch", batch, BATCH_KINDS)
        check_choice("of", of, LOSSES_OF)
    if of != "members" and batch != "same":
        raise ValueError(f"of={of!r} needs members on the same rows, got batch={batch!r}.")
    length = len(outputs) if isinstance(outputs, Tensor) else len(tree_leaves(outputs)[0])
    if batch == "split" and members is None:
        raise TypeError("a split batch does not tell the number of members. Pass members=.")
    if batch != "split" and members not in (None, length):
        raise ValueError(
            f"outputs must be ({members}, batch, …), got a first axis of size {length}."
        )
    return length


def _check_own_target(target: Any, length: int) -> None:
    """Raise ValueError unless the target of separate batches has the members first."""
    for leaf in tree_leaves(target):
        if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) != length:
            raise ValueError(
                f"batch='own' expects a target of shape ({length}, batch, …), got "
                f"{tuple(leaf.shape)}. For one target of all members use batch='same'."
            )


def _losses_over_members(criterion: Any, outputs: Any, target: Any, length: int) -> Tensor:
    """Call a criterion once that takes the outputs of all members."""
    losses = criterion(outputs, target)
    if losses.dim() < 2 or len(losses) != length:
        raise ValueError(
            f"the criterion must return losses ({length}, batch, …), got {tuple(losses.shape)}."
        )
    return losses.flatten(1).mean(1)


def _losses_one_by_one(
    outputs: Any, target: Any, criterion: Any, batch: str, length: int, members: int | None
) -> Tensor:
    """Call the criterion for one member after another."""
    indices: list[int | slice] = list(range(length))
    if batch == "split":
        assert members is not None
        indices = [slice(a, None, members) for a in range(min(members, length))]
    losses = []
    for index in indices:
        member_outputs = _take(outputs, index)
        member_target = target
        if batch != "same":
            member_target = _take(target, index)
        if criterion is F.cross_entropy:
            losses.append(_cross_entropies(member_outputs.unsqueeze(0), member_target)[0])
            continue
        member_target = _aligned_target(criterion, member_outputs, member_target)
        loss = criterion(member_outputs, member_target)
        if not isinstance(loss, Tensor):
            raise TypeError(f"the criterion must return a tensor, got {type(loss).__name__}.")
        losses.append(loss.mean() if loss.dim() else loss)
    return torch.stack(losses)


def logits_of(outputs: Any) -> Any:
    """Return the ``"logits"`` of a model output of transformers; other outputs unchanged.

    Args:
        outputs: A tensor, or a nested container of tensors.

    Returns:
        The logits ``(member, batch, class)``, or the outputs.

    Example:
        >>> logits_of({"logits": "tensor", "hidden_states": ()})
        'tensor'
    """
    if isinstance(outputs, Mapping) and "logits" in outputs:
        return outputs["logits"]
    return outputs


def default_criterion(
    outputs: Any, target: Any, batch: BatchKind = "same", of: Of = "members"
) -> Criterion:
    """Return the criterion that suits a target; see :func:`embens.objective`.

    Args:
        outputs: Outputs ``(member, batch, …)``; ``(batch, …)`` if the batch was split.
        target: Integer classes, rows of class probabilities, or values.
        batch: How the ensemble was called.
        of: What the criterion is applied to.

    Returns:
        Cross-entropy, :func:`squared_error` or :func:`gaussian_nll`.

    Raises:
        TypeError: If the target is boolean or complex, or not a tensor.

    Example:
        >>> default_criterion(torch.zeros(3, 5, 2), torch.zeros(5, dtype=torch.int64)).__name__
        'cross_entropy'
    """
    if of == "moments":
        return gaussian_nll
    _check_tensors(outputs, target)
    shape = outputs.shape if batch == "split" else outputs.shape[1:]
    if target.is_floating_point():
        target_shape = target.shape[1:] if batch == "own" else target.shape
        has_classes = len(shape) == 2 and shape == target_shape and shape[1] > 1
        if not has_classes or target.is_meta or (target < 0).any():
            return squared_error
        sums_to_one = ((target.detach().sum(-1) - 1).abs() < 1e-3).all()
        return F.cross_entropy if sums_to_one else squared_error
    if target.dtype == torch.bool or target.is_complex():
        raise TypeError(
            f"there is no default criterion for targets of {target.dtype}. Pass target.long()."
        )
    return F.cross_entropy


def _check_tensors(outputs: Any, target: Any) -> None:
    """Raise TypeError unless a default criterion applies, which needs tensors."""
    for value in (outputs, target):
        if not isinstance(value, Tensor):
            raise TypeError(
                f"the default criterion needs tensors, got {type(value).__name__}. Pass a function "
                "of one member's (outputs, target)."
            )


def ignored_label(criterion: Any) -> int | None:
    """Return the label that a cross-entropy leaves out, or None for other criteria.

    Args:
        criterion: Any criterion, also a ``functools.partial`` of one.

    Returns:
        The label.

    Example:
        >>> ignored_label(nn.CrossEntropyLoss(ignore_index=0)), ignored_label(nn.MSELoss())
        (0, None)
    """
    options = getattr(criterion, "keywords", {})
    criterion = getattr(criterion, "func", criterion)
    if isinstance(criterion, nn.CrossEntropyLoss):
        return criterion.ignore_index
    if criterion is F.cross_entropy:
        return options.get("ignore_index", IGNORED)
    return None


def check_labels(name: str, target: Any, classes: int, ignored: int = IGNORED) -> None:
    """Raise ValueError for integer labels that are not classes.

    Args:
        name: Of the target, for the error message.
        target: Labels of any shape; floating targets are not checked.
        classes: Number of outputs.
        ignored: The label to leave out.

    Raises:
        ValueError: If a label is not a class, or there are fewer than two outputs.

    Example:
        >>> check_labels("train", torch.tensor([0, 3]), classes=3)
        Traceback (most recent call last):
        ValueError: train: labels must be from 0 to 2, one for each output, got 3 in row 1. ...
    """
    if not isinstance(target, Tensor) or target.is_floating_point():
        return
    if classes < 2:
        raise ValueError(f"{name}: {TOO_FEW_OUTPUTS}, got {classes}. {FLOATING_TARGETS}")
    invalid = ((target < 0) | (target >= classes)) & (target != ignored)
    if invalid.any():
        labels = ", ".join(str(label) for label in target[invalid].unique().tolist()[:5])
        raise ValueError(
            f"{name}: labels must be from 0 to {classes - 1}, one for each output, got {labels} in "
            f"{name_rows(invalid)}. {ignored} marks labels to leave out."
        )


def _check_classes(shape: torch.Size, target: Tensor) -> None:
    """Raise if one member's outputs and a target have no cross-entropy."""
    if len(shape) < 2 or shape[1] < 2:
        raise ValueError(
            f"{TOO_FEW_OUTPUTS}, got members' outputs of shape {tuple(shape)}. {FLOATING_TARGETS}"
        )
    expected = shape if target.is_floating_point() else (shape[0], *shape[2:])
    if target.shape != expected:
        if target.shape == shape:
            hint = " Pass the classes of one-hot rows, target.argmax(1), or target.float()."
        elif target.shape == (*expected, 1):
            hint = " Squeeze a column of classes."
        else:
            hint = ""
        raise ValueError(
            f"cross-entropy needs targets of shape {tuple(expected)} for members' outputs "
            f"{tuple(shape)}, got {tuple(target.shape)}.{hint}"
        )


def squared_error(outputs: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error of one member.

    Args:
        outputs: ``(batch, …)``.
        target: Of the same shape; ``(n,)`` is compared with ``(n, 1)`` row by row.

    Returns:
        A scalar.

    Example:
        >>> squared_error(torch.tensor([[3.0], [1.0]]), torch.ones(2))
        tensor(2.)
    """
    return (outputs - _match(target, outputs.shape)).square().mean()


def gaussian_nll(outputs: Tensor, target: Tensor) -> Tensor:
    r"""Return the negative log-likelihood of targets under a member's normal distributions.

    .. math:: \tfrac12 \big(s + (y - \mu)^2 e^{-s}\big), \qquad \mathrm{outputs} = (\mu, s)

    The constant :math:`\tfrac12 \log 2\pi` is left out, as in torch.

    Args:
        outputs: ``(batch, 2)``, a mean and the logarithm of a variance.
        target: ``(batch,)``.

    Returns:
        Losses ``(batch,)``.

    Raises:
        ValueError: If the outputs are not pairs, or the target has another shape.

    Example:
        >>> outputs = torch.tensor([[3.0, 0.0]])  # mean 3, variance 1
        >>> gaussian_nll(outputs, torch.tensor([1.0]))
        tensor([2.])
    """
    mean, log_variance = _mean_and_log_variance(outputs)
    error = mean - _match(target, mean.shape)
    return (log_variance + error.square() * (-log_variance).exp()) / 2


def _mean_over_members(outputs: Tensor) -> Tensor:
    return outputs.mean(0)


def _mixture_moments(outputs: Tensor) -> Tensor:
    """Return mean and log-variance of the mixture of the members' normal distributions."""
    means, log_variances = _mean_and_log_variance(outputs)
    variance = log_variances.exp().mean(0) + means.var(0, correction=0)
    return torch.stack([means.mean(0), variance.log()], -1)


def _mean_and_log_variance(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Split outputs ``(…, 2)`` into means and log-variances ``(…)``."""
    if outputs.shape[-1] != 2:
        raise ValueError(
            f"outputs must be (…, 2), a mean and a log-variance, got {tuple(outputs.shape)}."
        )
    return outputs[..., 0], outputs[..., 1]


def _match(target: Tensor, shape: torch.Size) -> Tensor:
    """Return a target in the shape of one member's outputs, up to a last axis of size 1."""
    if shape in (target.shape, (*target.shape, 1)) or target.shape == (*shape, 1):
        return target.reshape(shape)
    raise ValueError(
        f"targets must have the shape of a member's outputs, {tuple(shape)}, got "
        f"{tuple(target.shape)}. For classes pass target.long()."
    )


def _aligned_target(criterion: Any, outputs: Any, target: Any) -> Any:
    """Return the target in the shape of the outputs where a loss of torch would broadcast it."""
    function = getattr(criterion, "func", criterion)
    home = getattr(function, "__module__", None) or type(function).__module__
    are_tensors = isinstance(outputs, Tensor) and isinstance(target, Tensor)
    if not are_tensors or not home.startswith("torch.nn."):
        return target
    if ignored_label(criterion) is not None:
        _check_classes(outputs.shape, target)
        return target
    if target.is_floating_point() or target.numel() == outputs.numel():
        return _match(target, outputs.shape)
    return target


def _cross_entropies(outputs: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy of each member on the same target."""
    _check_classes(outputs.shape[1:], target)
    members = len(outputs)
    is_soft = target.is_floating_point()
    if not is_soft:
        target = target.long()
    targets = target.expand(members, *target.shape)
    if outputs.shape[2] <= FEW_CLASSES:
        # Members become torch's batch and their rows its positions.
        outputs = outputs.movedim(2, 1)
        if is_soft:
            targets = targets.movedim(2, 1)
    else:
        outputs = outputs.flatten(0, 1)
        targets = targets.flatten(0, 1)
    try:
        losses = F.cross_entropy(outputs, targets, reduction="none").view(members, -1)
    except IndexError:
        check_labels("target", target, outputs.shape[1])
        raise
    if is_soft:
        return losses.mean(1)
    return losses.sum(1) / (target != IGNORED).sum().clamp(min=1)


def _take(values: Any, index: int | slice) -> Any:
    """Return one member's part of nested tensors with the members first."""

    def take(value: Any) -> Any:
        return value[index] if isinstance(value, Tensor) and value.dim() else value

    return tree_map(take, values)
