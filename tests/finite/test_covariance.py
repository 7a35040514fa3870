"""The empirical covariance, compared with redrawing the last layer."""

from __future__ import annotations

import pytest
import torch
from cases import ARCHITECTURES
from finite.jacobians import build, find_architecture, flat_outputs

import embens
from embens import finite, networks
from embens.finite.values import site_values


@pytest.mark.parametrize("parametrization", ["ntk", "standard", "xavier"])
def test_the_covariance_is_that_of_redrawing_the_last_layer(parametrization):
    reference = networks.mlp(
        4, 8, 2, 5, bias_std=0.5, weight_std=1.3, parametrization=parametrization
    ).double()
    ensemble = embens.embed(reference, 3, sites="all")
    x = torch.randn(2, 4, dtype=torch.float64)
    sigma = finite.nngp(ensemble, x)
    head = next(m for m in ensemble.modules() if getattr(m, "out_features", 0) == 5)
    draws, generator = [], torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _ in range(600):
            head.reset_parameters(generator)
            draws.append(ensemble(x))
    f = torch.stack(draws).movedim(-1, 1)  # (draw, class, member, batch)
    products = torch.einsum("nkai,nkbj->nkabij", f, f).mean(1)
    error = products.std(0) / len(draws) ** 0.5

    assert ((products.mean(0) - sigma).abs() < 5 * error).all()


def test_the_covariance_of_a_plain_linear_layer_uses_the_mean_squares_of_its_weights():
    ensemble, x = build(ARCHITECTURES[0], "batch_ensemble")
    (site,) = [site for site in ensemble.spec.sites if (site.layer, site.kind) == ("4", "post")]
    inputs = []
    for a in range(ensemble.members):
        hidden = ensemble.member(a)[:4](x)
        inputs.append(hidden * site_values(ensemble, site)[a])
    h = torch.stack(inputs)
    head = ensemble.reference[4]
    expected = torch.einsum("aif,bjf->abij", h, h) * head.weight.square().mean()

    torch.testing.assert_close(finite.nngp(ensemble, x), expected + head.bias.square().mean())


def test_other_networks_average_over_outputs():
    architecture = find_architecture("conv1d")
    ensemble, x = build(architecture, "batch_ensemble")
    f = flat_outputs(ensemble, x)
    expected = torch.einsum("aik,bjk->abij", f, f) / f.shape[2]
    torch.testing.assert_close(finite.nngp(ensemble, x), expected)


def test_separate_networks_have_no_covariance():
    ensemble, x = build(ARCHITECTURES[0], "independent")
    sigma = finite.nngp(ensemble, x)
    assert sigma.shape == (2, 2, 4, 4)
    assert not sigma[0, 1].any()
    assert (sigma[1, 1].diagonal() > 0).all()
