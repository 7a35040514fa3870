"""Variance of kernels between members: closed forms, drawn perceptrons and drawn images."""

from __future__ import annotations

import math

import pytest
import torch
from theory.measured import images, points
from theory.sampled_networks import sampled_tangents, variance
from torch import nn
from torch.func import grad, vmap
from torch.nn import functional as F

import embens
from embens import laws, theory
from embens.networks import Conv2d, Linear

SIGNS, NORMAL = laws.Signs(0.0), laws.Normal()
LAWS = {
    "signs": (SIGNS, SIGNS),
    "normal": (NORMAL, NORMAL),
    "bernoulli": (None, laws.Bernoulli(0.8)),
    "masks": (None, laws.Masks(0.5)),
    "shifted": (laws.Shifted(0.7), laws.Shifted(0.7)),
    "correlated": (laws.Correlated(0.3), laws.Correlated(-0.2)),
    "masks on both sides": (laws.Masks(0.5), laws.Masks(0.3)),
    "v only": (NORMAL, None),
}


def ensemble_of(width, depth, pre, post, activation="relu", **options):
    net = embens.networks.mlp(5, width, depth, activation=activation, weight_std=2**0.5, **options)
    return embens.embed(net, 4, pre=pre, post=post)


class TestClosedForms:
    def test_last_layer_of_deep_centred_networks_has_the_product_of_variances(self):
        ensemble = ensemble_of(64, 3, None, SIGNS)
        x = points(3)
        k = theory.kernels(ensemble, x)
        terms = theory.interference_terms(ensemble, x, gamma=4)
        size = k.nngp.same.diagonal()

        torch.testing.assert_close(terms["4"], torch.outer(size, size) / 64, rtol=1e-6, atol=0)
        assert not terms["2"].any()

    def test_does_not_depend_on_the_tails_of_centred_laws_in_relu_networks(self):
        x = points(3)
        signs = theory.interference(ensemble_of(64, 2, SIGNS, SIGNS), x, gamma=4)
        normal = theory.interference(ensemble_of(64, 2, SIGNS, NORMAL), x, gamma=4)
        torch.testing.assert_close(signs, normal, rtol=1e-6, atol=0)

    def test_falls_as_one_over_width_and_scales_with_gamma(self):
        x = points(2)
        narrow = theory.interference(ensemble_of(64, 2, SIGNS, SIGNS), x, gamma=4)
        wide = theory.interference(ensemble_of(256, 2, SIGNS, SIGNS), x, members=8, gamma=4)
        torch.testing.assert_close(narrow / 16, wide, rtol=1e-9, atol=0)

    def test_is_symmetric_and_zero_for_disjoint_masks(self):
        x = points(3)
        shifted = theory.interference(ensemble_of(64, 2, None, laws.Shifted(0.5)), x)
        torch.testing.assert_close(shifted, shifted.mT)
        net = embens.networks.mlp(5, 64, 1, weight_std=2**0.5)
        disjoint = embens.embed(net, 4, pre=None, post=laws.Disjoint())
        assert theory.interference(disjoint, x).abs().max() < 1e-12

    def test_of_equal_members_is_the_variance_of_one_network(self):
        # One hidden layer, linear units, one input of size 1: Θ is the mean of z² + W².
        net = embens.networks.mlp(1, 50, 1, activation="identity")
        ensemble = embens.embed(net, 4, pre=None, post=laws.Constant(1.0))
        result = theory.interference(ensemble, torch.ones(1, 1), gamma=4.0)
        assert result.item() == pytest.approx(4 / 50, rel=1e-6)

    def test_frozen_layers_add_nothing(self):
        ensemble = ensemble_of(32, 2, SIGNS, SIGNS)
        ensemble.reference.requires_grad_(False)
        assert not theory.interference(ensemble, points(2), gamma=4).any()


class TestPerceptrons:
    @pytest.mark.parametrize("depth", [1, 2])
    @pytest.mark.parametrize("name", ["signs", "bernoulli", "v only"])
    def test_agree_with_drawn_networks(self, name, depth):
        pre, post = LAWS[name]
        x = points(2)
        computed = theory.interference(ensemble_of(256, depth, pre, post), x, gamma=4)
        samples = sampled_tangents(x, 256, depth, torch.relu, pre, post, draws=2000)
        measured, error = variance(samples)

        assert ((measured / computed - 1).abs() < 4 * error + 20 * depth / 256).all()

    def test_with_smooth_activations_agree_with_drawn_networks(self):
        x = points(2)
        pre, post = laws.Signs(0.5), laws.Signs(0.3)
        ensemble = ensemble_of(256, 2, pre, post, activation="tanh")
        computed = theory.interference(ensemble, x, gamma=4)
        samples = sampled_tangents(x, 256, 2, torch.tanh, pre, post, draws=2000)
        measured, error = variance(samples)

        assert ((measured / computed - 1).abs() < 4 * error + 0.05).all()

    def test_error_falls_with_the_width(self):
        x = points(1)
        errors = []
        for width in (16, 64):
            computed = theory.interference(ensemble_of(width, 2, SIGNS, SIGNS), x, gamma=4)
            samples = sampled_tangents(x, width, 2, torch.relu, SIGNS, SIGNS, draws=20_000)
            measured, _ = variance(samples)
            errors.append((measured / computed - 1).item())

        assert errors[0] > 0.5  # a narrow network has terms of higher order
        assert abs(errors[1]) < 0.5 * errors[0]

    @pytest.mark.long
    @pytest.mark.parametrize("depth", [1, 2, 3])
    @pytest.mark.parametrize("name", LAWS)
    def test_agree_within_five_percent_at_width_1024(self, name, depth):
        pre, post = LAWS[name]
        x = points(2)
        computed = theory.interference(ensemble_of(1024, depth, pre, post), x, gamma=4)
        samples = sampled_tangents(x, 1024, depth, torch.relu, pre, post, draws=16_000)
        measured, error = variance(samples)

        assert ((measured / computed - 1).abs() < 0.05 + 3 * error).all()


def outputs_of_images(weights, x, post, pre, readout):
    """Return the output of a member for one image."""
    first, second, last = weights
    h = F.conv2d(x[None], first * math.sqrt(2 / first[0].numel()), padding=1)
    h = post[0][:, None, None] * torch.relu(pre[0][:, None, None] * h)
    h = F.avg_pool2d(h, 2)
    h = F.conv2d(h, second * math.sqrt(2 / second[0].numel()), padding=1)
    h = post[1][:, None, None] * torch.relu(pre[1][:, None, None] * h)
    h = h.mean((2, 3)) if readout == "mean" else h.flatten(1)
    return (h @ (last * math.sqrt(2 / len(last)))).squeeze()


def sample_tangents_of_images(channels, pre, post, x1, x2, *, draws, readout):
    """Return the tangent kernel between two members of drawn convolutional networks."""
    generator = torch.Generator().manual_seed(0)
    pixels = 1 if readout == "mean" else 4
    batch = 50

    def tangent(first, second, last, post1, post2, pre1, pre2):
        weights = first, second, last
        gradients1 = grad(outputs_of_images)(weights, x1, post1, pre1, readout)
        gradients2 = grad(outputs_of_images)(weights, x2, post2, pre2, readout)
        return sum((a * b).sum() for a, b in zip(gradients1, gradients2, strict=True))

    def draw_weights(*shape):
        return torch.randn(batch, *shape, generator=generator)

    def draw_modulations(law):
        shape = (batch, 2, channels)
        if law is None:
            return torch.ones(shape)
        return law.sample(shape, generator)

    samples = []
    for _ in range(draws // batch):
        first = draw_weights(channels, x1.shape[0], 3, 3)
        second = draw_weights(channels, channels, 3, 3)
        last = draw_weights(channels * pixels)
        modulations = [draw_modulations(law) for law in (post, post, pre, pre)]
        samples.append(vmap(tangent)(first, second, last, *modulations))
    return torch.cat(samples).double()


def convolutional(channels, readout):
    law = {"weight_std": 2**0.5}
    layers = [
        Conv2d(2, channels, 3, padding=1, **law),
        nn.ReLU(),
        nn.AvgPool2d(2),
        Conv2d(channels, channels, 3, padding=1, **law),
        nn.ReLU(),
    ]
    features = 4 * channels
    if readout == "mean":
        layers.append(nn.AdaptiveAvgPool2d(1))
        features = channels
    return nn.Sequential(*layers, nn.Flatten(), Linear(features, 1, **law))


@pytest.mark.parametrize(
    ("readout", "name"), [("mean", "signs"), ("mean", "bernoulli"), ("flatten", "bernoulli")]
)
def test_images_agree_with_drawn_networks(readout, name):
    pre, post = LAWS[name]
    x = images(2, size=4)
    ensemble = embens.embed(convolutional(32, readout), 4, pre=pre, post=post)
    computed = theory.interference(ensemble, x, gamma=4)[0, 1]
    samples = sample_tangents_of_images(32, pre, post, x[0], x[1], draws=2000, readout=readout)
    measured, error = variance(samples)

    assert abs(measured / computed - 1) < 4 * error + 0.1
