"""What a diagnosis measures: gradients of some members on some samples, within a budget.

A pass of one member over a few samples is timed first, and what it saves for the backward pass is
counted. From this follow how many samples and members are used; the limits on both are kept as
well as such a trial allows, and what was left out is said in ``notes``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from embens.ensemble import EmbeddedEnsemble
from embens.finite.gradients import gram_of, off_diagonal, total_gram
from embens.finite.members import (
    Criterion,
    MemberGradient,
    for_each_member,
    norm_of,
    shared_layers,
)

ROWS, MEMBERS = 256, 16
"""How many samples and members are enough."""


@dataclass
class Measured:
    """What the members' gradients were like."""

    x: Any = None
    target: Any = None
    rows: int = 0
    pass_seconds: float = 0.0
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
    seconds: float,
    memory: float,
    generator: torch.Generator,
) -> Measured:
    """Measure the gradients of some members on some samples."""
    deadline = time.perf_counter() + seconds
    found = Measured()
    total, aligned = _count_rows(x, target)
    rows, members = min(total, ROWS), min(ensemble.members, MEMBERS)
    parameters = sum(p.numel() * p.element_size() for p in ensemble.shared_parameters())
    members = min(members, max(2, int(memory / 2 / max(1, parameters))))
    if aligned:
        order = torch.randperm(total, generator=generator)

        def trial(count: int) -> tuple[float, float]:
            few = order[:count]
            return _try(ensemble, take(x, few), take(target, few), criterion, generator)

        two, size = trial(2)
        sixteen, each = 8 * two, size / 2
        if rows > 16 and 20 * two < seconds:  # now it is warm
            two, (sixteen, size) = trial(2)[0], trial(16)
            each = size / 16
        rows = min(rows, max(2, int(memory / 2 / max(1, each))))
        rows, members = afford(rows, members, seconds, two, sixteen)
        found.x, found.target = take(x, order[:rows]), take(target, order[:rows])
    else:
        rows, found.x, found.target = total, x, target
        found.notes.append("all samples were used: they could not be told apart in x and target")
    found.rows = rows
    vectors: dict[str, list[Tensor]] = {}
    bias_vectors: dict[str, list[Tensor]] = {}
    positions = _positions(ensemble, biases)

    def visit(member: MemberGradient) -> bool:
        for layer, gradients in member.shared.items():
            vectors.setdefault(layer, []).append(torch.cat([g.flatten() for g in gradients]))
        for layer, i in positions:
            bias_vectors.setdefault(layer, []).append(member.shared[layer][i].flatten())
        found.losses.append(member.loss)
        found.shared.append(norm_of([g for gs in member.shared.values() for g in gs]))
        found.individual.append(norm_of([g for gs in member.individual.values() for g in gs]))
        if found.outputs is None:
            found.outputs = member.outputs
        return len(found.losses) >= 2 and time.perf_counter() > deadline

    began = time.perf_counter()
    for_each_member(
        ensemble, found.x, found.target, criterion, visit, members=members, generator=generator
    )
    count = len(found.losses)
    found.pass_seconds = (time.perf_counter() - began) / count
    if count < min(ensemble.members, MEMBERS) or (aligned and rows < min(total, ROWS)):
        found.notes.append(f"the budget allowed {count} members and {rows} samples")
    found.grams = {layer: gram_of(v) for layer, v in vectors.items()}
    found.bias_grams = {layer: gram_of(v) for layer, v in bias_vectors.items()}
    return found


def _positions(ensemble: EmbeddedEnsemble, biases: dict[str, Tensor]) -> list[tuple[str, int]]:
    wanted = {id(bias) for bias in biases.values()}
    return [
        (layer, i)
        for layer, parameters in shared_layers(ensemble).items()
        for i, parameter in enumerate(parameters)
        if id(parameter) in wanted
    ]


def _count_rows(x: Any, target: Any) -> tuple[int, bool]:
    """Return the number of samples, and whether they are the first axis of all tensors."""
    lengths = {len(t) if t.dim() else 0 for t in tree_leaves((x, target)) if isinstance(t, Tensor)}
    if 0 in lengths:
        raise ValueError("x and target need at least one sample; got an empty or 0-d tensor")
    return max(lengths, default=1), len(lengths) == 1


def take(values: Any, index: Tensor) -> Any:
    """Return these samples of every tensor."""
    return tree_map(
        lambda v: v[index.to(v.device)] if isinstance(v, Tensor) and v.dim() else v, values
    )


def afford(rows: int, members: int, seconds: float, two: float, sixteen: float) -> tuple[int, int]:
    """Return how many samples and members a time allows: at least two of each.

    Args:
        rows: samples that would be good to have.
        members: members that would be good to have.
        seconds: the budget.
        two: what one member takes for two samples.
        sixteen: what it takes for sixteen.

    Example:
        >>> afford(256, 16, 10.0, two=0.01, sixteen=0.01), afford(256, 16, 10.0, 0.2, 1.6)
        ((256, 16), (16, 6))
    """
    each = max(0.0, (sixteen - two) / 14)
    fixed = max(0.0, two - 2 * each)

    def samples(members: int) -> int:
        left = seconds / members - fixed
        return rows if left > each * rows else int(left / each) if left > 0 else 0

    wanted = rows
    rows = min(wanted, max(16, samples(members)))
    if members * (fixed + each * rows) > seconds:
        members = min(members, max(4, int(seconds / (fixed + each * rows))))
    if members * (fixed + each * rows) > seconds:
        rows = min(rows, max(2, samples(members)))
    if members * (fixed + each * rows) > seconds:
        members = min(members, max(2, int(seconds / (fixed + each * rows))))
    return rows, members


def _try(
    ensemble: EmbeddedEnsemble,
    x: Any,
    target: Any,
    criterion: Criterion,
    generator: torch.Generator,
) -> tuple[float, float]:
    """Return the seconds of one member's gradient, and the bytes that its graph keeps."""
    weights = {t.untyped_storage().data_ptr() for t in ensemble.state_dict().values()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    begin = time.perf_counter()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for_each_member(
            ensemble, x, target, criterion, lambda _: True, members=1, generator=generator
        )
    return time.perf_counter() - begin, float(sum(kept.values()))
