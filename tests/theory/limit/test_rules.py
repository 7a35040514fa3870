"""Rules of modules, and what has none."""

from __future__ import annotations

import pytest
import torch
from theory.measured import points
from torch import nn

import embens
from embens import laws, networks, theory


def test_layers_without_activation_between_are_a_deep_linear_network():
    net = nn.Sequential(networks.Linear(5, 4), networks.Linear(4, 4), networks.Linear(4, 1))
    law = laws.Shifted(0.6)
    k = theory.kernels(embens.embed(net, pre=law, post=law), points())
    q = points() @ points().T / 5
    torch.testing.assert_close(k.nngp.same, q)
    torch.testing.assert_close(k.nngp.cross, q * 0.6**8)
    torch.testing.assert_close(k.ntk_individual.same, 4 * q)


def test_a_rule_of_ones_own_is_one_function():
    class Doubled(nn.Module):
        def forward(self, x):
            return 2 * x

    @theory.propagate.register(Doubled)
    def _(module, state):
        return state.map(lambda kernel: 4 * kernel)

    net = nn.Sequential(networks.Linear(5, 4), nn.ReLU(), Doubled(), networks.Linear(4, 1))
    plain = nn.Sequential(networks.Linear(5, 4), nn.ReLU(), networks.Linear(4, 1))
    k, reference = theory.kernels(net, points()), theory.kernels(plain, points())
    torch.testing.assert_close(k.ntk_shared.same, 4 * reference.ntk_shared.same)


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (
            nn.Sequential(networks.Linear(5, 4), nn.BatchNorm1d(4), networks.Linear(4, 1)),
            r"'1' \(BatchNorm1d\) is not known.*register_activation\(BatchNorm1d\)",
        ),
        (nn.Sequential(networks.Linear(5, 4), nn.ReLU()), "ends in '1' .ReLU"),
        (
            nn.Sequential(networks.Linear(5, 4), nn.ReLU(), nn.Tanh(), networks.Linear(4, 1)),
            r"'2' \(Tanh\) acts on units that are not Gaussian",
        ),
        (nn.Sequential(nn.ReLU()), "no Linear or convolution"),
        (
            nn.Sequential(networks.Linear(5, 4), nn.ReLU(), nn.Dropout(), networks.Linear(4, 1)),
            "drops units afresh",
        ),
    ],
)
def test_networks_without_a_limit_are_refused_by_name(net, message):
    with pytest.raises((TypeError, ValueError), match=message):
        theory.kernels(net, points())


def test_a_rule_can_hold_the_first_layer():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = networks.mlp(5, 4, 1, outputs=4)

        def forward(self, x):
            return self.body(x)

    net = nn.Sequential(Block(), nn.ReLU(), networks.Linear(4, 1))
    with pytest.raises(TypeError, match=r"propagate\.register"):
        theory.kernels(net, points())

    @theory.propagate.register(Block)
    def _(module, state):
        return theory.propagate(module.body, state)

    k = theory.kernels(embens.embed(net, post=laws.Shifted(0.6)), points())
    plain = theory.kernels(embens.embed(networks.mlp(5, 4, 2), post=laws.Shifted(0.6)), points())
    torch.testing.assert_close(k.ntk_shared.cross, plain.ntk_shared.cross)
    with pytest.raises(TypeError, match="lies inside a module "):
        theory.kernels(embens.embed(net, sites="all"), points())


@pytest.mark.parametrize(("std", "message"), [(30.0, "overflows"), (1e-3, "underflows")])
def test_a_network_too_deep_for_numbers_is_refused(std, message):
    net = networks.mlp(5, 4, 300, weight_std=std)
    with pytest.raises(ValueError, match=f"{message} before"):
        theory.kernels(net, points())


def test_a_sequence_with_a_forward_of_its_own_needs_a_rule_of_its_own():
    class Residual(nn.Sequential):
        def forward(self, x):
            return x + super().forward(x)

    net = nn.Sequential(
        networks.Linear(5, 4), Residual(nn.ReLU(), networks.Linear(4, 4)), networks.Linear(4, 1)
    )
    with pytest.raises(TypeError, match=r"'1' \(Residual\) is an nn.Sequential with a forward"):
        theory.kernels(net, points())

    @theory.propagate.register(Residual)
    def _(module, state):
        return state.map(lambda kernel: 4 * kernel)

    assert theory.kernels(net, points()).nngp.same.isfinite().all()
