r"""The measurements of a diagnosis: gradients of members, and the largest stable learning rate.

A :class:`Budget` counts samples, members and bytes, never seconds, so a diagnosis depends on its
arguments alone. A step of gradient descent with the learning rate :math:`\eta` is stable if

.. math::
    \eta < \frac{2}{\lambda_{\max}(\Theta H)}, \qquad
    \Theta_{ab} = \frac{\gamma}{M} \Theta^{com}_{ab} + \delta_{ab} \Theta^{ind}_a ,

with the second derivative :math:`H` of the members' losses by their outputs, on a few samples and
at the current weights. This is a first guess for a sweep. Momentum :math:`\beta` allows
:math:`1+\beta` times as much.
"""

import copy
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map

from embens import theory
from embens.checks import check_number, check_whole
from embens.ensemble import EmbeddedEnsemble
from embens.finite import geometry
from embens.finite.arguments import Criterion
from embens.finite.diagnosis import Rates
from embens.finite.values import with_fixed_masks

RATE_SAMPLES = 12
"""Samples for the largest stable learning rate."""

TRIAL_SAMPLES = 16
"""Samples on which the memory of a pass is measured."""

LIMIT_SAMPLES = ((1, 12), (256, 2), (1024, 1))
"""Pixels of an input, and the number of samples of up to that size for the limit's kernels."""

POWER_ITERATIONS = 20


@dataclass(frozen=True)
class Budget:
    """Limits on the work of a diagnosis.

    Args:
        samples: The largest number of samples to measure gradients on.
        members: The largest number of members.
        memory: The largest memory in bytes, besides the ensemble itself.
        generator: Draws samples and fresh masks; None: the same ones every time.

    Example:
        >>> Budget(samples=64, members=4).samples
        64
    """

    samples: int = 256
    members: int = 16
    memory: float = 1e9
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        check_whole("samples", self.samples)
        check_whole("members", self.members)
        check_number("memory", self.memory, "a number of bytes", lambda number: number >= 1)


@dataclass(frozen=True)
class Measurement:
    """Gradients of some members on some samples.

    Attributes:
        x: The inputs that were used.
        target: The targets that were used.
        samples: The number of samples that were used.
        losses: The loss of each member, ``(member,)``.
        individual_norms: Norms of the gradients of individual parameters, ``(member,)``.
        grams: Scalar products of the members' shared gradients, by layer.
        bias_part: The mean part of given biases in the cosine of two members' gradients.
        notes: Parts that were left out, with the reason.
    """

    x: Any
    target: Any
    samples: int
    losses: Tensor
    individual_norms: Tensor
    grams: dict[str, Tensor]
    bias_part: float
    notes: list[str] = field(default_factory=list)

    @property
    def gram(self) -> Tensor:
        """Scalar products of the gradients of all shared parameters, ``(member, member)``."""
        return geometry.total_gram(self.grams, len(self.losses))


def measure(
    ensemble: EmbeddedEnsemble,
    x: Any,
    target: Any,
    criterion: Criterion,
    biases: Collection[Tensor],
    budget: Budget,
) -> Measurement:
    """Measure the gradients of some members on some samples.

    Args:
        ensemble: Any ensemble.
        x: Inputs as for :func:`embens.diagnose`.
        target: The targets of the samples.
        criterion: A function of one member's outputs and the target.
        biases: Shared parameters; their part in the gradients is measured separately.
        budget: Limits samples and members.

    Returns:
        The gradients of the measured members.
    """
    allowed = min(ensemble.members, budget.members)
    members = min(allowed, _members_in_memory(ensemble, budget))
    chosen = _choose_samples(ensemble, x, target, criterion, budget)
    x, target, samples = chosen.x, chosen.target, chosen.count
    notes = []
    if not chosen.can_be_split:
        notes.append("all samples were used, because x and target have different lengths")
    if members < allowed or chosen.is_limited:
        notes.append(f"the budget allowed {members} members and {samples} samples")
    gradients = list(
        geometry.member_gradients(
            ensemble,
            x,
            target,
            criterion,
            members=members,
            generator=budget.generator,
        )
    )
    grams = geometry.shared_grams(gradients)
    individual_norms = [_individual_norm(member) for member in gradients]
    return Measurement(
        x=x,
        target=target,
        samples=samples,
        losses=torch.tensor([member.loss for member in gradients]),
        individual_norms=torch.tensor(individual_norms),
        grams=grams,
        bias_part=_bias_part(ensemble, gradients, grams, biases),
        notes=notes,
    )


@dataclass(frozen=True)
class _ChosenSamples:
    """Samples that fit into the budget.

    Attributes:
        x: The inputs.
        target: The targets.
        count: The number of samples.
        can_be_split: False if x and target have different lengths, so that all samples are used.
        is_limited: True if the memory allows fewer samples than requested.
    """

    x: Any
    target: Any
    count: int
    can_be_split: bool
    is_limited: bool


def _choose_samples(
    ensemble: EmbeddedEnsemble, x: Any, target: Any, criterion: Criterion, budget: Budget
) -> _ChosenSamples:
    """Choose random samples; a trial on a few of them shows how many fit into the memory."""
    tensors = [leaf for leaf in tree_leaves((x, target)) if isinstance(leaf, Tensor)]
    lengths = {len(tensor) for tensor in tensors}
    count = max(lengths, default=1)
    if len(lengths) != 1:
        return _ChosenSamples(x, target, count, can_be_split=False, is_limited=False)
    order = torch.randperm(count, generator=budget.generator)
    trial = order[:TRIAL_SAMPLES]
    trial_bytes = activation_bytes(ensemble, take(x, trial), take(target, trial), criterion)
    room = max(2, int(budget.memory / 2 * len(trial) / max(1, trial_bytes)))
    requested = min(count, budget.samples)
    count = min(requested, room)
    return _ChosenSamples(
        x=take(x, order[:count]),
        target=take(target, order[:count]),
        count=count,
        can_be_split=True,
        is_limited=room < requested,
    )


def _individual_norm(member: geometry.MemberGradient) -> float:
    """Return the norm of the gradient of all individual parameters of a member."""
    parts = []
    for gradients_of_site in member.individual.values():
        parts += gradients_of_site
    return geometry.joint_norm(parts)


def _members_in_memory(ensemble: EmbeddedEnsemble, budget: Budget) -> int:
    """Return how many members' gradients fit into half of the memory, at least two."""
    weights = sum(p.numel() * p.element_size() for p in ensemble.shared_parameters())
    return max(2, int(budget.memory / 2 / max(1, weights)))


def _bias_part(
    ensemble: EmbeddedEnsemble,
    gradients: list[geometry.MemberGradient],
    grams: Mapping[str, Tensor],
    biases: Collection[Tensor],
) -> float:
    """Return the mean part of some biases in the cosine of two members' gradients."""
    if not biases or len(gradients) < 2:
        return 0.0
    bias_ids = {id(bias) for bias in biases}
    names = geometry.shared_layer_names(ensemble)
    vectors: list[list[Tensor]] = [[] for _ in gradients]
    positions: dict[str, int] = {}  # of the next trainable parameter within its layer
    for name, parameter in zip(names, ensemble.shared_parameters(), strict=True):
        if not parameter.requires_grad:
            continue
        position = positions.get(name, 0)
        positions[name] = position + 1
        if id(parameter) in bias_ids:
            for vector, member in zip(vectors, gradients, strict=True):
                vector.append(member.shared[name][position].flatten())
    total = geometry.total_gram(grams, len(gradients))
    norms = total.diagonal().sqrt().clamp(min=1e-300)
    products = geometry.vector_gram([torch.cat(parts) for parts in vectors])
    return float(geometry.off_diagonal(products / norms / norms[:, None]).mean())


def few_samples(x: Any) -> Tensor | None:
    """Return few enough samples for the limit's kernels; None if even one takes too long."""
    if not isinstance(x, Tensor) or x.is_complex() or x.dim() not in (2, 3, 4):
        return None
    if not x.is_floating_point():
        pixels = x[0].numel()  # tokens (n, token)
    elif x.dim() == 3:
        pixels = max(x.shape[1:])  # (n, token, feature) or (n, channel, pixel)
    else:
        pixels = x[0, 0].numel()
    for most_pixels, count in LIMIT_SAMPLES:
        if pixels <= most_pixels:
            return x[:count].detach().double()
    return None


def effective_widths(ensemble: EmbeddedEnsemble, x: Any) -> list[float]:
    """Return the effective width of a member and that of the reference; empty if unknown.

    Args:
        ensemble: Any ensemble.
        x: Inputs as for :func:`embens.diagnose`.
    """
    samples = few_samples(x)
    if samples is None or ensemble.spec.separate:
        return []
    try:
        of_member = theory.effective_width(ensemble, samples)
        of_reference = theory.effective_width(ensemble.reference, samples)
        return [of_member, of_reference]
    except (TypeError, ValueError, RuntimeError):
        return []


def take(values: Any, rows: Tensor) -> Any:
    """Return some rows of all tensors in a container."""
    if isinstance(values, Mapping):
        values = dict(values)

    def take_rows(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() > 0:
            return value[rows.to(value.device)]
        return value

    return tree_map(take_rows, values)


def activation_bytes(ensemble: EmbeddedEnsemble, x: Any, target: Any, criterion: Criterion) -> int:
    """Return the memory that the graph of one member keeps, besides its weights."""
    with geometry.random_state_restored(ensemble), torch.enable_grad():
        single = with_fixed_masks(ensemble).subset([0])
        args, kwargs = single.bind(x)
        with saved_bytes(single) as bytes_by_storage:
            geometry.loss_of(single, single(*args, **kwargs), target, criterion)
    return sum(bytes_by_storage.values())


@contextmanager
def saved_bytes(ensemble: EmbeddedEnsemble) -> Iterator[dict[int, int]]:
    """Count the bytes that graphs keep for their backward passes, by storage.

    Args:
        ensemble: Its weights are not counted.
    """
    weights = {t.untyped_storage().data_ptr() for t in ensemble.state_dict().values()}
    bytes_by_storage: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            bytes_by_storage[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield bytes_by_storage


def suggest_rates(
    ensemble: EmbeddedEnsemble,
    measurement: Measurement,
    criterion: Criterion,
    gamma: float,
    generator: torch.Generator | None = None,
) -> Rates:
    """Return learning rates, as far as they can be determined.

    Args:
        ensemble: Any ensemble; it is not changed.
        measurement: The gradients of its members. A note is added if there is no stable rate.
        criterion: A function of one member's outputs and the target.
        gamma: The gradient scale for which the rate is stable.
        generator: Seeds random layers and fresh masks.
    """
    shared = float(measurement.gram.trace())
    individual = float(measurement.individual_norms.square().sum())
    factor = None
    if ensemble.spec.sites and shared > 0 and individual > 0:
        factor = math.sqrt(shared / individual)
    rows = torch.arange(min(RATE_SAMPLES, measurement.samples))
    x = take(measurement.x, rows)
    target = take(measurement.target, rows)
    try:
        with geometry.random_state_restored(ensemble, generator):
            # A copy, because a pass may update running statistics.
            largest = sharpness(copy.deepcopy(ensemble), x, target, criterion, gamma)
    except (TypeError, ValueError, RuntimeError) as error:
        measurement.notes.append(f"no stable rate: {str(error).splitlines()[0]}")
        return Rates(None, factor)
    return Rates(2 / largest if largest > 0 else math.inf, factor)


def sharpness(
    ensemble: EmbeddedEnsemble,
    x: Any,
    target: Any,
    criterion: Criterion,
    gamma: float,
) -> float:
    r"""Return :math:`\lambda_{\max}(\Theta H)` by power iterations.

    With the Jacobian :math:`J` of the outputs and the rates :math:`D` of the parameters,
    :math:`\Theta = J D J^\top`. All three factors are applied by automatic differentiation.

    Args:
        ensemble: Any ensemble; its buffers may change.
        x: Inputs as for :func:`embens.diagnose`.
        target: The targets of the samples.
        criterion: A function of one member's outputs and the target.
        gamma: The gradient scale.
    """
    rates = {}
    for group in ensemble.parameter_groups(lr=1.0, gamma=gamma):
        for parameter in group["params"]:
            if parameter.requires_grad:
                rates[parameter] = group["lr"]
    parameters = list(rates)
    differentiate = partial(torch.autograd.grad, retain_graph=True, materialize_grads=True)
    # Only the plain attention kernel has second derivatives.
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        args, kwargs = ensemble.bind(x)
        outputs = geometry.logits_of(ensemble(*args, **kwargs))
        if not isinstance(outputs, Tensor):
            raise TypeError("outputs are not one tensor")
        loss = geometry.loss_of(ensemble, outputs, target, criterion)
        (slope,) = differentiate(loss, outputs, create_graph=True)
        if not slope.requires_grad:
            return 0.0  # the loss is linear in the outputs
        # The gradient J^T z is linear in z, so its derivative by z applies J.
        z = torch.zeros_like(outputs, requires_grad=True)
        pulled_back = differentiate(outputs, parameters, z, create_graph=True)
        start = torch.cos(torch.arange(outputs.numel()) * 1.7 + 0.3)
        vector = start.to(outputs).reshape(outputs.shape)
        eigenvalue = 0.0
        for _ in range(POWER_ITERATIONS):
            gradients = differentiate(outputs, parameters, vector / vector.norm())
            steps = [rates[p] * g for p, g in zip(parameters, gradients, strict=True)]
            (change,) = differentiate(pulled_back, z, steps)
            (vector,) = differentiate(slope, outputs, change)
            eigenvalue = float(vector.norm())
            if eigenvalue == 0:
                break
    return eigenvalue
