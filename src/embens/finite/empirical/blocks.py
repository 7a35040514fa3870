"""Blocks of an empirical kernel: samples in chunks that fit into memory, classes in groups.

A chunk's forward pass is recorded once; each pair of chunks gives one block. A symmetric kernel
computes its upper half.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embens.checks import check_whole
from embens.finite.empirical.contraction import Gradients, contract, group_uses
from embens.finite.empirical.recording import PROBED, Inputs, Recorder, Recording, Samples
from embens.finite.empirical.samplewise import Samplewise
from embens.finite.empirical.terms import Given, Term

Outputs = Literal["all", "trace", "target", "nll"]
OUTPUTS = ("all", "trace", "target", "nll")
PASS_BYTES = 2**29
"""What the terms of one chunk of samples may hold, for all members, where no chunk is given."""
CLASSES_AT_ONCE = 8
"""How many classes of a trace are in memory together."""
SMALL = 2**16
"""Numbers in a backward pass below which classes go through it together, to save overhead."""


class Blocks:
    """The computation of one kernel."""

    def __init__(
        self,
        recorder: Recorder,
        outputs: Outputs,
        chosen: Tensor | None = None,
        memory: float | None = None,
    ):
        self.recorder = recorder
        self.ensemble = recorder.ensemble
        self.outputs = outputs
        self.chosen = torch.arange(recorder.classes) if chosen is None else chosen
        self.memory = memory
        self._batched = True
        self._at_once = CLASSES_AT_ONCE
        self._samplewise: list[Samplewise] = []

    def chunk_size(self, samples: Samples, chunk: int | None) -> int:
        """Return how many samples run at once, as given or as memory allows."""
        if chunk is not None:
            check_whole("chunk", chunk)
        limit = PASS_BYTES if self.memory is None else min(PASS_BYTES, self.memory / 2)
        members, general = self.ensemble.members, self.recorder.general
        terms = 8 * self.recorder.size * members
        # Rows without structure of both sides: as they are found, and joined for one parameter.
        largest = max((p.numel() * p.element_size() for p in general.values()), default=0)
        row = 4 * largest * members
        count = len(samples) if chunk is None else chunk
        self._at_once = 1 if self.outputs in ("target", "nll") else len(self.chosen)
        if self.outputs == "trace":
            self._at_once = min(CLASSES_AT_ONCE, self._at_once)
            while self._at_once > 1 and count * (terms + row * self._at_once) > limit:
                self._at_once //= 2
        each = max(1, terms + row * self._at_once)
        if self.memory is not None and each > limit:
            raise ValueError(
                f"the gradients of one sample would take about {each / 1e9:.2g} GB; the budget "
                f"allows {limit / 1e9:.2g} GB. Give a larger one."
            )
        size = max(1, int(limit // each)) if chunk is None else chunk
        at_once = 4 * members * self._at_once * min(size, len(samples))
        self._samplewise = [
            Samplewise(self.ensemble, self.recorder.numbers, group)
            for group in _groups(general, max(largest, limit / at_once))
        ]
        return size

    def kernel(self, left: list[Samples], right: list[Samples] | None) -> tuple[Tensor, Tensor]:
        """Return the shared and the individual part for all pairs of samples."""
        rows = []
        for i, samples in enumerate(left):
            first, row = self.recorder.record(samples), []
            for j, others in enumerate(left if right is None else right):
                if right is None and j < i:
                    row.append(tuple(_transposed(block) for block in rows[j][i]))
                else:
                    itself = right is None and j == i
                    row.append(self._block(first, None if itself else self.recorder.record(others)))
            rows.append(row)
        shared, individual = (
            torch.cat([torch.cat([block[part] for block in row], -3) for row in rows], -4)
            for part in range(2)
        )
        if self.outputs != "all":
            shared, individual = shared[..., 0, 0], individual[..., 0, 0]
        return shared, individual

    def _block(self, first: Recording, second: Recording | None) -> tuple[Tensor, Tensor]:
        """Return both parts, ``(member[, member], batch, batch, class, class)``."""
        members, individual = self.ensemble.members, self.recorder.individual
        like = first.outputs[0].detach()
        classes = like[0].numel() if self.outputs == "all" else 1
        rows, columns = (classes * len(side.samples) for side in (first, second or first))
        shared = like.new_zeros(members * rows, members * columns)
        own = like.new_zeros(members, rows, columns)
        for part in self._parts():
            for group in (None, *self._samplewise):
                left = self._gradients(group, first, part)
                right = None if second is None else self._gradients(group, second, part)
                for key in list(left.uses[0]):
                    if key[0][1] in individual:
                        for a in range(members):
                            own[a] += contract(key, left.of(a), right and right.of(a))
                    else:
                        shared += contract(key, left, right)
                    for uses in (*left.uses, *(right.uses if right else ())):
                        del uses[key]  # they may be large
        shape = (rows // classes, classes, columns // classes, classes)
        shared = shared.view(members, *shape[:2], members, *shape[2:]).permute(0, 3, 1, 4, 2, 5)
        return shared, own.view(members, *shape).transpose(2, 3)

    def _parts(self) -> Iterator[slice]:
        """Yield the outputs whose gradients are in memory together."""
        count = 1 if self.outputs in ("target", "nll") else len(self.chosen)
        for start in range(0, count, self._at_once):
            yield slice(start, min(start + self._at_once, count))

    def _gradients(self, group: Samplewise | None, recording: Recording, part: slice) -> Gradients:
        """Return the gradients of parameters with structure, or of a group of those without."""
        uses, samples = [], recording.samples
        for a, output in enumerate(recording.outputs):
            terms, cotangents = recording.terms[a], self._cotangents(output, samples.target, part)
            if group is None:
                arrived = self._backward(output, terms, cotangents)
                uses.append(group_uses(terms, arrived, self.recorder.individual))
            else:
                rows = group.rows(a, samples.inputs, cotangents)
                uses.append({(("given", key),): [(Given(), row)] for key, row in rows.items()})
        return Gradients(len(samples), uses, fold=self.outputs == "trace")

    def _backward(self, output: Tensor, terms: list[Term], cotangents: Tensor) -> list[Tensor]:
        """Return the cotangents at all terms, ``(class, …)``; zero where an output is constant."""
        if not terms:
            return []

        def gradients(cotangent: Tensor, **options: Any) -> list[Tensor]:
            edges = [term.edge for term in terms]
            options |= {"retain_graph": True, "allow_unused": True}
            found = torch.autograd.grad(output, edges, cotangent, **options)
            return [
                output.new_zeros(*cotangent.shape[: -output.dim()], *term.shape) if g is None else g
                for g, term in zip(found, terms, strict=True)
            ]

        small = sum(term.shape.numel() for term in terms) < SMALL
        if len(cotangents) > 1 and small and self._batched:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # operations without a batching rule are slow
                    return gradients(cotangents, is_grads_batched=True)
            except (RuntimeError, NotImplementedError):
                self._batched = False  # one class after another from now on
        found = [gradients(c) for c in cotangents]
        if len(found) == 1:
            return [gradient.unsqueeze(0) for gradient in found[0]]
        return [torch.stack(each) for each in zip(*found, strict=True)]

    def _cotangents(self, output: Tensor, target: Tensor | None, part: slice) -> Tensor:
        """Return what the outputs are contracted with, ``(class, batch, …)``."""
        values = output.detach()
        if target is None:
            index = self.chosen[part]
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
    """Exchange rows and columns of a block of either part."""
    block = block.transpose(-3, -4).transpose(-1, -2)
    return block.transpose(0, 1) if block.dim() == 6 else block


def probe(left: Samples, right: Samples | None) -> Inputs:
    """Return some samples to look at: those of the left, and of the right where they fit."""
    few = tuple(x[:PROBED] for x in left.inputs)
    if right is None or any(
        x.shape[1:] != y.shape[1:] or x.dtype != y.dtype
        for x, y in zip(left.inputs, right.inputs, strict=True)
    ):
        return few
    return tuple(torch.cat([x, y[:PROBED]]) for x, y in zip(few, right.inputs, strict=True))


def _groups(parameters: dict[int, nn.Parameter], limit: float) -> list[dict[int, nn.Parameter]]:
    """Return parameters in groups of at most so many bytes; at least one in each."""
    groups: list[dict[int, nn.Parameter]] = []
    left = 0.0
    for key, parameter in parameters.items():
        size = parameter.numel() * parameter.element_size()
        if not groups or size > left:
            groups.append({})
            left = limit
        groups[-1][key] = parameter
        left -= size
    return groups
