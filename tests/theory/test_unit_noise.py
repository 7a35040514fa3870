"""Variance of one unit: against draws of the unit itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import embens
from embens import laws
from embens.theory.placement import Modulation
from embens.theory.unit_noise import Sensitivities, unit_variance


def modulation(law, kind):
    net = embens.networks.mlp(2, 4, 1)
    ensemble = embens.embed(net, 4, pre=law, post=law)
    site = next(site for site in ensemble.spec.sites if site.kind == kind)
    return Modulation(site, 4)


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh()])
@pytest.mark.parametrize("law", [laws.Shifted(0.5), laws.Correlated(0.4)])
def test_agrees_with_draws_of_a_unit(law, activation):
    def value(number):
        return torch.tensor([[[number]]], dtype=torch.float64)

    sensitivities = Sensitivities(*(value(v) for v in (0.3, -0.2, 0.7, 1.1, 0.8, 0.4)))
    covariances = value(1.2), value(0.9), value(0.5)
    computed = unit_variance(
        activation,
        covariances,
        value(0.6),
        sensitivities,
        modulation(law, "pre"),
        modulation(law, "post"),
    )
    generator = torch.Generator().manual_seed(0)
    count = 400_000

    def pair(first, second, between):
        root = torch.linalg.cholesky(torch.tensor([[first, between], [between, second]]))
        return root @ torch.randn(2, count, generator=generator)

    z, e = pair(1.2, 0.9, 0.5), pair(1.1, 0.8, 0.4)
    u = law.sample((4, count), generator)[:2]
    v = law.sample((4, count), generator)[:2]
    units = (v * z).requires_grad_()
    phi = activation(units)
    (slope,) = torch.autograd.grad(phi.sum(), units)
    phi, psi = phi.detach(), v * slope
    y = 0.3 * (u * phi)[0] ** 2 - 0.2 * (u * phi)[1] ** 2
    y = y + u.prod(0) * (0.7 * phi.prod(0) + 0.6 * psi.prod(0) * e.prod(0))
    spread = (y - y.mean()).square()
    error = spread.std().item() / count**0.5
    assert computed.item() == pytest.approx(spread.mean().item(), abs=5 * error)
