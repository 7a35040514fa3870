r"""The training objective: every parameter gets the gradient that the paper gives it.

.. math::
    \Delta u_a = -\eta_u \frac{\partial L_a}{\partial u_a}, \qquad
    \Delta w = -\eta_w \frac{\gamma(M)}{M} \sum_a \frac{\partial L_a}{\partial w}

The value is the mean of the members' losses, whatever :math:`\gamma` is. A criterion is called
once for each member and its own reduction is used as it is: with class weights or ignored labels
:math:`L_a` is the weighted mean that torch returns.

Optimisers that divide by the gradient's size (Adam and its kin) cancel a constant :math:`\gamma`;
:func:`embens.fit` puts it into the rate instead, see :mod:`embens.training.rates`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from embens import checks, gradient
from embens.checks import Gamma, closest
from embens.ensemble import run as execution
from embens.gradient import GradientScale

if TYPE_CHECKING:
    from embens.ensemble import EmbeddedEnsemble

Criterion = Callable[[Any, Any], Tensor]
Batch = Literal["same", "own", "split"]
Of = Literal["members", "mean"]
OPTIONS = {"batch": ("same", "own", "split"), "of": ("members", "mean")}


def objective(
    outputs: Tensor,
    target: Any,
    criterion: Criterion = nn.functional.cross_entropy,
    gamma: Gamma = None,
    *,
    batch: Batch = "same",
    of: Of = "members",
) -> Tensor:
    """Return the training objective of an ensemble's outputs.

    Args:
        outputs: as the ensemble gave them, or what was made of them by slicing, casting or
            DistributedDataParallel.
        target: passed to the criterion with each member's outputs.
        criterion: a function of ``(outputs, target)``; a vector of losses is averaged. One with an
            attribute ``over_members = True`` is called once, with the outputs of all members, and
            returns ``(member, batch, …)``: a step of a small network is faster by that.
        gamma: gradient scale of the shared parameters: a number, a function of the number of
            members, or None for the ensemble's natural value.
        batch: how the ensemble was called. "same": outputs are ``(member, batch, …)`` and all
            members have the target; "own": the target has the members first as well; "split":
            outputs are ``(batch, …)`` and member a's loss is the mean over its rows a, a + M, ….
        of: "members": each member has its own loss; "mean": for comparison, all have the loss of
            the mean output, in place of :math:`L_a` in the formulas above.
    """
    scales = gradient.find_scales(outputs)
    if not scales:
        if not outputs.requires_grad and batch != "split":
            return member_losses(outputs, target, criterion, len(outputs), batch, of).mean()
        raise ValueError(
            "these outputs don't lead back to an ensemble (they were compiled, have no gradient, "
            "or come from another network); call ensemble.objective(outputs, target) instead"
        )
    ensembles = {id(s.ensemble): s.ensemble for s in scales}
    if len(ensembles) > 1:
        raise ValueError(
            "these outputs come from several ensembles; add up the objective of each of them"
        )
    return _combine(scales[0].ensemble, scales, outputs, target, criterion, gamma, batch, of)[0]  # type: ignore[arg-type]


def objective_and_losses(
    ensemble: EmbeddedEnsemble,
    outputs: Any,
    target: Any,
    criterion: Criterion,
    gamma: Gamma,
    batch: Batch = "same",
    of: Of = "members",
) -> tuple[Tensor, Tensor]:
    """Return the objective and the members' losses behind it."""
    scales = gradient.find_scales(outputs)
    if not scales:
        scales = [GradientScale(ensemble, ensemble._compiled_scale)]
    return _combine(ensemble, scales, outputs, target, criterion, gamma, batch, of)


def _combine(
    ensemble: EmbeddedEnsemble,
    scales: list[GradientScale],
    outputs: Any,
    target: Any,
    criterion: Criterion,
    gamma: Gamma,
    batch: Batch,
    of: Of,
) -> tuple[Tensor, Tensor]:
    factor = checks.gradient_factor(gamma, ensemble.members, ensemble.natural_gamma)
    outputs = gradient.watch(outputs, factor)
    losses = member_losses(outputs, target, criterion, ensemble.members, batch, of)
    return gradient.combine_losses(losses, scales, factor), losses


def member_losses(
    outputs: Any,
    target: Any,
    criterion: Criterion,
    members: int,
    batch: Batch = "same",
    of: Of = "members",
) -> Tensor:
    """Return the losses of the members, ``(member,)``; see :func:`objective`.

    Members without rows in a split batch are left out.
    """
    for name, value in (("batch", batch), ("of", of)):
        if value not in OPTIONS[name]:
            raise ValueError(f"{name}: unknown {value!r}{closest(value, OPTIONS[name])}")
    if of == "mean":
        if batch != "same":
            raise ValueError(
                f"of='mean' needs outputs of all members on the same rows; got batch={batch!r}. "
                "Use batch='same', or of='members'."
            )
        mean = tree_map(lambda o: o.mean(0), outputs)
        return _reduced(criterion(mean, target)).expand(_length(outputs))
    if batch == "same" and getattr(criterion, "over_members", False):
        losses = criterion(outputs, target)
        if losses.dim() < 2 or len(losses) != members:
            raise ValueError(
                "a criterion with over_members=True returns losses (member, batch, …) for the "
                f"outputs of all members; got shape {tuple(losses.shape)} for {members} members."
            )
        return losses.flatten(1).mean(1)
    if batch == "split":
        present = range(min(members, _length(outputs)))
        pairs = ((_rows(outputs, a, members), _rows(target, a, members)) for a in present)
    elif isinstance(outputs, Tensor):
        if batch == "own":
            _check_own(outputs, target)
        pairs = ((o, _pick(target, a, batch)) for a, o in enumerate(outputs))
    else:
        each = range(_length(outputs))
        pairs = ((_pick(outputs, a, "own"), _pick(target, a, batch)) for a in each)
    return torch.stack([_reduced(criterion(o, t)) for o, t in pairs])


def _length(outputs: Any) -> int:
    return len(outputs) if isinstance(outputs, Tensor) else len(tree_leaves(outputs)[0])


def _pick(values: Any, a: int, batch: Batch) -> Any:
    if batch == "same":
        return values
    return tree_map(lambda v: v[a] if isinstance(v, Tensor) and v.dim() else v, values)


def _rows(values: Any, a: int, members: int) -> Any:
    return tree_map(lambda v: v[a::members] if isinstance(v, Tensor) and v.dim() else v, values)


def _check_own(outputs: Tensor, target: Any) -> None:
    for leaf in tree_leaves(target):
        if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) != len(outputs):
            raise ValueError(
                f"batch='own' expects a target of shape ({len(outputs)}, batch, …), one for each "
                f"member; got {tuple(leaf.shape)}. For one target of all members use batch='same'."
            )


def _reduced(loss: Tensor) -> Tensor:
    return loss.mean() if loss.dim() else loss


def backward_in_chunks(
    ensemble: EmbeddedEnsemble,
    inputs: tuple,
    kwargs: dict,
    target: Any,
    criterion: Criterion,
    gamma: Gamma,
    chunk: int,
    observe: Callable[[Any, Tensor], None] | None = None,
) -> Tensor:
    """Run forward and backward chunk by chunk; see ``EmbeddedEnsemble.backward``.

    ``observe`` is called with the outputs and the losses of every chunk, detached.
    """
    factor = checks.gradient_factor(gamma, ensemble.members, ensemble.natural_gamma)
    chunk = ensemble._chunk_size(inputs, chunk)
    scale = GradientScale(ensemble)
    scale.value = factor
    store = ensemble._new_store("same", chunk, cut=True)
    total: Any = 0.0
    first = True  # what members share is computed in the first chunk
    cursor = ensemble._cursor
    with (
        torch.enable_grad(),
        execution.Pass(cursor, store),
        gradient.SharedThrough(scale, ensemble._holders),
    ):
        stacks = [execution.CutStack(stack) for stack in ensemble._stacks()]
        for outputs in ensemble._run(stacks, inputs, kwargs, "same", chunk):
            losses = member_losses(outputs, target, criterion, ensemble.members)
            retain = first and cursor.store is not None and cursor.store.meets(losses)
            losses.sum().backward(retain_graph=retain)
            first = False
            total = total + losses.detach().sum()
            if observe is not None:
                observe(tree_map(Tensor.detach, outputs), losses.detach())
        if cursor.store is not None:
            cursor.store.backward()
        for stack in stacks:
            stack.backward()
    return total / ensemble.members
