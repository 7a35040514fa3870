"""Gradients of the objective with the memory of one chunk of members."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from embens import optim
from embens.graph.members import FoldedPass

if TYPE_CHECKING:
    from embens.ensemble.module import EmbeddedEnsemble


def backward(
    ensemble: "EmbeddedEnsemble",
    *inputs_and_target: Any,
    criterion: optim.Criterion | None = None,
    chunk: int = 1,
    **kwargs: Any,
) -> Tensor:
    """Run forward and backward chunk by chunk and accumulate the objective's gradients.

    Gradients are those of ``self.objective(self(x), target).backward()``; the memory is that of one
    chunk. Values that members share are computed and backpropagated once.

    Args:
        ensemble: The ensemble.
        *inputs_and_target: The reference's inputs, then the target. Several inputs may also be
            passed as one tuple or dictionary, as for :func:`embens.fit`.
        criterion: See :func:`embens.objective`.
        chunk: Number of members at a time.
        **kwargs: Keyword arguments of the reference.

    Returns:
        The objective, detached.

    Example:
        >>> from torch import nn
        >>> from embens import batch_ensemble
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> ensemble = batch_ensemble(net, members=4)
        >>> loss = ensemble.backward(torch.zeros(5, 4), torch.zeros(5, dtype=torch.int64))
        >>> loss.requires_grad, ensemble.reference[0].weight.grad.shape
        (False, torch.Size([8, 4]))
    """
    *inputs, target = inputs_and_target
    args, named = ensemble.bind(inputs[0] if len(inputs) == 1 else inputs)
    return _accumulate(ensemble, args, {**named, **kwargs}, target, criterion, chunk)


def _accumulate(
    ensemble: "EmbeddedEnsemble",
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Any,
    criterion: optim.Criterion | None,
    chunk: int,
) -> Tensor:
    """Accumulate the gradients for bound arguments; return the objective, detached."""
    total: Any = 0.0
    with torch.enable_grad():
        folded, arguments = ensemble.foldings.find(inputs, kwargs)
        values = ensemble.sample_values()
        if folded is None:
            modules = ensemble.reference.modules()
            is_parametrized = any(parametrize.is_parametrized(module) for module in modules)
            for outputs in ensemble.merged.run_members(inputs, kwargs, values):
                loss = optim.objective(outputs, target, criterion)
                # Members share the graph of parametrized weights.
                loss.backward(retain_graph=is_parametrized)
                total = total + loss.detach()
            return total
        folded_pass = FoldedPass(folded, arguments, values, ensemble.members)
        # Shared values are detached, so that every chunk can be backpropagated alone.
        shared = folded_pass.shared
        leaves = [_detached_leaf(value) for value in shared]
        folded_pass.shared = leaves
        for start, count in ensemble.chunks(folded, arguments, chunk):
            loss = optim.objective(folded_pass.run(start, count), target, criterion)
            loss.backward()
            total = total + loss.detach()
            del loss
        _backpropagate_shared(shared, leaves)
    return total


def _detached_leaf(value: Any) -> Any:
    if isinstance(value, Tensor) and value.requires_grad:
        return value.detach().requires_grad_()
    return value


def _backpropagate_shared(shared: Any, leaves: list[Any]) -> None:
    """Backpropagate the gradients that the chunks left at the detached shared values."""
    outputs, gradients = [], []
    for value, leaf in zip(shared, leaves, strict=True):
        if isinstance(leaf, Tensor) and leaf.grad is not None and value.requires_grad:
            outputs.append(value)
            gradients.append(leaf.grad)
    if outputs:
        torch.autograd.backward(outputs, gradients)
