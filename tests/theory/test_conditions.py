"""Modulated inputs and outputs: kernels of the drawn members."""

from __future__ import annotations

import pytest
import torch
from theory.measured import measured_kernels, points

import embens
from embens import laws, networks, theory
from embens.theory.ensembles import site_values

pytestmark = pytest.mark.usefixtures("double")


def test_input_modulations_give_the_kernels_of_the_drawn_members():
    """Conditional on u, a member is an ordinary network on its own inputs."""
    x = points()
    net = networks.mlp(5, 4, 2, weight_std=1.2)
    ensemble = embens.embed(
        net,
        3,
        pre=None,
        post={"0": laws.Normal(), "4": laws.Shifted(0.7)},
        sites="all",
        generator=torch.Generator().manual_seed(1),
    )

    kernels = theory.kernels(ensemble, x)

    assert kernels.conditional
    assert kernels.nngp.same.shape == (3, 3, 3)
    assert kernels.nngp.cross.shape == (3, 3, 3, 3)
    u = site_values(ensemble, ensemble.spec.sites[0])
    inputs_of_members = torch.cat([x * u[a] for a in range(3)])
    without_inputs = embens.embed(net, pre=None, post={"4": laws.Shifted(0.7)})
    expected = theory.kernels(without_inputs, inputs_of_members)
    for a in range(3):
        for b in range(3):
            block = expected[3 * a : 3 * a + 3, 3 * b : 3 * b + 3]
            part = "same" if a == b else "cross"
            torch.testing.assert_close(kernels.nngp.cross[a, b], getattr(block.nngp, part))
            torch.testing.assert_close(
                kernels.ntk_shared.cross[a, b], getattr(block.ntk_shared, part)
            )
        torch.testing.assert_close(kernels.nngp.same[a], kernels.nngp.cross[a, a])


@pytest.mark.long
def test_trainable_input_modulations_have_the_mean_tangents_of_wide_networks():
    x = points(2, features=3)
    values = laws.Normal().sample((2, 3), torch.Generator().manual_seed(3))
    seeds = 300

    def draw(generator, width=512):
        net = networks.mlp(3, width, 1, weight_std=1.4, generator=generator)
        ensemble = embens.embed(net, 2, pre=None, post={"0": laws.Normal()}, sites="all")
        with torch.no_grad():
            next(ensemble.individual_parameters()).copy_(values)
        return ensemble

    samples = []
    for seed in range(seeds):
        network = draw(torch.Generator().manual_seed(seed))
        samples.append(measured_kernels(network, x)["individual"])

    limit = theory.kernels(draw(None, width=4), x).ntk_individual.same
    mean = torch.stack(samples).mean(0)
    error = torch.stack(samples).std(0) / seeds**0.5
    for a in range(2):
        assert ((mean[a, a] - limit[a]).abs() < 4 * error[a, a]).all()


def test_output_modulations_multiply_the_kernels_of_the_drawn_members():
    x = points()
    net = networks.mlp(5, 4, 2)
    hidden_laws = {"2": laws.Shifted(0.8), "4": laws.Shifted(0.7)}
    ensemble = embens.embed(
        net,
        3,
        pre={"4": laws.Normal()},
        post=hidden_laws,
        sites="all",
        generator=torch.Generator().manual_seed(1),
    )

    kernels = theory.kernels(ensemble, x)

    plain = theory.kernels(embens.embed(net, 3, pre=None, post=hidden_laws), x)
    output_site = next(site for site in ensemble.spec.sites if site.kind == "pre")
    v = site_values(ensemble, output_site)[:, 0]
    torch.testing.assert_close(kernels.nngp.cross[0, 1], v[0] * v[1] * plain.nngp.cross)
    torch.testing.assert_close(kernels.ntk_shared.same[2], v[2] ** 2 * plain.ntk_shared.same)
    individual = v[2] ** 2 * plain.ntk_individual.same + plain.nngp.same
    torch.testing.assert_close(kernels.ntk_individual.same[2], individual)
