r"""Empirical tangent kernels: those of the network at hand, at its finite width.

.. math::
    \Theta^{com}_{ab}(x, x') = \sum_w \frac{\partial f_a(x)}{\partial w}
        \frac{\partial f_b(x')}{\partial w}, \qquad
    \Theta^{ind}_a(x, x') = \sum_{u_a} \frac{\partial f_a(x)}{\partial u_a}
        \frac{\partial f_a(x')}{\partial u_a}

over shared parameters :math:`w` and individual ones :math:`u_a`, as they are in their
parametrization, without learning rates and gradient scale; frozen ones don't count. How: one
backward pass for each member and class gives the cotangents of all layers for all samples at once
(``recording``), from which Gram matrices follow (``contraction``). Samples run in chunks
that fit into memory, recorded once for each pair; a symmetric kernel computes its upper half.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from embens.checks import Gamma, check_choice, check_whole, gradient_factor, short_repr
from embens.ensemble import EmbeddedEnsemble
from embens.finite.checks import check_call
from embens.finite.empirical.contraction import Gradients, Term, by_parameter, contract
from embens.finite.empirical.recording import (
    Inputs,
    Recorder,
    Recording,
    Samples,
    as_inputs,
)

if TYPE_CHECKING:
    from jaxtyping import Float, Int

Outputs = Literal["all", "trace", "target", "nll"]
PASS_BYTES = 2**29  # of the terms of one chunk of samples, of all members, if no chunk is given


@dataclass(frozen=True)
class FiniteKernel:
    r"""Tangent kernel of a network of finite width: :math:`\Theta^{com}, \Theta^{ind}`."""

    shared: Float[Tensor, "m m n1 n2 *classes"]
    individual: Float[Tensor, "m n1 n2 *classes"]
    natural_gamma: float = 1.0  # the ensemble's default gradient scale
    __repr__ = short_repr

    @property
    def members(self) -> int:
        return len(self.shared)

    @property
    def same(self) -> Float[Tensor, "m n1 n2 *classes"]:
        """The shared part of each member with itself."""
        return self.shared[range(self.members), range(self.members)]

    def ntk(self, gamma: Gamma = None) -> Float[Tensor, "m m n1 n2 *classes"]:
        r"""Return :math:`\frac{\gamma}{M} \Theta^{com}_{ab} + \delta_{ab} \Theta^{ind}_a`.

        Training follows this kernel. ``gamma`` may be a function of the number of members; None:
        the ensemble's natural one.
        """
        result = gradient_factor(gamma, self.members, self.natural_gamma) * self.shared
        a = range(self.members)
        result[a, a] += self.individual
        return result

    def to(self, *args, **kwargs) -> FiniteKernel:
        """Return the kernel with another dtype or on another device."""
        parts = (part.to(*args, **kwargs) for part in (self.shared, self.individual))
        return FiniteKernel(*parts, natural_gamma=self.natural_gamma)


def ntk(
    ensemble: EmbeddedEnsemble,
    x1: Tensor | Inputs,
    x2: Tensor | Inputs | None = None,
    *,
    outputs: Outputs = "all",
    target: Int[Tensor, " n1"] | None = None,
    target2: Int[Tensor, " n2"] | None = None,
    chunk: int | None = None,
) -> FiniteKernel:
    r"""Return the empirical tangent kernel, shared and individual parts.

    ``shared`` is (member, member, batch, batch), ``individual`` (member, batch, batch); for "all"
    with two class axes more.

    Args:
        ensemble: of any family, in the mode it is in: batch statistics and random layers need
            ``ensemble.eval()``.
        x1: samples along the first axis; a tuple of tensors for a reference of several arguments.
        x2: other samples; None: the kernel of ``x1`` with itself, symmetric.
        outputs: "all" pairs of outputs :math:`\Theta_{kk'}`; the "trace"
            :math:`\sum_k \Theta_{kk}`; :math:`\Theta_{y(x) y(x')}` of the "target"; or the "nll",
            of :math:`-\log p_{y(x)}(x)` instead of :math:`f`. Axes after the batch count as
            classes, all together.
        target: the classes of ``x1``, for "target" and "nll".
        target2: the classes of ``x2``.
        chunk: how many samples run at once; bounds memory, and does not change the result beyond
            rounding. None: chosen by the size of the network.

    Example:
        >>> from embens import batch_ensemble, networks
        >>> ensemble = batch_ensemble(networks.mlp(inputs=4, width=8, depth=2), members=3)
        >>> kernel = ntk(ensemble, torch.ones(5, 4), outputs="trace")
        >>> kernel.shared.shape, kernel.individual.shape
        (torch.Size([3, 3, 5, 5]), torch.Size([3, 5, 5]))
    """
    check_call(ensemble, x1)
    check_choice("outputs", outputs, get_args(Outputs))
    left = Samples(as_inputs(x1, "x1"), _check_target(outputs, target, x1, "target"))
    right = None
    if x2 is not None:
        right = Samples(as_inputs(x2, "x2"), _check_target(outputs, target2, x2, "target2"))
    elif target2 is not None:
        raise ValueError("target2 belongs to x2; got target2 without x2. Leave it out.")
    return Blocks(ensemble, outputs).kernel(left, right, chunk)


def _check_target(
    outputs: Outputs, target: Tensor | None, x: Tensor | Inputs, name: str
) -> Tensor | None:
    if outputs in ("all", "trace"):
        if target is not None:
            raise ValueError(
                f"outputs={outputs!r} uses no target; got {name}. Leave it out, or choose "
                "outputs='target' or 'nll'."
            )
        return None
    count = len(x if isinstance(x, Tensor) else x[0])
    if target is None:
        raise ValueError(f"outputs={outputs!r} needs {name}=, the class of each of {count} samples")
    target = torch.as_tensor(target)
    if target.shape == (count, 1):
        target = target[:, 0]
    if target.shape != (count,) or target.is_floating_point() or target.dtype == torch.bool:
        raise ValueError(
            f"{name} must hold a class (whole number) for each of {count} samples; got shape "
            f"{tuple(target.shape)} of {target.dtype}"
        )
    return target.long()


class Blocks:
    """The computation of one kernel."""

    def __init__(self, ensemble: EmbeddedEnsemble, outputs: Outputs):
        self.ensemble, self.outputs = ensemble, outputs
        self.recorder = Recorder(ensemble)

    def kernel(self, left: Samples, right: Samples | None, chunk: int | None) -> FiniteKernel:
        """Return the kernel between two sets of samples, or of one with itself."""
        rows: list[list[tuple[Tensor, ...]]] = []
        with torch.no_grad(), self.recorder.watching():
            self.recorder.survey(_pair(left, right))
            size = self._chunk_size(chunk)
            for i, samples in enumerate(left.split(size)):
                first, row = self.recorder.record(samples), []
                for j, others in enumerate((right or left).split(size)):
                    if right is None and j < i:
                        row.append(tuple(_transposed(block) for block in rows[j][i]))
                    else:
                        itself = right is None and j == i
                        second = None if itself else self.recorder.record(others)
                        row.append(self._block(first, second))
                rows.append(row)
        one = ... if self.outputs == "all" else (..., 0, 0)
        parts = (
            torch.cat([torch.cat([block[part] for block in row], -3) for row in rows], -4)[one]
            for part in range(2)
        )
        return FiniteKernel(*parts, natural_gamma=self.ensemble.natural_gamma)

    def _chunk_size(self, chunk: int | None) -> int:
        """Return how many samples run at once, as given or as memory allows; plan the classes."""
        self._count = 1 if self.outputs in ("target", "nll") else self.recorder.classes
        self._at_once = self._count if self.outputs == "all" else 1
        general = self.recorder.general.values()
        terms = 8 * self.recorder.size
        rows = 2 * self._at_once * sum(p.numel() * p.element_size() for p in general)  # both sides
        fit = PASS_BYTES // max(1, (terms + rows) * self.ensemble.members)
        return max(1, fit) if chunk is None else check_whole("chunk", chunk)

    def _block(self, first: Recording, second: Recording | None) -> tuple[Tensor, Tensor]:
        members, individual = self.ensemble.members, self.recorder.individual
        like = first.outputs[0].detach()
        classes = like[0].numel() if self.outputs == "all" else 1
        rows, columns = (classes * len(side.samples) for side in (first, second or first))
        shared = like.new_zeros(members * rows, members * columns)
        own = like.new_zeros(members, rows, columns)
        for start in range(0, self._count, self._at_once):
            part = slice(start, start + self._at_once)  # classes that are in memory together
            left = self._gradients(first, part)
            right = None if second is None else self._gradients(second, part)
            for key in list(left.uses[0]):
                if key[1] in individual:
                    for a in range(members):
                        own[a] += contract(key, left.of(a), right and right.of(a))
                else:
                    shared += contract(key, left, right)
                for uses in (*left.uses, *(right.uses if right else ())):
                    del uses[key]  # they may be large
        shape = (rows // classes, classes, columns // classes, classes)
        shared = shared.view(members, *shape[:2], members, *shape[2:]).permute(0, 3, 1, 4, 2, 5)
        return shared, own.view(members, *shape).transpose(2, 3)

    def _gradients(self, recording: Recording, part: slice) -> Gradients:
        """Return the gradients of parameters with structure, and of those without."""
        uses, samples = [], recording.samples
        for a, output in enumerate(recording.outputs):
            terms, cotangents = recording.terms[a], self._cotangents(output, samples.target, part)
            arrived = self._backward(output, terms, cotangents) if terms else []
            uses.append(by_parameter(terms, arrived))
            if self.recorder.general:
                rows = self.recorder.rows(a, samples.inputs, cotangents)
                uses[a] |= {
                    ("given", k): [(Term({}, r, None, r.shape), r)] for k, r in rows.items()
                }
        return Gradients(len(samples), uses)

    def _backward(self, output: Tensor, terms: list[Term], cotangents: Tensor) -> list[Tensor]:
        """Return the cotangents at all terms, ``(class, …)``; zero where an output is constant."""
        edges, found = [term.edge for term in terms], []
        for cotangent in cotangents:
            options = {"retain_graph": True, "allow_unused": True}
            gradients = torch.autograd.grad(output, edges, cotangent, **options)
            found.append(
                [
                    output.new_zeros(term.shape) if g is None else g
                    for g, term in zip(gradients, terms, strict=True)
                ]
            )
        if len(found) == 1:  # without a copy
            return [gradient.unsqueeze(0) for gradient in found[0]]
        return [torch.stack(each) for each in zip(*found, strict=True)]

    def _cotangents(self, output: Tensor, target: Tensor | None, part: slice) -> Tensor:
        # ``(class, batch, …)``, what the outputs are contracted with
        values = output.detach()
        if target is None:
            index = range(self._count)[part]
            chosen = values.new_zeros(len(index), values[0].numel())
            chosen[range(len(index)), index] = 1.0
            return chosen.view(len(chosen), 1, *values.shape[1:]).expand(-1, *values.shape)
        if values.dim() != 2:
            raise ValueError(
                f"outputs={self.outputs!r} is for classification, with outputs (batch, class); a "
                f"member's have shape {tuple(values.shape)}. Use 'all' or 'trace'."
            )
        if len(target) and not 0 <= int(target.min()) <= int(target.max()) < values.shape[1]:
            raise ValueError(
                f"target holds classes from {int(target.min())} to {int(target.max())}; the "
                f"outputs have {values.shape[1]} classes, counted from 0"
            )
        chosen = F.one_hot(target, values.shape[1]).to(values.dtype)
        return (chosen if self.outputs == "target" else values.softmax(1) - chosen)[None]


def _transposed(block: Tensor) -> Tensor:
    block = block.transpose(-3, -4).transpose(-1, -2)
    return block.transpose(0, 1) if block.dim() == 6 else block


def _pair(left: Samples, right: Samples | None) -> Inputs:
    """Return the first and the last sample."""
    first, last = left.inputs, (right or left).inputs
    if any(
        x.shape[1:] != y.shape[1:] or x.dtype != y.dtype for x, y in zip(first, last, strict=True)
    ):
        last = first
    return tuple(torch.cat([x[:1], y[-1:]]) for x, y in zip(first, last, strict=True))
