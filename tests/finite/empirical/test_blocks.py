"""Kernels in blocks: memory stays bounded."""

from __future__ import annotations

import pytest
import torch
from cases import ARCHITECTURES
from finite.jacobians import (
    assert_equal,
    build,
)

import embens
from embens import finite, networks
from embens.finite.empirical import blocks, kernels
from embens.finite.empirical.recording import Recorder


def test_memory_of_one_chunk_does_not_grow_with_the_samples(monkeypatch):
    ensemble, _ = build(ARCHITECTURES[0], "batch_ensemble")
    rows: list[int] = []
    record = Recorder.record
    monkeypatch.setattr(
        Recorder, "record", lambda self, samples: rows.append(len(samples)) or record(self, samples)
    )
    finite.ntk(ensemble, torch.randn(7, 5, dtype=torch.float64), chunk=3)
    assert rows == [3, 3, 1, 3, 1, 1]  # each pair of chunks once
    monkeypatch.setattr(blocks, "PASS_BYTES", 1)
    rows.clear()
    finite.ntk(ensemble, torch.randn(3, 5, dtype=torch.float64))
    assert set(rows) == {1}


@pytest.mark.parametrize("outputs", ["trace", "target", "nll"])
def test_reductions_hold_no_more_classes_at_once_than_a_constant(outputs, monkeypatch):
    held: list[int] = []
    group = blocks.group_uses

    def counting(terms, cotangents, individual):
        held.extend(len(c) for c in cotangents)
        return group(terms, cotangents, individual)

    monkeypatch.setattr(blocks, "group_uses", counting)
    for classes in (3, 40):
        held.clear()
        ensemble = embens.batch_ensemble(networks.mlp(4, 6, 2, classes), 2)
        given = {} if outputs == "trace" else {"target": torch.tensor([0, 1])}
        finite.ntk(ensemble, torch.randn(2, 4), outputs=outputs, **given)
        assert max(held) <= (1 if outputs != "trace" else blocks.CLASSES_AT_ONCE)


def test_nll_takes_one_backward_pass_for_each_member_whatever_the_samples(monkeypatch):
    ensemble = embens.batch_ensemble(networks.mlp(4, 6, 2, 10), 3)
    calls: list[int] = []
    gradient = torch.autograd.grad
    monkeypatch.setattr(
        torch.autograd, "grad", lambda *args, **kw: calls.append(1) or gradient(*args, **kw)
    )
    finite.ntk(ensemble, torch.randn(9, 4), outputs="nll", target=torch.arange(9))
    assert len(calls) == 3


def test_a_trace_holds_no_square_of_the_number_of_classes(monkeypatch):
    sizes: list[int] = []
    cotangents = blocks.Blocks._cotangents

    def measuring(self, *args):
        found = cotangents(self, *args)
        sizes.append(found.untyped_storage().nbytes() // found.element_size())
        return found

    monkeypatch.setattr(blocks.Blocks, "_cotangents", measuring)
    ensemble = embens.batch_ensemble(networks.mlp(4, 6, 1, 50), 2)
    finite.ntk(ensemble, torch.randn(2, 4), outputs="trace")
    assert max(sizes) == blocks.CLASSES_AT_ONCE * 50


def test_the_trace_of_some_outputs_is_the_sum_of_theirs():
    ensemble = embens.batch_ensemble(networks.mlp(4, 6, 2, 5), 2).double()
    x, chosen = torch.randn(3, 4, dtype=torch.float64), torch.tensor([1, 4])
    every = finite.ntk(ensemble, x)
    found = kernels.trace_of(ensemble, x, chosen=chosen, memory=1e9)
    parts = (part[..., chosen, chosen].sum(-1) for part in (every.shared, every.individual))
    assert_equal(found, tuple(parts))  # type: ignore[arg-type]
