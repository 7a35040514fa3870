"""Single members of an ensemble: the gradient of each one's loss, one after another.

*Conventions.* A layer has the name that its module has in the reference; a modulation that of its
layer with ``.pre`` or ``.post``. Members are run one after another, so that memory holds the graph
of one; what members share is run once. Nothing of the ensemble is changed: no ``.grad``, no
running statistics, no random state. Parameters with ``requires_grad=False`` are left out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from embens.ensemble import EmbeddedEnsemble
from embens.ensemble.plain import walk
from embens.objective import Criterion


@dataclass(frozen=True)
class MemberGradient:
    """One member's loss and its gradients: layer (or site) to the tensors that it has there."""

    loss: float
    outputs: Any
    shared: dict[str, list[Tensor]]
    individual: dict[str, list[Tensor]]


def member_gradients(
    ensemble: EmbeddedEnsemble,
    x: Any,
    target: Any,
    criterion: Criterion,
    *,
    members: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[MemberGradient]:
    """Yield the gradients of one member after another, or of the first ``members`` alone.

    The generator seeds what the network draws itself (fresh masks, Dropout); without one it is as
    the global random state has it. Other arguments as in :func:`embens.finite.gradient_cosines`.
    """
    layers = shared_layers(ensemble)
    parameters = [p for found in layers.values() for p in found]
    inputs = x if isinstance(x, tuple) else (x,)
    with unchanged(ensemble, generator), ensemble.run(inputs, chunk=1) as run:
        stacks = {id(stack): stack for stack in run.numbers}  # tied ones once
        sites = {id(stack): name for stack, name in zip(run.numbers, run.names, strict=True)}
        for a in range(min(members or ensemble.members, ensemble.members)):
            own = {k: s[a].detach().requires_grad_(s.requires_grad) for k, s in stacks.items()}
            with torch.enable_grad():
                outputs = run.member(a, numbers=[own[id(stack)] for stack in run.numbers])
                loss = member_loss(criterion, outputs, target)
            trained = {key: leaf for key, leaf in own.items() if leaf.requires_grad}
            found = iter(_gradients(loss, [*parameters, *trained.values()]))
            shared = {layer: [next(found) for _ in ps] for layer, ps in layers.items()}
            individual: dict[str, list[Tensor]] = defaultdict(list)
            for key, gradient in zip(trained, found, strict=True):
                individual[site_of(ensemble, sites[key])].append(gradient)
            outputs = tree_map(lambda o: o.detach(), outputs)
            yield MemberGradient(float(loss.detach()), outputs, shared, dict(individual))


def member_loss(criterion: Criterion, outputs: Any, target: Any) -> Tensor:
    """Return one member's loss; a vector of losses is averaged."""
    loss = criterion(outputs, target)
    if not isinstance(loss, Tensor):
        raise TypeError(
            "criterion: expected a tensor, one member's loss or a vector of losses; got "
            f"{type(loss).__name__}. Return the loss alone."
        )
    return loss.mean() if loss.dim() else loss


def _gradients(loss: Tensor, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
    if not parameters or not loss.requires_grad:
        return [torch.zeros_like(p) for p in parameters]
    return torch.autograd.grad(
        loss, parameters, retain_graph=True, allow_unused=True, materialize_grads=True
    )


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


def shared_layers(ensemble: EmbeddedEnsemble) -> dict[str, list[nn.Parameter]]:
    """Return the trainable shared parameters by the layer that holds them, each once."""
    left = {id(p): p for p in ensemble.shared_parameters() if p.requires_grad}
    layers: dict[str, list[nn.Parameter]] = {}
    for name, module in walk(ensemble.network):
        for parameter in module.parameters(recurse=False):
            if left.pop(id(parameter), None) is not None:
                layers.setdefault(name, []).append(parameter)
    return layers


def site_of(ensemble: EmbeddedEnsemble, name: str) -> str:
    """Return the site or layer that one of a pass's numbers belongs to."""
    return name if name in ensemble.individuals else name.rpartition(".")[0]


def flat(gradients: Sequence[Tensor]) -> Tensor:
    """Return some tensors as one vector."""
    return torch.cat([g.flatten() for g in gradients]) if gradients else torch.zeros(0)


def norm_of(gradients: Sequence[Tensor]) -> float:
    """Return the norm of some tensors as one vector."""
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
