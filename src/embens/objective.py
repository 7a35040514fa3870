r"""The training objective: the sum over members of their losses, with its plain gradient.

.. math:: L = \sum_a L_a, \qquad L_a = \mathrm{criterion}(\mathrm{outputs}_a, \mathrm{target})

Every modulation :math:`u_a` gets the gradient of its member's loss, every shared weight the sum
over members. It is a function of tensors, so any other loss or penalty can be added to it, and any
loop can use it. The paper's :math:`\gamma(M)/M` is not here: it is a factor of the shared rate, see
:mod:`embens.ensemble.rates`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from embens.checks import closest

Criterion = Callable[[Any, Any], Tensor]
BatchKind = Literal["same", "own", "split"]
Of = Literal["members", "mean"]
OPTIONS = {"batch": ("same", "own", "split"), "of": ("members", "mean")}
IGNORED = -100
"""The label that cross-entropy leaves out, as torch's does."""


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
            averaged. None: cross-entropy for whole numbers and for rows of probabilities over as
            many classes as there are outputs, squared error for other numbers. One with an
            attribute ``over_members = True`` is called once, with the outputs of all members, and
            returns ``(member, batch, …)``, which is faster for small networks.
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
    if "gamma" in unknown:
        raise TypeError(
            "objective has no gamma any more: gamma is a factor of the shared parameters' rate. "
            "Pass it to ensemble.parameter_groups(lr, gamma=…), or to embens.fit(gamma=…)."
        )
    if unknown:
        name = next(iter(unknown))
        known = ("criterion", "batch", "of", "members")
        raise TypeError(f"objective has no argument {name!r}{closest(name, known)}")
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
    for name, value in (("batch", batch), ("of", of)):
        if value not in OPTIONS[name]:
            raise ValueError(f"{name}: unknown {value!r}{closest(value, OPTIONS[name])}")
    if batch == "split" and members is None:
        raise TypeError(
            "the outputs of a split batch don't say how many members there are; pass members=, or "
            "call ensemble.objective(outputs, target, batch='split')"
        )
    length = _length(outputs)
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
    if batch == "own":
        _check_own(length, target)
    if batch == "split":
        assert members is not None
        return _split_losses(outputs, target, criterion, members)
    if criterion is None:
        criterion = default_criterion(outputs, target, batch)
    if criterion is F.cross_entropy and isinstance(outputs, Tensor) and outputs.dim() > 2:
        return _cross_entropies(outputs, target, batch)
    if criterion is F.mse_loss and isinstance(outputs, Tensor):
        return _squared_errors(outputs, target, batch)
    if batch == "same" and getattr(criterion, "over_members", False):
        losses = criterion(outputs, target)
        if losses.dim() < 2 or len(losses) != length:
            raise ValueError(
                "a criterion with over_members=True returns losses (member, batch, …) for the "
                f"outputs of all members; got shape {tuple(losses.shape)} for {length} members."
            )
        return losses.flatten(1).mean(1)
    targets = [target] * length if batch == "same" else [_pick(target, a) for a in range(length)]
    return torch.stack([_reduced(criterion(_pick(outputs, a), targets[a])) for a in range(length)])


def default_criterion(outputs: Any, target: Any, batch: BatchKind = "same") -> Criterion:
    """Return ``cross_entropy`` or ``mse_loss`` of ``torch.nn.functional``, as the target asks."""
    if not isinstance(outputs, Tensor) or not isinstance(target, Tensor):
        kind = type(outputs if not isinstance(outputs, Tensor) else target).__name__
        raise TypeError(
            f"criterion: there is a default for tensors of outputs and targets; got a {kind}. Pass "
            "a function of (outputs, target) of one member."
        )
    shape = outputs.shape[1:]
    if target.is_floating_point():
        rows = target.shape if batch == "same" else target.shape[1:]
        soft = len(shape) == 2 and shape == rows and shape[1] > 1 and _are_probabilities(target)
        return F.cross_entropy if soft else F.mse_loss
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


@torch.no_grad()
def _are_probabilities(target: Tensor) -> bool:
    sums = target.sum(-1)
    return bool(((target >= 0).all(-1) & ((sums - 1).abs() < 1e-3)).all())


def _cross_entropies(outputs: Tensor, target: Tensor, batch: BatchKind) -> Tensor:
    """Return ``cross_entropy`` of each member, in one call."""
    targets = target.unsqueeze(0) if batch == "same" else target
    if not targets.is_floating_point():
        targets = targets.long()
    labels = targets.expand(len(outputs), *targets.shape[1:]).flatten(0, 1)
    losses = F.cross_entropy(outputs.flatten(0, 1), labels, reduction="none")
    losses = losses.view(len(outputs), -1)
    if target.is_floating_point():
        return losses.mean(1)
    return losses.sum(1) / (targets != IGNORED).flatten(1).sum(1)


def _squared_errors(outputs: Tensor, target: Tensor, batch: BatchKind) -> Tensor:
    """Return the mean squared error of each member; nothing is broadcast but the members."""
    targets = target.unsqueeze(0) if batch == "same" else target
    if targets.shape[1:] != outputs.shape[1:]:
        if targets.shape[1:] == outputs.shape[1:-1] and outputs.shape[-1] == 1:
            targets = targets.unsqueeze(-1)
        elif targets.shape[1:-1] == outputs.shape[1:] and targets.shape[-1] == 1:
            targets = targets.squeeze(-1)
        else:
            raise ValueError(
                f"squared error: expected targets of the shape of a member's outputs, "
                f"{tuple(outputs.shape[1:])}; got {tuple(targets.shape[1:])}"
            )
    return (outputs - targets).square().flatten(1).mean(1)


def _split_losses(outputs: Any, target: Any, criterion: Criterion | None, members: int) -> Tensor:
    if criterion is None:
        criterion = default_criterion(_add_axis(outputs), _add_axis(target), "own")
    losses = []
    for a in range(min(members, _length(outputs))):
        mine, wanted = (_add_axis(_rows(value, a, members)) for value in (outputs, target))
        losses.append(member_losses(mine, wanted, criterion, batch="own"))
    return torch.cat(losses)


def _length(outputs: Any) -> int:
    return len(outputs) if isinstance(outputs, Tensor) else len(tree_leaves(outputs)[0])


def _pick(values: Any, a: int) -> Any:
    if isinstance(values, Tensor):
        return values[a] if values.dim() else values
    return tree_map(lambda v: v[a] if isinstance(v, Tensor) and v.dim() else v, values)


def _rows(values: Any, a: int, members: int) -> Any:
    return tree_map(lambda v: v[a::members] if isinstance(v, Tensor) and v.dim() else v, values)


def _add_axis(values: Any) -> Any:
    return tree_map(lambda v: v[None] if isinstance(v, Tensor) and v.dim() else v, values)


def _check_own(members: int, target: Any) -> None:
    for leaf in tree_leaves(target):
        if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) != members:
            raise ValueError(
                f"batch='own' expects a target of shape ({members}, batch, …), one for each "
                f"member; got {tuple(leaf.shape)}. For one target of all members use batch='same'."
            )


def _reduced(loss: Tensor) -> Tensor:
    return loss.mean() if loss.dim() else loss
