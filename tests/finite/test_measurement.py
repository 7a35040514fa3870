"""Measurements of a diagnosis within a budget; the largest stable rate compared with descent."""

from __future__ import annotations

import copy
import itertools
import math
import time

import pytest
import torch
import torch.nn.functional as F
from finite.diagnosed import X, Y, batch_ensemble, mlp, seeded
from torch import nn

import embens
from embens import networks
from embens.finite import Budget, diagnose
from embens.finite.measurement import sharpness


def test_it_keeps_its_budget_of_memory():
    ensemble = batch_ensemble(members=8)
    numbers = 4 * sum(p.numel() for p in ensemble.shared_parameters())
    report = diagnose(ensemble, X, Y, budget=Budget(memory=6 * numbers))

    assert len(report.losses) == 3
    assert report.samples < 60
    assert "the budget allowed 3 members" in report.notes[0]
    assert len(diagnose(ensemble, X, Y).losses) == 8


def test_it_keeps_its_budget_of_samples_and_members():
    report = diagnose(batch_ensemble(members=8), X, Y, budget=Budget(samples=20, members=5))
    assert report.cosines.shape == (5, 5)
    assert report.samples == 20
    assert report.members == 8


def test_what_is_measured_does_not_depend_on_the_clock(monkeypatch):
    ensemble = batch_ensemble(members=4)
    quick = diagnose(ensemble, X, Y).to_dict()
    clock = itertools.count(0.0, 1000.0)
    for name in ("perf_counter", "monotonic", "time", "process_time"):
        monkeypatch.setattr(time, name, lambda: next(clock))

    assert diagnose(ensemble, X, Y).to_dict() == quick


@pytest.mark.parametrize(
    ("counts", "error", "message"),
    [
        ({"samples": 0}, ValueError, "samples must be a positive integer, got 0"),
        ({"members": 2.0}, TypeError, "members must be a positive integer, got 2.0"),
        ({"memory": float("nan")}, ValueError, "memory must be a number of bytes"),
        ({"memory": "3"}, TypeError, "memory must be a number of bytes, got '3'"),
    ],
)
def test_a_budget_that_is_no_count_is_refused(counts, error, message):
    with pytest.raises(error, match=message):
        Budget(**counts)


def test_a_network_with_attention_has_a_stable_rate():
    block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    reference = nn.Sequential(nn.Linear(4, 8), block, nn.Flatten(), nn.Linear(24, 5))
    ensemble = embens.batch_ensemble(reference, 3, generator=seeded()).eval()
    x = torch.randn(16, 3, 4, generator=seeded())
    report = diagnose(ensemble, x, torch.arange(16) % 5)

    assert 0 < report.rates.largest_stable < math.inf
    assert not any("stable rate" in note for note in report.notes)


def test_descent_is_stable_below_the_bound_and_not_above():
    reference = networks.mlp(12, 256, 1, 1, weight_std=math.sqrt(2), generator=seeded())
    x, y = X[:10].double(), X[:10, :1].sin().double()
    ensemble = embens.batch_ensemble(reference.double(), 4, generator=seeded(1))
    report = diagnose(ensemble, x, y)
    bound = report.rates.largest_stable

    def loss_after(factor: float) -> float:
        trained = copy.deepcopy(ensemble)
        rate = factor * bound
        groups = trained.parameter_groups(rate, weight_decay=0.0, gamma=report.gamma)
        optimizer = torch.optim.SGD(groups)
        for _ in range(12):
            optimizer.zero_grad()
            loss = embens.objective(trained(x), y, F.mse_loss)
            loss.backward()
            optimizer.step()
        return loss.item() / len(trained(x))

    start = float(report.losses.mean())
    assert loss_after(0.7) < 0.7 * start
    assert not loss_after(6) < 3 * start  # up to 4/λ a network may find a flatter place


def test_modulations_need_a_larger_rate_in_the_standard_parametrization():
    def factor(parametrization: str, width: int) -> float:
        ensemble = batch_ensemble(parametrization=parametrization, width=width)
        return diagnose(ensemble, X, Y).rates.modulation_factor

    assert factor("standard", 256) > 1.5 * factor("standard", 64) > 3 * factor("ntk", 64)
    assert diagnose(embens.mc_dropout(mlp(), 4), X, Y).rates.modulation_factor is None


@pytest.mark.parametrize("gamma", [4.0, 1.0])
def test_the_sharpness_is_the_largest_eigenvalue_of_kernel_times_hessian(gamma):
    reference = networks.mlp(5, 16, 2, 3, generator=seeded()).double()
    ensemble = embens.batch_ensemble(reference, 4, generator=seeded())
    x, y = torch.randn(6, 5, generator=seeded(1), dtype=torch.float64), torch.arange(6) % 3
    with torch.no_grad():
        outputs = ensemble(x)
    hessian = torch.autograd.functional.hessian(
        lambda o: embens.objective(o.reshape(outputs.shape), y), outputs.flatten()
    )
    kernel = embens.finite.ntk(ensemble, x).ntk(gamma).permute(0, 2, 4, 1, 3, 5)
    product = kernel.reshape(len(hessian), -1) @ hessian
    expected = float(torch.linalg.eigvals(product).real.max())

    assert sharpness(ensemble, x, y, F.cross_entropy, gamma) == pytest.approx(expected, rel=1e-2)
    assert sharpness(ensemble, x, y, lambda o, t: o.sum(), gamma) == 0.0
