"""Norm layers in the limit: by hand, and refusals. ``test_walk.py`` compares wide networks."""

from __future__ import annotations

import pytest
import torch
from theory.measured import assert_gradients_agree, points
from torch import nn

import embens
from embens import laws, theory
from embens.networks import Linear

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_units_are_divided_by_the_root_of_their_variance(norm):
    x = points(4)
    net = nn.Sequential(
        Linear(5, 4, weight_std=3.0), norm(4, eps=0.5, elementwise_affine=False), Linear(4, 1)
    )
    k = theory.kernels(net, x)
    q = 9 * x @ x.T / 5
    factor = (q.diagonal() + 0.5).rsqrt()
    nngp = q * factor[:, None] * factor

    torch.testing.assert_close(k.nngp.same, nngp, rtol=1e-13, atol=0)
    torch.testing.assert_close(k.ntk_shared.same, 2 * nngp, rtol=1e-13, atol=0)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_trainable_weights_and_biases_before_an_activation(activation):
    x = points(2)

    def draw(generator, width=384):
        layers = Linear(5, width, generator=generator), nn.LayerNorm(width), activation()
        net = nn.Sequential(*layers, Linear(width, 1, generator=generator))
        return embens.embed(net, 2, pre=None, post=laws.Signs(0.7), generator=generator)

    assert_gradients_agree(draw, x, seeds=24, bias=0.02, width=4)


REFUSED = {
    "mean": (nn.ReLU(), nn.LayerNorm(4), "subtracts the mean"),
    "instance": (nn.Identity(), nn.GroupNorm(4, 4), "normalises each unit"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_norms_are_refused(name):
    before, norm, message = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=message):
        theory.kernels(nn.Sequential(Linear(5, 4), before, norm, Linear(4, 1)), points())


def test_trained_norms_are_refused():
    norm = nn.LayerNorm(4)
    torch.nn.init.constant_(norm.weight, 2.0)
    with pytest.raises(TypeError, match="are not 1 and 0"):
        theory.kernels(nn.Sequential(Linear(5, 4), norm, Linear(4, 1)), points())


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_trainable_norms_of_modulated_units_have_these_kernels(norm):
    def draw(generator, width=256):
        layers = Linear(5, width, generator=generator), norm(width), nn.Tanh()
        net = nn.Sequential(*layers, Linear(width, 1, generator=generator))
        kinds = {"pre": laws.Bernoulli(0.7), "post": laws.Signs(0.7)}
        return embens.embed(net, 2, **kinds, generator=generator)

    assert_gradients_agree(draw, points(2), seeds=16, bias=0.03, width=4)
