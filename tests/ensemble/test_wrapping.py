"""Modulated layers look like the layers inside them, and what comes out again is plain."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cases import ARCHITECTURES
from embens.ensemble.wrapping import walk, without_members
from torch import nn

import embens


def mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(3, 8), nn.ReLU(), nn.Identity(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)
    )


def test_reading_a_modulated_weight_past_its_layer_is_an_error_and_other_attributes_are_not():
    ensemble = embens.batch_ensemble(mlp(), 3)
    assert ensemble.network[3].in_features == 8
    weight = ensemble.network[3].weight
    assert (weight.dtype, weight.device.type, weight.shape) == (torch.float32, "cpu", (8, 8))
    assert weight.requires_grad
    for read in (
        lambda: weight * 2,
        lambda: weight[0],
        lambda: F.linear(torch.zeros(1, 8), weight),
        lambda: torch.zeros(1, 8) @ weight,
        lambda: weight.data,
        lambda: weight.norm(),
        lambda: weight**2,
        lambda: 1 / weight,
        lambda: abs(weight),
        lambda: torch.stack([weight]),
        lambda: torch.matmul(torch.zeros(1, 8), other=weight),
    ):
        with pytest.raises(AttributeError, match="without calling the layer"):
            read()


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


def test_code_may_ask_with_isinstance_what_its_layers_are():
    class Asking(nn.Module):
        def __init__(self):
            super().__init__()
            attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.layers = nn.ModuleList([nn.Linear(5, 8), attention, nn.GRU(8, 8), nn.Linear(8, 2)])

        def forward(self, x):
            for layer in self.layers:
                if isinstance(layer, nn.MultiheadAttention):
                    x = layer(x, x, x)[0]
                else:
                    x = layer(x).relu() if isinstance(layer, nn.Linear) else layer(x)[0]
            return x

    ensemble, x = embens.embed(Asking(), 3), torch.randn(4, 6, 5)
    for a, output in enumerate(ensemble(x)):
        torch.testing.assert_close(output, ensemble.member(a)(x))
    assert not isinstance(ensemble.network.layers[0], nn.Linear)  # outside of a pass
