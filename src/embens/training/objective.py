r"""The training objective: every parameter gets the gradient that the paper gives it.

.. math::
    \Delta u_a = -\eta_u \frac{\partial L_a}{\partial u_a}, \qquad
    \Delta w = -\eta_w \frac{\gamma(M)}{M} \sum_a \frac{\partial L_a}{\partial w}

The value is the mean of the members' losses, whatever :math:`\gamma` is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from embens import execution, gradient
from embens.gradient import Gamma, GradientScale

if TYPE_CHECKING:
    from embens.ensemble import EmbeddedEnsemble

Criterion = Callable[[Any, Any], Tensor]


def objective(
    outputs: Tensor,
    target: Any,
    *,
    criterion: Criterion = nn.functional.cross_entropy,
    gamma: Gamma = None,
) -> Tensor:
    """Return the training objective of an ensemble's outputs.

    Args:
        outputs: ``(member, batch, …)`` as the ensemble gave them, or what was made of them by
            slicing, casting or DistributedDataParallel.
        target: passed to the criterion with each member's outputs.
        criterion: a function of ``(outputs, target)``; a vector of losses is averaged.
        gamma: gradient scale of the shared parameters: a number, a function of the number of
            members, or None for the ensemble's natural value.
    """
    scale = gradient.find_scale(outputs)
    if scale is None:
        if not outputs.requires_grad:
            return _member_losses(outputs, target, criterion).mean()
        raise ValueError(
            "these outputs don't lead back to an ensemble (they were compiled, or come from "
            "another network); call ensemble.objective(outputs, target) instead"
        )
    return _objective(scale.ensemble, scale, outputs, target, criterion, gamma)  # type: ignore[arg-type]


def objective_of(
    ensemble: EmbeddedEnsemble, outputs: Any, target: Any, criterion: Criterion, gamma: Gamma
) -> Tensor:
    """Return the objective of outputs that are known to be this ensemble's."""
    scale = gradient.find_scale(outputs) if isinstance(outputs, Tensor) else None
    if scale is None:
        scale = GradientScale(ensemble, ensemble._compiled_scale)
    return _objective(ensemble, scale, outputs, target, criterion, gamma)


def _objective(
    ensemble: EmbeddedEnsemble,
    scale: GradientScale,
    outputs: Any,
    target: Any,
    criterion: Criterion,
    gamma: Gamma,
) -> Tensor:
    factor = gradient.gradient_factor(gamma, ensemble.members, ensemble.natural_gamma)
    return gradient.combine_losses(_member_losses(outputs, target, criterion), scale, factor)


def _member_losses(outputs: Any, target: Any, criterion: Criterion) -> Tensor:
    if isinstance(outputs, Tensor):
        return torch.stack([_reduced(criterion(output, target)) for output in outputs])
    count = len(next(iter(torch.utils._pytree.tree_leaves(outputs))))
    members = (tree_map(lambda o, a=a: o[a], outputs) for a in range(count))
    return torch.stack([_reduced(criterion(output, target)) for output in members])


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
) -> Tensor:
    """Run forward and backward chunk by chunk; see ``EmbeddedEnsemble.backward``."""
    factor = gradient.gradient_factor(gamma, ensemble.members, ensemble.natural_gamma)
    chunk = ensemble._chunk_size(inputs, chunk)
    scale = GradientScale(ensemble)
    scale.value = factor
    store = ensemble._new_store("same", chunk, cut=True)
    total = 0.0
    cursor = ensemble._cursor
    with (
        torch.enable_grad(),
        execution.opened(cursor, store),
        gradient.shared_through(scale, ensemble._holders),
    ):
        stacks = [execution.CutStack(stack) for stack in ensemble._stacks()]
        for outputs in ensemble._run(stacks, inputs, kwargs, "same", chunk):
            losses = _member_losses(outputs, target, criterion).sum()
            losses.backward()
            total = total + losses.detach()
        if cursor.store is not None:
            cursor.store.backward()
        for stack in stacks:
            stack.backward()
    return total / ensemble.members
