"""Single members of an ensemble: the gradient of each one's loss, one after another.

*Conventions.* A layer has the name that its module has in the reference; a modulation that of its
layer with ``.pre`` or ``.post``. Members are run one after another, so that memory holds the graph
of one; what members share is run once. Nothing of the ensemble is changed: no ``.grad``, no
running statistics, no random state. Parameters with ``requires_grad=False`` are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from embens.ensemble import EmbeddedEnsemble
from embens.ensemble import run as execution
from embens.ensemble.layers import Individual, Modulation
from embens.ensemble.plain import walk

Criterion = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class MemberGradient:
    """One member's loss and its gradients: layer (or site) to the tensors that it has there."""

    member: int
    loss: float
    outputs: Tensor
    shared: dict[str, list[Tensor]]
    individual: dict[str, list[Tensor]]


def for_each_member(
    ensemble: EmbeddedEnsemble,
    x: Any,
    target: Any,
    criterion: Criterion,
    visit: Callable[[MemberGradient], Any],
    *,
    members: int | None = None,
    generator: torch.Generator | None = None,
) -> None:
    """Call ``visit`` with the gradients of one member after another.

    Args:
        ensemble: see :func:`embens.finite.gradient_cosines`, as for x, target and criterion.
        x: the batch.
        target: what the criterion takes.
        criterion: of one member.
        visit: what to do; it returns True to stop.
        members: only so many, the first ones; None: all.
        generator: seeds what the network draws itself (fresh masks, Dropout); None: as the global
            random state has it, which is put back.
    """
    inputs = x if isinstance(x, tuple) else (x,)
    layers = shared_layers(ensemble)
    parameters = [p for found in layers.values() for p in found]
    count = ensemble.members if members is None else min(members, ensemble.members)
    store = ensemble._new_store("same", 1)
    with (
        unchanged(ensemble, generator),
        torch.enable_grad(),
        execution.Pass(ensemble._cursor, store),
    ):
        individuals = [
            (name, module, _MemberLeaves(stack))
            for name, module in individual_modules(ensemble)
            for stack in module.stacks()
        ]
        leaves = [leaf for _, _, leaf in individuals]
        for a in range(count):
            outputs = ensemble._run_each(leaves, range(a, a + 1), inputs, {}, "same")
            outputs = tree_map(lambda o: o[0], outputs)
            loss = criterion(outputs, target)
            if not isinstance(loss, Tensor):
                raise TypeError(
                    "criterion: expected a tensor, one member's loss or a vector of losses; got "
                    f"{type(loss).__name__}. Return the loss alone."
                )
            loss = loss.mean() if loss.dim() else loss
            mine = [leaf.current for leaf in leaves if leaf.current.requires_grad]
            found = _gradients(loss, [*parameters, *mine])
            shared_part, own = found[: len(parameters)], iter(found[len(parameters) :])
            pieces = iter(shared_part)
            shared = {layer: [next(pieces) for _ in ps] for layer, ps in layers.items()}
            individual: dict[str, list[Tensor]] = {}
            for name, module, leaf in individuals:
                if leaf.current.requires_grad:
                    gradient = _of_parameter(module, next(own))
                    individual.setdefault(name, []).append(gradient)
            outputs = tree_map(lambda o: o.detach(), outputs)
            value = MemberGradient(a, float(loss.detach()), outputs, shared, individual)
            del outputs, loss, found, shared_part
            if visit(value) is True:
                return


def _gradients(loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    if not parameters or not loss.requires_grad:
        return [torch.zeros_like(p) for p in parameters]
    return list(
        torch.autograd.grad(
            loss, parameters, retain_graph=True, allow_unused=True, materialize_grads=True
        )
    )


class _MemberLeaves:
    """A stack that gives out one member at a time as a leaf of its own."""

    def __init__(self, stack: Tensor):
        self.stack = stack
        self.current = stack

    def __getitem__(self, member: int) -> Tensor:
        self.current = self.stack[member]
        if self.stack.requires_grad:
            self.current = self.current.detach().requires_grad_()
        return self.current


def _of_parameter(module: Individual, gradient: Tensor) -> Tensor:
    """Return the gradient of a member's own numbers from that of what multiplies its features."""
    if isinstance(module, Modulation):
        return gradient.reshape(module.size, module.repeat).sum(1)
    return gradient


@contextmanager
def unchanged(ensemble: nn.Module, generator: torch.Generator | None = None) -> Iterator[None]:
    """Put buffers (running statistics) and the global random state back at the end."""
    buffers = [(b, b.detach().clone()) for b in ensemble.buffers()]
    devices = {b.device for b in (*ensemble.parameters(), *ensemble.buffers())}
    with torch.random.fork_rng(devices=[d for d in devices if d.type == "cuda"]):
        if generator is not None:
            torch.manual_seed(int(torch.randint(2**62, (), generator=generator)))
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    if not torch.equal(buffer, before):  # else graphs that hold it stay valid
                        buffer.copy_(before)


def individual_modules(ensemble: EmbeddedEnsemble) -> list[tuple[str, Individual]]:
    """Return the modules with numbers for each member, in the order of the ensemble's stacks."""
    names = {id(module): name for name, module in walk(ensemble.network)}
    return [(names[id(module)], module) for module in ensemble._individuals]


def shared_layers(ensemble: EmbeddedEnsemble) -> dict[str, list[nn.Parameter]]:
    """Return the trainable shared parameters by the layer that holds them, each once."""
    left = {id(p): p for p in ensemble.shared_parameters() if p.requires_grad}
    layers: dict[str, list[nn.Parameter]] = {}
    for name, module in walk(ensemble.network):
        for parameter in module.parameters(recurse=False):
            if left.pop(id(parameter), None) is not None:
                layers.setdefault(name, []).append(parameter)
    return layers


def norm_of(gradients: Sequence[Tensor]) -> float:
    """Return the norm of some tensors as one vector."""
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
