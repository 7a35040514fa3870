r"""Gradients of single members: how they point, and how long they are.

A step along :math:`-\sum_b g_b`, with :math:`g_b = \partial L_b / \partial w` by the shared
parameters, changes the loss of member :math:`a` by :math:`-\sum_b \langle g_a, g_b \rangle`. So
the cosines say how strongly members pull on each other: they fall with the width as
:math:`N^{-1/2}` where members are independent (layers in the middle as :math:`N^{-1}`, which the
paper has for all), and stay where they are not.

*Conventions.* A layer has the name that its module has in the reference; a modulation that of its
layer with ``.pre`` or ``.post``. Members are run one after another, so that memory holds the graph
of one; what they share is run once. Nothing of the ensemble is changed: no ``.grad``, no running
statistics, no random state. Parameters with ``requires_grad=False`` are left out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from embens.ensemble import EmbeddedEnsemble
from embens.ensemble.wrapping import walk
from embens.finite.checks import as_classes, at_test, check_call
from embens.objective import Criterion, logits_of, member_losses

if TYPE_CHECKING:
    from jaxtyping import Float


def gradient_cosines(
    ensemble: EmbeddedEnsemble,
    x: Any,
    target: Any,
    criterion: Criterion = nn.functional.cross_entropy,
    *,
    by_layer: bool = False,
) -> Float[Tensor, "member member"] | dict[str, Float[Tensor, "member member"]]:
    r"""Return the cosines between the members' gradients of the shared parameters.

    .. math::
        \cos_{ab} = \frac{\langle g_a, g_b \rangle}{|g_a|\,|g_b|}, \qquad
        g_a = \frac{\partial L_a}{\partial w}

    A gradient that vanishes has the cosine 0 with all others; the diagonal is 1.

    Separate networks share nothing: the identity. A network with an input for each member (mimo) is
    taken as it is at test, where all have the same one.

    Args:
        ensemble: of any family.
        x: a batch, a tuple of the reference's arguments, or a dict of them by name.
        target: passed to the criterion with each member's outputs.
        criterion: a function of one member's outputs and the target; a vector is averaged.
        by_layer: return a dict from layer to the cosines of that layer's gradients alone.

    Example:
        >>> from embens import batch_ensemble
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> x, y = torch.randn(5, 4), torch.tensor([0, 1, 1, 0, 1])
        >>> gradient_cosines(batch_ensemble(net, 3, p=1.0), x, y).round(decimals=4)
        tensor([[1., 1., 1.],
                [1., 1., 1.],
                [1., 1., 1.]])
    """
    ensemble = at_test(ensemble)
    check_call(ensemble, x, target, criterion)
    grams = shared_grams(member_gradients(ensemble, x, as_classes(target), criterion))
    dtype = _working_dtype(ensemble)
    if by_layer:
        return {layer: cosines(gram).to(dtype) for layer, gram in grams.items()}
    return cosines(total_gram(grams, ensemble.members)).to(dtype)


def gradient_norms(
    ensemble: EmbeddedEnsemble,
    x: Any,
    target: Any,
    criterion: Criterion = nn.functional.cross_entropy,
) -> GradientNorms:
    """Return the norms of the gradients of each member's loss, layer by layer.

    Arguments as in :func:`gradient_cosines`.

    Example:
        >>> from embens import batch_ensemble
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> norms = gradient_norms(batch_ensemble(net, 3), torch.randn(5, 4), torch.zeros(5).long())
        >>> list(norms), norms["0"].shape, list(norms.individual)
        (['0', '2'], torch.Size([3]), ['0.pre', '2.post'])
        >>> torch.allclose(norms.total**2, norms["0"] ** 2 + norms["2"] ** 2)
        True
    """
    ensemble = at_test(ensemble)
    check_call(ensemble, x, target, criterion)
    shared: dict[str, list[float]] = defaultdict(list)
    individual: dict[str, list[float]] = defaultdict(list)
    for member in member_gradients(ensemble, x, as_classes(target), criterion):
        for found, norms in ((member.shared, shared), (member.individual, individual)):
            for layer, gradients in found.items():
                norms[layer].append(norm_of(gradients))
    dtype = _working_dtype(ensemble)
    joined, own = (
        {k: torch.tensor(v, dtype=dtype) for k, v in norms.items()}
        for norms in (shared, individual)
    )
    return GradientNorms(joined, own, ensemble.members)


class GradientNorms(dict[str, Tensor]):
    """Norms of the members' gradients of shared parameters: a dict from layer to ``(member,)``.

    ``individual`` is the same for modulations, by site (``"4.post"``).
    """

    def __init__(self, shared: dict[str, Tensor], individual: dict[str, Tensor], members: int):
        super().__init__(shared)
        self.individual, self.members = individual, members

    @property
    def total(self) -> Float[Tensor, " member"]:
        """Norm of the gradient of all shared parameters together."""
        return sum((n.square() for n in self.values()), torch.zeros(self.members)).sqrt()


def _working_dtype(ensemble: nn.Module) -> torch.dtype:
    """Return the dtype of an ensemble's parameters, or float32 where they have less."""
    parameter = next(ensemble.parameters(), torch.zeros(()))
    return torch.promote_types(parameter.dtype, torch.float32)


@dataclass(frozen=True)
class MemberGradient:
    """One member's loss and its gradients: layer (or site) to the tensors that it has there."""

    loss: float
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
    """Yield the gradients of one member after another; the generator seeds what a network draws."""
    layers = shared_layers(ensemble)
    parameters = [p for found in layers.values() for p in found]
    with unchanged(ensemble, generator), ensemble.run(*ensemble.bind(x), chunk=1) as run:
        stacks = {id(stack): stack for stack in run.numbers}  # tied ones once
        names = {id(stack): name for stack, name in zip(run.numbers, run.names, strict=True)}
        for a in range(min(members or ensemble.members, ensemble.members)):
            own = {k: s[a].detach().requires_grad_(s.requires_grad) for k, s in stacks.items()}
            with torch.enable_grad():
                outputs = run.member(a, numbers=[own[id(stack)] for stack in run.numbers])
                (loss,) = losses_of(tree_map(lambda o: o[None], outputs), target, criterion)
            trained = {key: leaf for key, leaf in own.items() if leaf.requires_grad}
            leaves = [*parameters, *trained.values()]
            found = map(torch.zeros_like, leaves)
            if leaves and loss.requires_grad:
                found = iter(
                    torch.autograd.grad(loss, leaves, retain_graph=True, materialize_grads=True)
                )
            shared = {layer: [next(found) for _ in ps] for layer, ps in layers.items()}
            individual: dict[str, list[Tensor]] = defaultdict(list)
            for key, gradient in zip(trained, found, strict=True):
                name = names[key]  # of a site, or of a parameter that members have of their own
                site = name if name in ensemble.individuals else name.rpartition(".")[0]
                individual[site].append(gradient)
            yield MemberGradient(float(loss.detach()), shared, dict(individual))


def losses_of(outputs: Any, target: Any, criterion: Criterion) -> Tensor:
    """Return the members' losses; torch's own are those of the logits among the outputs."""
    plain = criterion in (nn.functional.cross_entropy, nn.functional.mse_loss)
    return member_losses(logits_of(outputs) if plain else outputs, target, criterion)


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


def norm_of(gradients: Sequence[Tensor]) -> float:
    """Return the norm of some tensors as one vector."""
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradients))


def shared_grams(
    members: Iterable[MemberGradient],
) -> dict[str, Float[Tensor, "member member"]]:
    """Return the inner products of the members' shared gradients, layer by layer, in float64."""
    rows: dict[str, list[Tensor]] = defaultdict(list)
    for member in members:
        for layer, gradients in member.shared.items():
            rows[layer].append(torch.cat([g.flatten() for g in gradients]))
    return {layer: gram_of(vectors) for layer, vectors in rows.items()}


def gram_of(vectors: Sequence[Tensor]) -> Tensor:
    """Return the inner products of vectors, in float64; a part of their entries at a time."""
    gram = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
    for parts in zip(*(v.split(2**16) for v in vectors), strict=True):
        block = torch.stack([p.double().cpu() for p in parts])
        gram += block @ block.T
    return gram


def total_gram(grams: Mapping[str, Tensor], members: int) -> Tensor:
    """Return the sum over layers."""
    return sum(grams.values(), torch.zeros(members, members, dtype=torch.float64))


def cosines(gram: Float[Tensor, "member member"]) -> Float[Tensor, "member member"]:
    """Return the cosines that belong to a Gram matrix; see :func:`gradient_cosines`."""
    norms = gram.diagonal().clamp(min=0).sqrt()
    scale = torch.where(norms > 0, 1 / norms, 0.0)
    return (gram * scale * scale[:, None]).clamp(-1, 1).fill_diagonal_(1.0)


def off_diagonal(matrix: Tensor) -> Tensor:
    """Return the entries between different members, ``(member, member - 1)``."""
    count = len(matrix)
    if count < 2:
        raise ValueError(f"a pair of members needs at least two of them; got {count}")
    return matrix[~torch.eye(count, dtype=torch.bool)].reshape(count, count - 1)


def jackknife_error(without: Tensor) -> float:
    """Return the standard error of an estimate, from the estimates that leave out one part each."""
    return math.sqrt(len(without) - 1) * float(without.std(correction=0))


def pair_error(matrix: Tensor) -> float:
    """Return the jackknife's error of a mean over pairs of members; NaN for fewer than three."""
    count = len(matrix)
    if count < 3:
        return math.nan
    total = matrix.sum() - matrix.trace()
    of_member = matrix.sum(0) - matrix.diagonal()
    return jackknife_error((total - 2 * of_member) / ((count - 1) * (count - 2)))
