"""Parameters without structure: sample by sample."""

from __future__ import annotations

import torch
from finite.jacobians import (
    Strange,
    assert_equal,
    flat_outputs,
    jacobians,
    naive,
)
from torch import Tensor, nn

import embens
from embens import finite
from embens.finite.empirical import kernels


def test_groups_of_parameters_without_structure_do_not_change_the_kernel(monkeypatch):
    x = torch.randn(4, 3, 3, dtype=torch.float64)
    ensemble = embens.embed(Strange(True).double(), 2, sites=["input", "mixed"], example_input=x)
    groups: list[int] = []
    rows = kernels.Samplewise.rows

    def counting(self, *args):
        groups.append(len(self.parameters))
        return rows(self, *args)

    monkeypatch.setattr(kernels.Samplewise, "rows", counting)
    expected = finite.ntk(ensemble, x, outputs="trace")
    (together,) = set(groups)
    groups.clear()
    monkeypatch.setattr(kernels, "PASS_BYTES", 1)
    found = finite.ntk(ensemble, x, outputs="trace")
    assert max(groups) < together
    assert_equal(found, (expected.shared, expected.individual))


def test_networks_that_vmap_cannot_take_go_sample_by_sample():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.input, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.input(x)) * self.scale
            return self.head(y) if x.abs().sum().item() >= 0 else y

    x = torch.randn(3, 3, dtype=torch.float64)
    ensemble = embens.embed(Branching().double(), 2, example_input=x)
    rows = jacobians(ensemble, flat_outputs(ensemble, x))
    assert_equal(finite.ntk(ensemble, x), naive(rows, rows))
