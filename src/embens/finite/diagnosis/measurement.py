"""What a diagnosis measures: gradients of some members on some samples, within a budget.

A :class:`Budget` counts samples, members, outputs and bytes, never seconds, so that a diagnosis
depends on nothing but its arguments. What was left out is said in ``notes``.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from embens.checks import check_number, check_whole
from embens.ensemble import EmbeddedEnsemble
from embens.finite.gradients import (
    gram_of,
    member_gradients,
    norm_of,
    off_diagonal,
    shared_layers,
    total_gram,
)
from embens.objective import Criterion

TRIED = 16
"""With how many samples the memory of a pass is counted."""


@dataclass(frozen=True)
class Budget:
    """How much a diagnosis may use at most, and what chooses it.

    Attributes:
        samples: whose gradients are measured.
        members: whose gradients are measured.
        rate_samples: of the tangent kernel behind the stable rate; 0: no such rate.
        rate_outputs: of that kernel.
        memory: in bytes, beyond the ensemble itself.
        generator: draws samples and outputs, and the masks of an ensemble with fresh ones; None:
            always the same.
    """

    samples: int = 256
    members: int = 16
    rate_samples: int = 12
    rate_outputs: int = 16
    memory: float = 1e9
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        for name in ("samples", "members", "rate_outputs"):
            check_whole(name, getattr(self, name))
        check_whole("rate_samples", self.rate_samples, least=0)
        check_number("memory", self.memory, "a number of bytes", lambda bytes: bytes >= 1)


@dataclass
class Measured:
    """What the members' gradients were like.

    Attributes:
        x, target, rows: the samples that were used, and how many they are.
        outputs: of the first member.
        shared, individual: the norm of each member's gradient of these parameters.
        grams: inner products of the members' shared gradients, by layer.
        bias_grams: the part of shared output biases in these.
        notes: what was left out, and why.
    """

    x: Any
    target: Any
    rows: int
    outputs: Any = None
    losses: list[float] = field(default_factory=list)
    shared: list[float] = field(default_factory=list)
    individual: list[float] = field(default_factory=list)
    grams: dict[str, Tensor] = field(default_factory=dict)
    bias_grams: dict[str, Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def unbiased(self) -> dict[str, Tensor]:
        """Return the inner products without the part of output biases."""
        return {n: gram - self.bias_grams.get(n, 0.0) for n, gram in self.grams.items()}

    def bias_part(self) -> float:
        """Return the mean part of the output biases in the cosine of two members' gradients."""
        if not self.bias_grams or len(self.losses) < 2:
            return 0.0
        norms = torch.tensor(self.shared, dtype=torch.float64).clamp(min=1e-300)
        gram = total_gram(self.bias_grams, len(norms))
        return float(off_diagonal(gram / norms / norms[:, None]).mean())


def measure(
    ensemble: EmbeddedEnsemble,
    x: Any,
    target: Any,
    criterion: Criterion,
    biases: dict[str, Tensor],
    budget: Budget,
    generator: torch.Generator,
) -> Measured:
    """Measure the gradients of some members on some samples; of these biases also apart."""
    found, limited = _samples(ensemble, x, target, criterion, budget, generator)
    weights = sum(p.numel() * p.element_size() for p in ensemble.shared_parameters())
    count = min(ensemble.members, budget.members)
    members = min(count, max(2, int(budget.memory / 2 / max(1, weights))))
    if members < count or limited:
        found.notes.append(f"the budget allowed {members} members and {found.rows} samples")
    vectors: dict[str, list[Tensor]] = defaultdict(list)
    bias_vectors: dict[str, list[Tensor]] = defaultdict(list)
    wanted = {id(bias) for bias in biases.values()}
    layers = shared_layers(ensemble)
    for member in member_gradients(
        ensemble, found.x, found.target, criterion, members=members, generator=generator
    ):
        for layer, gradients in member.shared.items():
            vectors[layer].append(torch.cat([g.flatten() for g in gradients]))
            for parameter, gradient in zip(layers[layer], gradients, strict=True):
                if id(parameter) in wanted:
                    bias_vectors[layer].append(gradient.flatten())
        found.losses.append(member.loss)
        for norms, of in ((found.shared, member.shared), (found.individual, member.individual)):
            norms.append(norm_of([g for gradients in of.values() for g in gradients]))
        found.outputs = member.outputs if found.outputs is None else found.outputs
    found.grams = {layer: gram_of(v) for layer, v in vectors.items()}
    found.bias_grams = {layer: gram_of(v) for layer, v in bias_vectors.items()}
    return found


def _samples(
    ensemble: EmbeddedEnsemble,
    x: Any,
    target: Any,
    criterion: Criterion,
    budget: Budget,
    generator: torch.Generator,
) -> tuple[Measured, bool]:
    """Choose the samples, as many as are wanted; return also whether memory allows fewer."""
    lengths = {len(t) if t.dim() else 0 for t in tree_leaves((x, target)) if isinstance(t, Tensor)}
    if 0 in lengths:
        raise ValueError("x and target need at least one sample; got an empty or 0-d tensor")
    if len(lengths) != 1:
        note = "all samples were used: they could not be told apart in x and target"
        return Measured(x, target, max(lengths, default=1), notes=[note]), False
    order = torch.randperm(lengths.pop(), generator=generator)
    few, wanted = order[:TRIED], min(len(order), budget.samples)
    each = _kept_bytes(ensemble, take(x, few), take(target, few), criterion) / len(few)
    rows = min(wanted, max(2, int(budget.memory / 2 / max(1, each))))
    return Measured(take(x, order[:rows]), take(target, order[:rows]), rows), rows < wanted


def take(values: Any, index: Tensor) -> Any:
    """Return these samples of every tensor."""
    return tree_map(
        lambda v: v[index.to(v.device)] if isinstance(v, Tensor) and v.dim() else v, values
    )


def _kept_bytes(ensemble: EmbeddedEnsemble, x: Any, target: Any, criterion: Criterion) -> float:
    """Return how many bytes the graph of one member's gradient keeps, beside the weights."""
    weights = {t.untyped_storage().data_ptr() for t in ensemble.state_dict().values()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        list(member_gradients(ensemble, x, target, criterion, members=1))
    return float(sum(kept.values()))
