r"""What a diagnosis measures: gradients of some members on some samples, and the stable rate.

A :class:`Budget` counts samples, members, outputs and bytes, never seconds, so that a diagnosis
depends on nothing but its arguments. What was left out is said in ``notes``. A step of gradient
descent with the rate :math:`\eta` is stable where

.. math::
    \eta < \frac{2}{\lambda_{\max}(\Theta)\,\lambda_{\max}(H)}, \qquad
    \Theta_{ab} = \frac{\gamma}{M} \Theta^{com}_{ab} + \delta_{ab} \Theta^{ind}_a ,

with the second derivative :math:`H` of one member's loss by its outputs. The kernel is that of a
few samples, averaged over outputs, and both factors are those of the present weights: a first
guess for a sweep, not a promise. Momentum :math:`\beta` allows :math:`1+\beta` times as much.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from embens.checks import check_number, check_whole
from embens.ensemble import EmbeddedEnsemble
from embens.finite import gradients
from embens.finite.diagnosis.report import Rates
from embens.finite.empirical.kernels import trace_of
from embens.objective import Criterion

TRIED = 16  # with how many samples the memory of a pass is counted


@dataclass(frozen=True)
class Budget:
    """How much a diagnosis may use at most, and what chooses it.

    Attributes:
        samples, members: whose gradients are measured.
        rate_samples, rate_outputs: of the kernel behind the stable rate; no samples: no such rate.
        memory: in bytes, beyond the ensemble itself.
        generator: draws samples and outputs, and fresh masks; None: always the same.
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

    def bias_part(self) -> float:
        """Return the mean part of the output biases in the cosine of two members' gradients."""
        if not self.bias_grams or len(self.losses) < 2:
            return 0.0
        norms = torch.tensor(self.shared, dtype=torch.float64).clamp(min=1e-300)
        gram = gradients.total_gram(self.bias_grams, len(norms))
        return float(gradients.off_diagonal(gram / norms / norms[:, None]).mean())


def measure(
    ensemble: EmbeddedEnsemble,
    x: Any,
    target: Any,
    criterion: Criterion,
    biases: Collection[Tensor],
    budget: Budget,
) -> Measured:
    """Measure the gradients of some members on some samples; of these biases also apart."""
    found, limited = _samples(ensemble, x, target, criterion, budget)
    weights = sum(p.numel() * p.element_size() for p in ensemble.shared_parameters())
    count = min(ensemble.members, budget.members)
    members = min(count, max(2, int(budget.memory / 2 / max(1, weights))))
    if members < count or limited:
        found.notes.append(f"the budget allowed {members} members and {found.rows} samples")
    vectors: dict[str, list[Tensor]] = defaultdict(list)
    bias_vectors: dict[str, list[Tensor]] = defaultdict(list)
    layers = gradients.shared_layers(ensemble)
    for member in gradients.member_gradients(
        ensemble, found.x, found.target, criterion, members=members, generator=budget.generator
    ):
        for layer, of_layer in member.shared.items():
            vectors[layer].append(torch.cat([g.flatten() for g in of_layer]))
            for parameter, gradient in zip(layers[layer], of_layer, strict=True):
                if any(parameter is bias for bias in biases):
                    bias_vectors[layer].append(gradient.flatten())
        found.losses.append(member.loss)
        for norms, of in ((found.shared, member.shared), (found.individual, member.individual)):
            norms.append(gradients.norm_of([g for of_layer in of.values() for g in of_layer]))
        found.outputs = member.outputs if found.outputs is None else found.outputs
    found.grams = {layer: gradients.gram_of(v) for layer, v in vectors.items()}
    found.bias_grams = {layer: gradients.gram_of(v) for layer, v in bias_vectors.items()}
    return found


def _samples(
    ensemble: EmbeddedEnsemble, x: Any, target: Any, criterion: Criterion, budget: Budget
) -> tuple[Measured, bool]:
    """Choose the samples, as many as are wanted; return also whether memory allows fewer."""
    lengths = {len(t) if t.dim() else 0 for t in tree_leaves((x, target)) if isinstance(t, Tensor)}
    if 0 in lengths:
        raise ValueError("x and target need at least one sample; got an empty or 0-d tensor")
    if len(lengths) != 1:
        note = "all samples were used: they could not be told apart in x and target"
        return Measured(x, target, max(lengths, default=1), notes=[note]), False
    order = torch.randperm(lengths.pop(), generator=budget.generator)
    few, wanted = order[:TRIED], min(len(order), budget.samples)
    each = _kept_bytes(ensemble, _take(x, few), _take(target, few), criterion) / len(few)
    rows = min(wanted, max(2, int(budget.memory / 2 / max(1, each))))
    return Measured(_take(x, order[:rows]), _take(target, order[:rows]), rows), rows < wanted


def _take(values: Any, index: Tensor) -> Any:
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
        list(gradients.member_gradients(ensemble, x, target, criterion, members=1))
    return float(sum(kept.values()))


def suggested_rates(
    ensemble: EmbeddedEnsemble,
    measured: Measured,
    criterion: Criterion,
    gammas: tuple[float, float],
    budget: Budget,
) -> Rates:
    """Return the rates as far as they can be found, the stable one for each of two gammas."""
    shared, own = (torch.tensor(norms).square() for norms in (measured.shared, measured.individual))
    factor = None
    if ensemble.plan.sites and float(own.sum()) > 0 and float(shared.sum()) > 0:
        factor = float((shared.mean() / own.mean()).sqrt())
    outputs, rows = measured.outputs, min(budget.rate_samples, measured.rows)
    stable: list[float] = []
    if rows and (not isinstance(outputs, Tensor) or len(outputs) != measured.rows):
        measured.notes.append("no stable rate: outputs are not one tensor with a row per sample")
    elif rows:
        index, count = torch.arange(rows), outputs[0].numel()
        x, target = (_take(values, index) for values in (measured.x, measured.target))
        chosen = torch.randperm(count)[: budget.rate_outputs].sort().values
        try:
            kernel = trace_of(ensemble, x, chosen=chosen, memory=budget.memory).to(torch.float64)
            bend = curvature(outputs[index], target, criterion)
            joint = (kernel.ntk(gamma).transpose(1, 2).flatten(2).flatten(0, 1) for gamma in gammas)
            tops = [bend * float(torch.linalg.eigvalsh(j / len(chosen))[-1]) for j in joint]
            stable = [2 / top if top > 0 else float("inf") for top in tops]
            if len(chosen) < count:
                what = f"the stable rate is that of {len(chosen)} of {count} outputs"
                measured.notes.append(what)
        except (ValueError, RuntimeError, NotImplementedError, TypeError) as error:
            measured.notes.append(f"no stable rate: {str(error).splitlines()[0]}")
    return Rates(*stable, modulation_factor=factor)


def curvature(outputs: Tensor, target: Any, criterion: Criterion, *, steps: int = 30) -> float:
    r"""Return :math:`\lambda_{\max}` of the second derivative of a loss by its outputs."""
    size = 0.0
    with torch.enable_grad():
        outputs = outputs.detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad(
            criterion(outputs, target).mean(), outputs, create_graph=True
        )
        vector = torch.cos(torch.arange(outputs.numel(), dtype=outputs.dtype) * 1.7 + 0.3)
        vector = vector.to(outputs.device).reshape(outputs.shape)
        for _ in range(steps if slope.requires_grad else 0):
            vector = vector / vector.norm()
            (vector,) = torch.autograd.grad(slope, outputs, vector, retain_graph=True)
            size = float(vector.norm())
            if size == 0:
                break
    return size
