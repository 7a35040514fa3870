r"""Geometry of the members' gradients: their directions and norms.

A step along :math:`-\sum_b g_b`, with :math:`g_b = \partial L_b / \partial w` by the shared
parameters, changes the loss of member :math:`a` by :math:`-\sum_b \langle g_a, g_b \rangle`. The
cosines between gradients therefore measure how strongly members affect each other. If members are
independent, they fall with the width as :math:`N^{-1/2}` (as :math:`N^{-1}` in the layers between
the first and the last); otherwise they stay.

*Conventions.* Layers have the names of their modules in the reference; modulations have the name of
their layer with ``.pre`` or ``.post``. Frozen parameters are left out. Each member runs as an
ensemble of one member, so memory holds one graph at a time and the ensemble itself is never
changed: no ``.grad``, no running statistics, no random state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embens.ensemble import EmbeddedEnsemble
from embens.finite.arguments import Criterion, as_classes, check_measurement
from embens.finite.values import individual_tensors, with_fixed_masks

if TYPE_CHECKING:
    from jaxtyping import Float

GRAM_ENTRIES = 2**16
"""Entries of the gradients that are converted to float64 at once."""


def gradient_cosines(
    ensemble: EmbeddedEnsemble,
    x: Any,
    target: Any,
    criterion: Criterion = F.cross_entropy,
    *,
    by_layer: bool = False,
) -> Float[Tensor, "member member"] | dict[str, Float[Tensor, "member member"]]:
    r"""Return the cosines between the members' gradients of the shared parameters.

    .. math::
        \cos_{ab} = \frac{\langle g_a, g_b \rangle}{|g_a|\,|g_b|}, \qquad
        g_a = \frac{\partial L_a}{\partial w}

    The diagonal is 1. A gradient that vanishes has the cosine 0 with all others. Separate networks
    share no parameters: the result is the identity.

    Args:
        ensemble: Any ensemble.
        x: A batch, a tuple of the reference's arguments, or a dict of them by name.
        target: Passed to the criterion with each member's outputs.
        criterion: A function of one member's outputs and the target; a vector is averaged.
        by_layer: Return the cosines of each layer's gradients instead.

    Returns:
        Signed cosines ``(member, member)``, or a dict from layer to such a tensor.

    Example:
        >>> from embens import batch_ensemble
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> x, y = torch.randn(5, 4), torch.tensor([0, 1, 1, 0, 1])
        >>> gradient_cosines(batch_ensemble(net, 3, p=1.0), x, y).round(decimals=4)
        tensor([[1., 1., 1.],
                [1., 1., 1.],
                [1., 1., 1.]])
    """
    check_measurement(ensemble, x, target, criterion)
    gradients = member_gradients(ensemble, x, as_classes(target), criterion)
    grams = shared_grams(gradients)
    dtype = _working_dtype(ensemble)
    if by_layer:
        return {layer: cosines(gram).to(dtype) for layer, gram in grams.items()}
    return cosines(total_gram(grams, ensemble.members)).to(dtype)


def gradient_norms(
    ensemble: EmbeddedEnsemble,
    x: Any,
    target: Any,
    criterion: Criterion = F.cross_entropy,
) -> GradientNorms:
    """Return the norms of the gradients of each member's loss, layer by layer.

    Args:
        ensemble: Any ensemble.
        x: A batch, a tuple of the reference's arguments, or a dict of them by name.
        target: Passed to the criterion with each member's outputs.
        criterion: A function of one member's outputs and the target; a vector is averaged.

    Returns:
        A dict from layer to the norms ``(member,)`` of the gradients of its shared parameters.

    Example:
        >>> from embens import batch_ensemble
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> norms = gradient_norms(batch_ensemble(net, 3), torch.randn(5, 4), torch.zeros(5).long())
        >>> list(norms), norms["0"].shape, list(norms.individual)
        (['0', '2'], torch.Size([3]), ['0.pre', '2.post'])
        >>> torch.allclose(norms.total**2, norms["0"] ** 2 + norms["2"] ** 2)
        True
    """
    check_measurement(ensemble, x, target, criterion)
    shared: dict[str, list[float]] = {}
    individual: dict[str, list[float]] = {}
    for member in member_gradients(ensemble, x, as_classes(target), criterion):
        for layer, gradients in member.shared.items():
            shared.setdefault(layer, []).append(joint_norm(gradients))
        for site, gradients in member.individual.items():
            individual.setdefault(site, []).append(joint_norm(gradients))
    dtype = _working_dtype(ensemble)
    return GradientNorms(
        {layer: torch.tensor(norms, dtype=dtype) for layer, norms in shared.items()},
        {site: torch.tensor(norms, dtype=dtype) for site, norms in individual.items()},
        ensemble.members,
    )


class GradientNorms(dict[str, Tensor]):
    """Norms of the members' gradients of shared parameters: a dict from layer to ``(member,)``.

    Attributes:
        individual: The same for individual parameters, by site (``"4.post"``) or layer.
        members: The number of members.

    Example:
        >>> norms = GradientNorms({"0": torch.tensor([3.0]), "2": torch.tensor([4.0])}, {}, 1)
        >>> norms.total
        tensor([5.])
    """

    def __init__(self, shared: dict[str, Tensor], individual: dict[str, Tensor], members: int):
        super().__init__(shared)
        self.individual = individual
        self.members = members

    @property
    def total(self) -> Float[Tensor, " member"]:
        """Norms of the gradients of all shared parameters together."""
        squares = torch.zeros(self.members)
        for norms in self.values():
            squares = squares + norms.square()
        return squares.sqrt()


def _working_dtype(ensemble: nn.Module) -> torch.dtype:
    """Return the dtype of an ensemble's parameters, but at least float32."""
    for parameter in ensemble.parameters():
        return torch.promote_types(parameter.dtype, torch.float32)
    return torch.float32


@dataclass(frozen=True)
class MemberGradient:
    """The loss of one member and its gradients.

    Attributes:
        loss: The loss of the member.
        shared: Gradients of the shared parameters, by layer.
        individual: Gradients of the individual parameters, by site or layer.
    """

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
    """Yield the gradients of one member after another.

    Args:
        ensemble: Any ensemble.
        x: A batch, a tuple of the reference's arguments, or a dict of them by name.
        target: Passed to the criterion with each member's outputs.
        criterion: A function of one member's outputs and the target.
        members: The number of members to run, from the first; None: all.
        generator: Seeds the random layers and fresh masks; None: torch's global generator does.
    """
    count = ensemble.members
    if members is not None:
        count = min(members, count)
    with random_state_restored(ensemble, generator):
        fixed = with_fixed_masks(ensemble)
        shared_names = shared_layer_names(fixed)
        individual_names = individual_site_names(fixed)
        for a in range(count):
            yield _gradients_of_one(
                fixed.subset([a]),
                x,
                target,
                criterion,
                shared_names,
                individual_names,
            )


def _gradients_of_one(
    single: EmbeddedEnsemble,
    x: Any,
    target: Any,
    criterion: Criterion,
    shared_names: list[str],
    individual_names: list[str],
) -> MemberGradient:
    """Return the loss and the gradients of an ensemble of one member."""
    shared = list(single.shared_parameters())
    individual = list(single.individual_parameters())
    named = list(zip(shared_names, shared, strict=True))
    boundary = len(named)
    named += zip(individual_names, individual, strict=True)
    with torch.enable_grad():
        args, kwargs = single.bind(x)
        loss = loss_of(single, single(*args, **kwargs), target, criterion)
    trainable = [parameter for _, parameter in named if parameter.requires_grad]
    gradients: Sequence[Tensor] = [torch.zeros_like(parameter) for parameter in trainable]
    if trainable and loss.requires_grad:
        gradients = torch.autograd.grad(loss, trainable, materialize_grads=True)
    remaining = iter(gradients)
    result = MemberGradient(float(loss.detach()), {}, {})
    for position, (name, parameter) in enumerate(named):
        if not parameter.requires_grad:
            continue
        part = result.shared if position < boundary else result.individual
        part.setdefault(name, []).append(next(remaining))
    return result


def loss_of(ensemble: EmbeddedEnsemble, outputs: Any, target: Any, criterion: Criterion) -> Tensor:
    """Return the sum of the members' losses.

    Args:
        ensemble: The ensemble that gave the outputs.
        outputs: ``(member, batch, ...)``, or a container of such tensors.
        target: The targets of the samples.
        criterion: A function of one member's outputs and the target; functions of torch are applied
            to the ``logits`` of a dict.
    """
    if criterion in (F.cross_entropy, F.mse_loss):
        outputs = logits_of(outputs)
    return ensemble.objective(outputs, target, criterion)


def logits_of(outputs: Any) -> Any:
    """Return ``outputs["logits"]`` of a mapping that has them; other outputs unchanged."""
    if isinstance(outputs, Mapping) and "logits" in outputs:
        return outputs["logits"]
    return outputs


def shared_layer_names(ensemble: EmbeddedEnsemble) -> list[str]:
    """Return the layer of each shared parameter, in the order of ``shared_parameters()``.

    A parameter that several layers share belongs to the first of them.
    """
    layers: dict[int, str] = {}
    for name, module in ensemble.reference.named_modules():
        for parameter in module.parameters(recurse=False):
            layers.setdefault(id(parameter), name)
    return [layers[id(parameter)] for parameter in ensemble.shared_parameters()]


def individual_site_names(ensemble: EmbeddedEnsemble) -> list[str]:
    """Return the site or layer of each parameter of ``individual_parameters()``."""
    names: dict[int, str] = {}
    for name, tensors in individual_tensors(ensemble).items():
        for tensor in tensors.values():
            names.setdefault(id(tensor), name)
    return [names[id(parameter)] for parameter in ensemble.individual_parameters()]


@contextmanager
def random_state_restored(
    ensemble: nn.Module, generator: torch.Generator | None = None
) -> Iterator[None]:
    """Restore torch's global random state on exit.

    Args:
        ensemble: The ensemble on whose devices the state is restored.
        generator: Seeds the global generator inside the context; None: the state is not changed.
    """
    devices = {parameter.device for parameter in ensemble.parameters()}
    with torch.random.fork_rng(devices=[d for d in devices if d.type == "cuda"]):
        if generator is not None:
            torch.manual_seed(int(torch.randint(2**62, (), generator=generator)))
        yield


def joint_norm(gradients: Iterable[Tensor]) -> float:
    """Return the norm of several tensors as one vector."""
    total = 0.0
    for gradient in gradients:
        total += float(gradient.double().square().sum())
    return math.sqrt(total)


def shared_grams(
    members: Iterable[MemberGradient],
) -> dict[str, Float[Tensor, "member member"]]:
    """Return the scalar products of the members' shared gradients, layer by layer, in float64."""
    vectors: dict[str, list[Tensor]] = {}
    for member in members:
        for layer, gradients in member.shared.items():
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            vectors.setdefault(layer, []).append(flat)
    return {layer: vector_gram(rows) for layer, rows in vectors.items()}


def vector_gram(vectors: Sequence[Tensor]) -> Tensor:
    """Return the scalar products of vectors, in float64; some entries at a time."""
    gram = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
    chunks = [vector.split(GRAM_ENTRIES) for vector in vectors]
    for parts in zip(*chunks, strict=True):
        block = torch.stack([part.double().cpu() for part in parts])
        gram += block @ block.T
    return gram


def total_gram(grams: Mapping[str, Tensor], members: int) -> Tensor:
    """Return the sum over layers, zero if there are none."""
    return sum(grams.values(), torch.zeros(members, members, dtype=torch.float64))


def cosines(gram: Float[Tensor, "member member"]) -> Float[Tensor, "member member"]:
    """Return the cosines that belong to a Gram matrix; see :func:`gradient_cosines`."""
    norms = gram.diagonal().clamp(min=0).sqrt()
    scale = torch.where(norms > 0, 1 / norms, 0.0)
    return (gram * scale * scale[:, None]).clamp(-1, 1).fill_diagonal_(1.0)


def off_diagonal(matrix: Tensor) -> Tensor:
    """Return the entries between different members, ``(member, member - 1, ...)``."""
    count = len(matrix)
    if count < 2:
        raise ValueError(f"a pair of members needs at least two members, got {count}.")
    return matrix[~torch.eye(count, dtype=torch.bool)].reshape(count, count - 1)


def jackknife_error(estimates: Tensor) -> float:
    """Return the standard error of an estimate.

    Args:
        estimates: The estimates that leave out one part of the data each, ``(part,)``.
    """
    return math.sqrt(len(estimates) - 1) * float(estimates.std(correction=0))


def pair_error(matrix: Tensor) -> float:
    """Return the jackknife error of the mean over pairs of members; NaN for fewer than three.

    Args:
        matrix: Symmetric, ``(member, member)``.
    """
    count = len(matrix)
    if count < 3:
        return math.nan
    total = matrix.sum() - matrix.trace()
    of_member = matrix.sum(0) - matrix.diagonal()
    return jackknife_error((total - 2 * of_member) / ((count - 1) * (count - 2)))
