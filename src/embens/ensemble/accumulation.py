"""Gradients of the objective with the memory of one chunk of members."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from embens import optim
from embens.graph.members import FoldedPass

if TYPE_CHECKING:
    from embens.ensemble.module import EmbeddedEnsemble


def accumulate_gradients(
    ensemble: "EmbeddedEnsemble",
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Any,
    criterion: optim.Criterion | None,
    chunk: int,
) -> Tensor:
    """Run forward and backward for one chunk of members after another.

    Args:
        ensemble: The ensemble, whose gradients are accumulated.
        inputs: Positional arguments of the reference.
        kwargs: Its keyword arguments.
        target: Target of every member.
        criterion: See :func:`embens.objective`.
        chunk: Number of members at a time.

    Returns:
        The objective, detached.
    """
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
