"""Carrying out a plan never touches the reference and reaches every place that holds a layer."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import ARCHITECTURES
from torch import nn

import embens
from embens.ensemble.surgery import operate


@pytest.mark.parametrize("case", ARCHITECTURES, ids=str)
@pytest.mark.parametrize("family", [embens.batch_ensemble, embens.independent])
def test_the_reference_is_not_touched(case, family):
    reference = case.build()
    before = copy.deepcopy(reference)
    plan = family(reference, 2).plan
    operate(reference, plan)
    assert str(reference) == str(before)
    for name, tensor in reference.state_dict().items():
        assert torch.equal(tensor, before.state_dict()[name])


def test_the_generator_decides_the_modulations():
    reference = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    plan = embens.batch_ensemble(reference, 3).plan
    first, again, other = (
        operate(reference, plan, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
    )
    x = torch.randn(5, 3)
    assert torch.equal(first(x), again(x))
    assert not torch.equal(first(x), other(x))


def test_tied_weights_stay_tied_in_separate_networks():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.decoder.weight = self.encoder.weight

        def forward(self, x):
            return self.decoder(torch.tanh(self.encoder(x)))

    ensemble = embens.independent(Tied(), 3)
    assert sum(p.numel() for p in ensemble.parameters()) == 3 * 16
    x = torch.randn(5, 4)
    for chunk in (1, 3):
        for a, output in enumerate(ensemble(x, chunk=chunk)):
            torch.testing.assert_close(output, ensemble.member(a)(x))
    member = ensemble.member(0)
    assert member.decoder.weight is member.encoder.weight
