"""Separate networks are stacked, not changed."""

import pytest
import torch
from torch import nn

import embens
from reproduction.systems.separate import SeparateNetworks, redraw


def test_outputs_are_those_of_the_networks():
    networks = redraw(nn.Linear(4, 3), 3, torch.Generator().manual_seed(0))
    ensemble = SeparateNetworks(networks)
    x = torch.randn(5, 4)
    assert ensemble.members == 3
    for a, network in enumerate(networks):
        assert torch.equal(ensemble(x)[a], network(x))
        assert ensemble.member(a) is network
    subset = ensemble.subset([2, 0, 0])
    assert torch.equal(subset(x), ensemble(x)[[2, 0, 0]])
    assert embens.metrics.nll(ensemble(x), torch.arange(5) % 3) > 0


def test_redrawn_networks_are_plain_trainable_and_reproducible():
    reference = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    first, second = redraw(reference, 2, torch.Generator().manual_seed(0))
    again, _ = redraw(reference, 2, torch.Generator().manual_seed(0))

    assert isinstance(first, nn.Sequential)
    assert all(parameter.requires_grad for parameter in first.parameters())
    torch.testing.assert_close(first.state_dict(), again.state_dict())
    assert not torch.equal(first[0].weight, second[0].weight)
    assert not torch.equal(first[0].weight, reference[0].weight)


def test_an_empty_ensemble_is_rejected():
    with pytest.raises(ValueError, match="at least one network, got none"):
        SeparateNetworks([])
