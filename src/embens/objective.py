r"""The training objective: the sum over members of their losses, with its plain gradient.

.. math:: L = \sum_a L_a, \qquad L_a = \mathrm{criterion}(\mathrm{outputs}_a, \mathrm{target})

It is a function of tensors, so any other loss or penalty can be added to it, and any loop can use
it. Not here: the paper's :math:`\gamma(M)/M`, a factor of the shared rate
(:mod:`embens.ensemble.rates`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from embens.checks import check_choice, closest

Criterion = Callable[[Any, Any], Tensor]
BatchKind = Literal["same", "own", "split"]
Of = Literal["members", "mean"]
OPTIONS = {"batch": get_args(BatchKind), "of": get_args(Of)}
IGNORED = -100  # the label that cross-entropy leaves out, as torch's does
FEW_CLASSES = 32  # up to here a softmax over the last but one axis is faster than over the last


def objective(
    outputs: Any,
    target: Any,
    criterion: Criterion | None = None,
    *,
    batch: BatchKind = "same",
    of: Of = "members",
    members: int | None = None,
    **unknown: Any,
) -> Tensor:
    """Return the sum of the members' losses.

    Args:
        outputs: of an ensemble, ``(member, batch, …)``; a criterion of your own may take a dict or
            a tuple of such tensors.
        target: passed to the criterion with each member's outputs.
        criterion: a function of ``(outputs, target)`` of one member; a vector of losses is
            averaged. None: cross-entropy for whole numbers and for rows of probabilities, squared
            error for other numbers. One with an attribute ``over_members = True`` is called once,
            with the outputs of all members, and returns ``(member, batch, …)``.
        batch: how the ensemble was called. "same": all members have the target; "own": the target
            has the members first as well; "split": outputs are ``(batch, …)`` and member a's loss
            is the mean over its rows a, a + M, ….
        of: "members": each member has its own loss; "mean": for comparison, the loss of the mean
            output takes the place of every member's, so the sum is M times it.
        members: how many there are; needed for a split batch.
        **unknown: refused, with a hint.

    Example:
        >>> outputs, target = torch.zeros(4, 5, 2), torch.tensor([0, 1, 1, 0, 1])
        >>> round(objective(outputs, target).item(), 4)  # 4 log 2
        2.7726
    """
    for name in unknown:
        hint = closest(name, ("criterion", "batch", "of", "members"))
        if name == "gamma":
            hint = " any more: it is a factor of the shared rate. Pass it to ensemble."
            hint += "parameter_groups(lr, gamma=…), or to embens.fit(gamma=…)."
        raise TypeError(f"objective has no argument {name!r}{hint}")
    return member_losses(outputs, target, criterion, batch=batch, of=of, members=members).sum()


def member_losses(
    outputs: Any,
    target: Any,
    criterion: Criterion | None = None,
    *,
    batch: BatchKind = "same",
    of: Of = "members",
    members: int | None = None,
) -> Tensor:
    """Return the losses of the members, ``(member,)``; see :func:`objective`.

    Members without rows in a split batch are left out.
    """
    check_choice("batch", batch, OPTIONS["batch"])
    check_choice("of", of, OPTIONS["of"])
    length = len(outputs) if isinstance(outputs, Tensor) else len(tree_leaves(outputs)[0])
    if batch == "split" and members is None:
        raise TypeError(
            "the outputs of a split batch don't say how many members there are; pass members=, or "
            "call ensemble.objective(outputs, target, batch='split')"
        )
    if batch != "split" and members not in (None, length):
        raise ValueError(
            f"expected the outputs of {members} members, ({members}, batch, …); their first axis "
            f"has {length}"
        )
    if of == "mean":
        if batch != "same":
            raise ValueError(
                f"of='mean' needs outputs of all members on the same rows; got batch={batch!r}. "
                "Use batch='same', or of='members'."
            )
        mean = tree_map(lambda o: o.mean(0, keepdim=True), outputs)
        return member_losses(mean, target, criterion).expand(length)
    if criterion is None:
        criterion = default_criterion(outputs, target, batch)
    if criterion is F.mse_loss:
        criterion = squared_error
    if batch == "same":
        if criterion is F.cross_entropy and isinstance(outputs, Tensor) and outputs.dim() > 2:
            return _cross_entropies(outputs, target)
        if criterion is squared_error:
            return (outputs - _like(target, outputs.shape[1:])).square().flatten(1).mean(1)
        if getattr(criterion, "over_members", False):
            losses = criterion(outputs, target)
            if losses.dim() < 2 or len(losses) != length:
                raise ValueError(
                    "a criterion with over_members=True returns losses (member, batch, …) for the "
                    f"outputs of {length} members; got shape {tuple(losses.shape)}."
                )
            return losses.flatten(1).mean(1)
        pairs = ((_take(outputs, a), target) for a in range(length))
    elif batch == "own":
        for leaf in tree_leaves(target):
            if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) != length:
                raise ValueError(
                    f"batch='own' expects a target of shape ({length}, batch, …), one for each "
                    f"member; got {tuple(leaf.shape)}. For one target of all use batch='same'."
                )
        pairs = ((_take(outputs, a), _take(target, a)) for a in range(length))
    else:
        rows = [slice(a, None, members) for a in range(min(members or 1, length))]
        pairs = ((_take(outputs, mine), _take(target, mine)) for mine in rows)
    losses = (criterion(o, t) for o, t in pairs)
    return torch.stack([loss.mean() if loss.dim() else loss for loss in losses])


def default_criterion(outputs: Any, target: Any, batch: BatchKind = "same") -> Criterion:
    """Return ``torch.nn.functional.cross_entropy`` or :func:`squared_error`, as the target asks."""
    if not isinstance(outputs, Tensor) or not isinstance(target, Tensor):
        kind = type(outputs if not isinstance(outputs, Tensor) else target).__name__
        raise TypeError(
            f"criterion: its default is for tensors; got a {kind}. Pass a function of (outputs, "
            "target) of one member."
        )
    shape = outputs.shape if batch == "split" else outputs.shape[1:]
    if target.is_floating_point():
        rows = target.shape[1:] if batch == "own" else target.shape
        if len(shape) != 2 or shape != rows or shape[1] < 2 or (target < 0).any():
            return squared_error
        soft = ((target.detach().sum(-1) - 1).abs() < 1e-3).all()
        return F.cross_entropy if soft else squared_error
    if target.dtype == torch.bool or target.is_complex():
        raise TypeError(
            f"criterion: there is no default for targets of {target.dtype}. Pass target.long() for "
            "classes, target.float() for numbers, or a criterion."
        )
    if len(shape) < 2 or shape[1] < 2:
        raise ValueError(
            "criterion: whole numbers are classes, and members' outputs of shape "
            f"{tuple(shape)} have fewer than two of them. Pass target.float() for squared error, "
            "or a criterion."
        )
    return F.cross_entropy


def squared_error(outputs: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error of one member; ``(n,)`` meets ``(n, 1)`` row by row."""
    return (outputs - _like(target, outputs.shape)).square().mean()


def _like(target: Tensor, shape: torch.Size) -> Tensor:
    if shape in (target.shape, (*target.shape, 1)) or target.shape == (*shape, 1):
        return target.reshape(shape)
    raise ValueError(
        f"squared error: expected targets of the shape of a member's outputs, {tuple(shape)}; got "
        f"{tuple(target.shape)}"
    )


def _cross_entropies(outputs: Tensor, target: Tensor) -> Tensor:
    members, soft = len(outputs), target.is_floating_point()
    target = target if soft else target.long()
    targets = target.expand(members, *target.shape)
    if outputs.shape[2] <= FEW_CLASSES:  # members are torch's batch, their rows its positions
        targets = targets.movedim(2, 1) if soft else targets
        losses = F.cross_entropy(outputs.movedim(2, 1), targets, reduction="none").flatten(1)
    else:
        losses = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(0, 1), reduction="none")
        losses = losses.view(members, -1)
    return losses.mean(1) if soft else losses.sum(1) / (target != IGNORED).sum()


def _take(values: Any, index: int | slice) -> Any:
    return tree_map(lambda v: v[index] if isinstance(v, Tensor) and v.dim() else v, values)
