"""Activations with a kink at 0: against closed forms, a fine grid and drawn networks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from embens import laws, networks, theory
from embens.theory import activations
from embens.theory.activations import with_kink_at_zero


def values(*numbers):
    return tuple(torch.tensor([number], dtype=torch.float64) for number in numbers)


@pytest.mark.parametrize("law", [None, laws.Signs(0.3), laws.Bernoulli(0.6)])
@pytest.mark.parametrize("module", [nn.ReLU(), nn.LeakyReLU(0.3), networks.Abs()])
def test_piecewise_linear_activations_have_their_closed_forms(module, law):
    dual, closed_form = with_kink_at_zero(module), activations.dual(module)
    for covariance in (-0.9, 0.0, 0.6, 1.0):
        arguments = (*values(1.2, 0.9, covariance), law)
        tolerance = {"rtol": 1e-12, "atol": 1e-13}
        torch.testing.assert_close(dual.same(*arguments), closed_form.same(*arguments), **tolerance)
        torch.testing.assert_close(
            dual.cross(*arguments), closed_form.cross(*arguments), **tolerance
        )


@pytest.mark.parametrize("module", [nn.ELU(), nn.ELU(0.5), nn.SELU(), nn.CELU(2.0)])
def test_smooth_sides_agree_with_a_fine_grid(module):
    grid = torch.linspace(-9, 9, 3001, dtype=torch.float64)
    weights = torch.softmax(-(grid**2) / 2, 0)
    z1 = 1.2**0.5 * grid[:, None]
    z2 = 0.5 * grid[:, None] + (0.9 - 0.25) ** 0.5 * grid
    covariance = 0.5 * 1.2**0.5

    f, _, _ = activations.dual(module).same(*values(1.2, 0.9, covariance), None)

    expected = weights @ (module(z1) * module(z2)) @ weights
    assert f.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("module", [nn.ELU(), nn.ELU(0.5), nn.SELU(), nn.CELU(2.0)])
def test_g_of_smooth_sides_is_the_derivative_of_f(module):
    covariance, step = 0.5 * 1.2**0.5, 1e-5
    dual = activations.dual(module)

    _, g, _ = dual.same(*values(1.2, 0.9, covariance), None)

    f_above, _, _ = dual.same(*values(1.2, 0.9, covariance + step), None)
    f_below, _, _ = dual.same(*values(1.2, 0.9, covariance - step), None)
    assert g.item() == pytest.approx(((f_above - f_below) / (2 * step)).item(), rel=1e-8)


def test_elu_networks_have_kernels():
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    k = theory.kernels(networks.mlp(5, 8, 2, activation=nn.ELU()), x)
    assert torch.linalg.eigvalsh(k.ntk_shared.same)[0] > 0
    assert theory.fluctuation(networks.mlp(5, 8, 2, activation=nn.ELU()), x).min() > 0


def test_a_users_activation_with_a_kink_needs_one_line():
    class Ramp(nn.Module):
        def forward(self, x):
            return torch.where(x > 0, x, 0.1 * torch.sin(x))

    theory.register_activation(Ramp, with_kink_at_zero)
    f, _, _ = activations.dual(Ramp()).same(*values(1.0, 1.0, 0.0), None)
    assert 0 < f.item() < 0.2
