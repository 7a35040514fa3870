"""Layers of the reference network: sines of numbers, and outputs that train no hidden layer."""

from __future__ import annotations

import torch
from torch import nn

from embens.tabular.gaussians import GaussianHead
from embens.tabular.layers import DetachedOutputs, Periodic


def test_periodic_appends_sines_and_cosines():
    layer = Periodic(2, frequencies=3)
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    outputs = layer(x)
    assert outputs.shape == (5, 4 + 2 * 2 * 3)
    angle = 2 * torch.pi * x[:, 1] * layer.frequencies[1, 2]
    torch.testing.assert_close(outputs[:, 4 + 5], angle.sin())
    torch.testing.assert_close(outputs[:, 4 + 6 + 5], angle.cos())


def test_a_detached_variance_does_not_train_the_hidden_layers():
    torch.manual_seed(0)
    trunk, last = nn.Linear(3, 8), nn.Linear(8, 2)
    x, y = torch.randn(20, 3), torch.cat([torch.randn(20, 1), torch.ones(20, 1)], 1)
    body = nn.Sequential(trunk, nn.Tanh(), DetachedOutputs(last))
    torch.testing.assert_close(body(x), last(trunk(x).tanh()))
    GaussianHead(1, loss="squared").criterion(body(x), y).mean().backward()
    ours = trunk.weight.grad.clone()
    trunk.weight.grad = None
    (0.5 * (body(x)[:, 0] - y[:, 0]).square()).mean().backward()
    torch.testing.assert_close(ours, trunk.weight.grad)
    assert body[-1].second.weight.grad.abs().sum() > 0
