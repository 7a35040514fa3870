"""What comes out of an ensemble is plain: names, types and weights of the reference."""

from __future__ import annotations

import pytest
import torch
from cases import ARCHITECTURES
from torch import nn

import embens
from embens.ensemble.plain import walk, without_members


@pytest.mark.parametrize("case", ARCHITECTURES, ids=str)
@pytest.mark.parametrize("family", [embens.batch_ensemble, embens.independent])
def test_a_member_has_the_modules_of_the_reference(case, family):
    reference = case.build()
    member = family(reference, 2).member(1)
    expected = {name: type(m) for name, m in reference.named_modules()}
    assert {name: type(m) for name, m in member.named_modules()} == expected
    assert member.state_dict().keys() == reference.state_dict().keys()


@pytest.mark.parametrize("case", ARCHITECTURES, ids=str)
def test_a_walk_gives_the_names_of_the_reference(case):
    reference = case.build()
    ensemble = embens.batch_ensemble(reference, 2)
    found = {name for name, _ in walk(ensemble.network)}
    assert {name for name, _ in reference.named_modules()} <= found
    sites = {f"{s.layer}.{s.kind}" for s in ensemble.plan.sites}
    assert sites == set(ensemble.individuals) & sites


def test_without_members_the_network_is_the_reference_and_shares_its_parameters():
    reference = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    ensemble = embens.batch_ensemble(reference, 3)
    plain = without_members(ensemble.network)
    x = torch.randn(5, 3)
    torch.testing.assert_close(plain(x), reference(x))
    assert {id(p) for p in plain.parameters()} == {id(p) for p in ensemble.shared_parameters()}
