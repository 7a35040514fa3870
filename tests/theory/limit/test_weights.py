"""The law of a layer's weights."""

from __future__ import annotations

import pytest
import torch
from theory.measured import average, expected, points
from torch import nn

import embens
from embens import laws, networks, theory


def test_frozen_weights_have_no_tangents():
    net = networks.mlp(5, 4, 2)
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    k = theory.kernels(embens.embed(net), points())
    assert (k.ntk_shared.same == 0).all()
    assert (k.ntk_individual.same.diagonal() > 0).all()


def test_plain_torch_layers_are_taken_as_torch_draws_them():
    torch.manual_seed(0)
    x = points(4)

    def draw(generator, width=600):
        torch.manual_seed(0 if generator is None else generator.initial_seed())
        net = nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 1))
        return embens.embed(net, 2, pre=None, post=laws.Shifted(0.8))

    k = expected(theory.kernels(draw(None, 8), x))
    for part, (mean, error) in average(draw, x, seeds=30).items():
        if not part.startswith("nngp"):
            assert ((mean - k[part]).abs() <= 4 * error + 0.02 * k[part].abs()).all(), part


def test_weights_of_unknown_law_are_refused():
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))
    nn.init.normal_(net[2].weight)
    with pytest.raises(ValueError, match=r"law of the weights of '2' \(Linear\) is not known"):
        theory.kernels(embens.embed(net), points())
