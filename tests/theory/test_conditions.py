"""Modulated inputs and outputs: kernels of the drawn members."""

from __future__ import annotations

import pytest
import torch
from theory.measured import measured_kernels, points

import embens
from embens import laws, networks, theory
from embens.theory.ensembles import site_values

pytestmark = pytest.mark.usefixtures("double")


def test_input_modulations_give_kernels_of_the_drawn_members():
    """Conditional on u, a member is an ordinary network on inputs of its own."""
    x, generator = points(), torch.Generator().manual_seed(1)
    net = networks.mlp(5, 4, 2, weight_std=1.2)
    ensemble = embens.embed(
        net, 3, pre=None, post={"0": laws.Normal(), "4": laws.Shifted(0.7)}, sites="all",
        generator=generator,
    )  # fmt: skip
    k = theory.kernels(ensemble, x)
    assert k.conditional
    assert k.nngp.same.shape == (3, 3, 3)
    assert k.nngp.cross.shape == (3, 3, 3, 3)
    u = site_values(ensemble, ensemble.spec.sites[0])
    joint = torch.cat([x * row for row in u])
    plain = embens.embed(net, pre=None, post={"4": laws.Shifted(0.7)})
    reference = theory.kernels(plain, joint)
    for a in range(3):
        for b in range(3):
            block = reference[3 * a : 3 * a + 3, 3 * b : 3 * b + 3]
            nngp = block.nngp.same if a == b else block.nngp.cross
            ntk = block.ntk_shared.same if a == b else block.ntk_shared.cross
            torch.testing.assert_close(k.nngp.cross[a, b], nngp)
            torch.testing.assert_close(k.ntk_shared.cross[a, b], ntk)
        torch.testing.assert_close(k.nngp.same[a], k.nngp.cross[a, a])


@pytest.mark.long
def test_trainable_input_modulations_have_the_mean_tangents_of_wide_networks():
    x = points(2, features=3)
    values = laws.Normal().sample((2, 3), torch.Generator().manual_seed(3))

    def draw(generator, width=512):
        net = networks.mlp(3, width, 1, weight_std=1.4, generator=generator)
        ensemble = embens.embed(net, 2, pre=None, post={"0": laws.Normal()}, sites="all")
        with torch.no_grad():
            next(ensemble.individual_parameters()).copy_(values)
        return ensemble

    k = theory.kernels(draw(None, 4), x)
    samples = torch.stack(
        [
            measured_kernels(draw(torch.Generator().manual_seed(s)), x)["individual"]
            for s in range(300)
        ]
    )
    mean, error = samples.mean(0), samples.std(0) / 300**0.5
    for a in range(2):
        assert ((mean[a, a] - k.ntk_individual.same[a]).abs() < 4 * error[a, a]).all()


def test_output_modulations_multiply_the_kernels_of_the_drawn_members():
    x, generator = points(), torch.Generator().manual_seed(1)
    net = networks.mlp(5, 4, 2)
    hidden = {"2": laws.Shifted(0.8), "4": laws.Shifted(0.7)}
    ensemble = embens.embed(
        net, 3, pre={"4": laws.Normal()}, post=hidden, sites="all", generator=generator
    )
    k = theory.kernels(ensemble, x)
    plain = theory.kernels(embens.embed(net, 3, pre=None, post=hidden), x)
    site = next(site for site in ensemble.spec.sites if site.kind == "pre")
    v = site_values(ensemble, site)[:, 0]
    torch.testing.assert_close(k.nngp.cross[0, 1], v[0] * v[1] * plain.nngp.cross)
    torch.testing.assert_close(k.ntk_shared.same[2], v[2] ** 2 * plain.ntk_shared.same)
    own = v[2] ** 2 * plain.ntk_individual.same + plain.nngp.same
    torch.testing.assert_close(k.ntk_individual.same[2], own)
