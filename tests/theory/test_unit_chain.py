"""Networks whose interference has no formula, and the layers of those that have one."""

from __future__ import annotations

import pytest
import torch
from theory.measured import points
from torch import nn

import embens
from embens import laws, theory
from embens.networks import Linear
from embens.theory.limit import Limit
from embens.theory.unit_chain import InterferingChain

SIGNS, NORMAL = laws.Signs(0.0), laws.Normal()


def test_layers_have_their_activations_and_modulations():
    net = embens.networks.mlp(5, 8, 2, activation="tanh").double()
    ensemble = embens.embed(net, 3, pre=SIGNS, post=NORMAL)
    chain = InterferingChain.of(Limit(ensemble, points()))

    assert [layer.name for layer in chain.layers] == ["0", "2", "4"]
    assert [layer.width for layer in chain.hidden] == [8, 8]
    assert all(isinstance(layer.activation, nn.Tanh) for layer in chain.hidden)
    assert chain.layers[0].post is None
    assert chain.layers[1].post.law == NORMAL
    assert chain.layers[1].pre.law == SIGNS


class TestErrors:
    def test_custom_forwards_are_named(self):
        class Custom(nn.Module):
            def __init__(self):
                super().__init__()
                self.up, self.down = Linear(5, 8), Linear(8, 1)

            def forward(self, x):
                return self.down(torch.relu(self.up(x)))

        ensemble = embens.embed(Custom(), 2, pre=None, post=SIGNS)
        with pytest.raises(TypeError, match=r"known for nn\.Sequential only"):
            theory.interference(ensemble, points(2))

    def test_per_member_layers_are_named(self):
        ensemble = embens.embed(embens.networks.mlp(5, 8, 2), 2, pre=None, post=SIGNS, own="last")
        with pytest.raises(TypeError, match=r"'4' .*differ between members"):
            theory.interference(ensemble, points(2))

    def test_modulated_inputs_are_named(self):
        ensemble = embens.embed(embens.networks.mlp(5, 8, 2), 2, sites="all")
        with pytest.raises(ValueError, match="exchangeable"):
            theory.interference(ensemble, points(2))

    def test_separate_networks_are_named(self):
        ensemble = embens.independent(embens.networks.mlp(5, 8, 2), 2)
        with pytest.raises(ValueError, match="separate networks"):
            theory.interference(ensemble, points(2))
