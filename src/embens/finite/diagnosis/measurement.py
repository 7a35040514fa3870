r"""What a diagnosis measures: gradients of some members on some samples, and the stable rate.

A :class:`Budget` counts samples, members, outputs and bytes, never seconds, so that a diagnosis
depends on nothing but its arguments. What was left out is said in ``notes``. A step of gradient
descent with the rate :math:`\eta` is stable where

.. math::
    \eta < \frac{2}{\lambda_{\max}(\Theta H)}, \qquad
    \Theta_{ab} = \frac{\gamma}{M} \Theta^{com}_{ab} + \delta_{ab} \Theta^{ind}_a ,

with the second derivative :math:`H` of the members' losses by their outputs, on a few samples and
at the present weights: a first guess for a sweep, not a promise. Momentum :math:`\beta` allows
:math:`1+\beta` times as much.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map

from embens.checks import check_number, check_whole
from embens.ensemble import EmbeddedEnsemble
from embens.finite import gradients
from embens.objective import Criterion, logits_of
from embens.theory import effective_width
from embens.theory.regime import Structure

RATE_SAMPLES = 12  # behind the stable rate
TRIED = 16  # with how many samples the memory of a pass is counted
LIMIT_SAMPLES = ((1, 12), (256, 2), (1024, 1))  # the limit's, for up to so many pixels
POWER = 20  # iterations for the largest eigenvalue


@dataclass(frozen=True)
class Budget:
    """How much a diagnosis may use at most, and what chooses it."""

    samples: int = 256  # whose gradients are measured
    members: int = 16
    memory: float = 1e9  # in bytes, beyond the ensemble itself
    generator: torch.Generator | None = None  # draws samples and fresh masks; None: always the same

    def __post_init__(self) -> None:
        for name in ("samples", "members"):
            check_whole(name, getattr(self, name))
        check_number("memory", self.memory, "a number of bytes", lambda bytes: bytes >= 1)


@dataclass(frozen=True)
class Rates:
    """Suggested rates.

    Above ``largest_stable`` plain gradient descent with the suggested gamma diverges at once; None
    if not measured. With ``modulation_factor``, their rate over that of the shared parameters,
    modulations make steps of the same length; None where none is trained.
    """

    largest_stable: float | None = None
    modulation_factor: float | None = None


@dataclass(frozen=True)
class Measured:
    """What the members' gradients were like."""

    x: Any  # the samples that were used
    target: Any
    rows: int  # how many they are
    losses: Tensor  # of the members
    individual: Tensor  # norms of their gradients of modulations
    grams: dict[str, Tensor]  # inner products of the members' shared gradients, by layer
    bias_part: float  # mean part of shared output biases in the cosine of two members' gradients
    notes: list[str]  # what was left out, and why

    @property
    def gram(self) -> Tensor:
        return gradients.total_gram(self.grams, len(self.losses))


def measure(
    ensemble: EmbeddedEnsemble,
    x: Any,
    target: Any,
    criterion: Criterion,
    biases: Collection[Tensor],
    budget: Budget,
) -> Measured:
    """Measure the gradients of some members on some samples; of these biases also apart."""
    weights = sum(p.numel() * p.element_size() for p in ensemble.shared_parameters())
    wanted = min(ensemble.members, budget.members)
    members = min(wanted, max(2, int(budget.memory / 2 / max(1, weights))))
    lengths = {len(t) for t in tree_leaves((x, target)) if isinstance(t, Tensor)}
    rows, notes, limited = max(lengths, default=1), [], members < wanted
    if len(lengths) == 1:
        order = torch.randperm(rows, generator=budget.generator)
        some, most = order[:TRIED], min(rows, budget.samples)
        with kept_bytes(ensemble) as kept:
            few = take(x, some), take(target, some)
            list(gradients.member_gradients(ensemble, *few, criterion, members=1))
        room = max(2, int(budget.memory / 2 * len(some) / max(1, sum(kept.values()))))
        rows, limited = min(most, room), limited or room < most
        x, target = take(x, order[:rows]), take(target, order[:rows])
    else:
        notes.append("all samples were used: they could not be told apart in x and target")
    if limited:
        notes.append(f"the budget allowed {members} members and {rows} samples")
    options = {"members": members, "generator": budget.generator}
    found = list(gradients.member_gradients(ensemble, x, target, criterion, **options))
    grams, part = gradients.shared_grams(found), 0.0
    norms = gradients.total_gram(grams, members).diagonal().sqrt().clamp(min=1e-300)
    wanted = {id(bias) for bias in biases}
    layers = gradients.shared_layers(ensemble)
    where = [(n, i) for n, held in layers.items() for i, p in enumerate(held) if id(p) in wanted]
    if where and members > 1:
        parts = [torch.cat([m.shared[n][i].flatten() for n, i in where]) for m in found]
        pulls = gradients.gram_of(parts) / norms / norms[:, None]
        part = float(gradients.off_diagonal(pulls).mean())
    own = [gradients.norm_of([g for site in m.individual.values() for g in site]) for m in found]
    losses = torch.tensor([m.loss for m in found])
    return Measured(x, target, rows, losses, torch.tensor(own), grams, part, notes)


def few(x: Any) -> Tensor | None:
    """Return few enough samples for the limit's kernels; None where even one takes too long."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() not in (2, 4):
        return None
    pixels = x[0, 0].numel()
    rows = next((rows for most, rows in LIMIT_SAMPLES if pixels <= most), 0)
    return x[:rows].detach().double() if rows else None


def effective_widths(ensemble: EmbeddedEnsemble, x: Any) -> list[float]:
    """Return what the tails of laws leave of a member's width, and that width, where known."""
    rows = few(x)
    if rows is None or ensemble.plan.separate:
        return []
    try:
        pair = (ensemble, Structure(ensemble).reference)
        return [effective_width(network, rows) for network in pair]
    except (TypeError, ValueError, RuntimeError):
        return []


def take(values: Any, rows: Tensor) -> Any:
    """Return some rows of all tensors."""
    return tree_map(
        lambda v: v[rows.to(v.device)] if isinstance(v, Tensor) and v.dim() else v,
        dict(values) if isinstance(values, Mapping) else values,
    )


@contextmanager
def kept_bytes(ensemble: EmbeddedEnsemble) -> Iterator[dict[int, int]]:
    """Count the bytes that graphs made here keep, beside the weights, by their place."""
    weights = {t.untyped_storage().data_ptr() for t in ensemble.state_dict().values()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def suggested_rates(
    ensemble: EmbeddedEnsemble, measured: Measured, criterion: Criterion, gamma: float
) -> Rates:
    """Return the rates as far as they can be found."""
    shared, own = float(measured.gram.trace()), float(measured.individual.square().sum())
    factor = math.sqrt(shared / own) if ensemble.plan.sites and shared > 0 and own > 0 else None
    rows = torch.arange(min(RATE_SAMPLES, measured.rows))
    x, target = take(measured.x, rows), take(measured.target, rows)
    try:
        top = sharpness(ensemble, x, target, criterion, gamma)
    except (TypeError, ValueError, RuntimeError) as error:
        measured.notes.append(f"no stable rate: {str(error).splitlines()[0]}")
        return Rates(None, factor)
    return Rates(2 / top if top > 0 else math.inf, factor)


def sharpness(
    ensemble: EmbeddedEnsemble, x: Any, target: Any, criterion: Criterion, gamma: float
) -> float:
    r"""Return :math:`\lambda_{\max}(J D J^\top H)`, by power iterations with products alone."""
    groups = ensemble.parameter_groups(lr=1.0, gamma=gamma)
    rates = {p: group["lr"] for group in groups for p in group["params"] if p.requires_grad}
    parameters = list(rates)
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # others have no second derivative
        args, named = ensemble.bind(x)
        outputs = logits_of(ensemble(*args, **named))
        if not isinstance(outputs, Tensor):
            raise TypeError("outputs are not one tensor")
        loss = gradients.losses_of(outputs, target, criterion).sum()
        grad = partial(torch.autograd.grad, retain_graph=True, materialize_grads=True)
        (slope,) = grad(loss, outputs, create_graph=True)
        if not slope.requires_grad:
            return 0.0
        dummy = torch.zeros_like(outputs, requires_grad=True)
        pulled = grad(outputs, parameters, dummy, create_graph=True)  # linear in the dummy
        vector, size = torch.cos(torch.arange(outputs.numel()) * 1.7 + 0.3).to(outputs), 0.0
        vector = vector.reshape(outputs.shape)
        for _ in range(POWER):
            steps = grad(outputs, parameters, vector / vector.norm())
            scaled = [rate * step for rate, step in zip(rates.values(), steps, strict=True)]
            (moved,) = grad(pulled, dummy, scaled)
            (vector,) = grad(slope, outputs, moved)
            size = float(vector.norm())
            if size == 0:
                break
    return size
