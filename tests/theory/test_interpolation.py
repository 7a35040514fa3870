"""Tests of Chebyshev interpolation: tables against the series that they interpolate."""

import math

import pytest
import torch
from torch import nn

from embens.laws import Bernoulli, Normal, Rademacher
from embens.theory.activations import dual
from embens.theory.interpolation import CorrelationAxis, RootAxis, evaluate, expand, remainder
from embens.theory.quadrature import Smooth


def test_evaluate_reproduces_a_smooth_function_of_three_variables():
    root_axis = RootAxis(high=2.0, scale=1.5, count=24)
    correlation_axis = CorrelationAxis(margin=0.1, count=33)

    def function(root1, root2, rho):
        return torch.exp(-root1 * root2) * (1 + rho * root1) / (2 - rho)

    nodes = root_axis.nodes()
    rho = correlation_axis.nodes()[:, None, None]
    coefficients = expand(function(nodes[:, None], nodes, rho))
    assert remainder(coefficients) < 1e-11
    generator = torch.Generator().manual_seed(0)
    root1 = 2 * torch.rand(5, 1, generator=generator, dtype=torch.float64)
    root2 = 2 * torch.rand(4, generator=generator, dtype=torch.float64)
    rho = 2 * torch.rand(5, 4, generator=generator, dtype=torch.float64) - 1
    polynomials = root_axis.polynomials(root1), root_axis.polynomials(root2)
    values = evaluate(coefficients, *polynomials, correlation_axis.to_unit(rho))
    torch.testing.assert_close(values, function(root1, root2, rho), rtol=1e-10, atol=1e-11)


def test_nodes_include_both_ends_of_the_interval():
    nodes = RootAxis(high=3.0, scale=0.7, count=9).nodes()
    assert nodes[0].item() == pytest.approx(3.0, rel=1e-15)
    assert nodes[-1].item() == 0.0
    assert CorrelationAxis(margin=0.01, count=9).nodes()[[0, 4, 8]].tolist() == [1.0, 0.0, -1.0]


@pytest.mark.parametrize("law", [None, Rademacher(), Bernoulli(0.6), Normal(0.3, 0.8)], ids=repr)
@pytest.mark.parametrize("module", [nn.Tanh(), nn.Softplus()], ids=repr)
def test_tables_agree_with_the_series(module, law):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    q, c = (x**2).mean(1), x @ x.T / 3
    arguments = q[:, None], q, c, law
    series = dual(module)
    table = series.prepare(q.max().item(), law)

    for value, expected in zip(table.same(*arguments), series.same(*arguments), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-10)
    for value, expected in zip(table.cross(*arguments), series.cross(*arguments), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-10)


def test_variances_of_zero_are_inside_a_table():
    q = torch.tensor([0.0, 0.5], dtype=torch.float64)
    f, g, h = dual(nn.Sigmoid()).prepare(1.0, None).same(q, q, q, None)
    assert f[0].item() == pytest.approx(0.25, rel=1e-12)
    assert g[0].item() == pytest.approx(1 / 16, rel=1e-12)
    assert h[0].item() == 0.0


def test_a_table_is_built_once_for_similar_variances_and_the_same_law():
    calls = []

    def counted_tanh(x):
        calls.append(x.shape)
        return torch.tanh(x)

    smooth = Smooth(counted_tanh, "tanh")
    smooth.prepare(1.0, Normal())
    built = len(calls)
    smooth.prepare(0.9, Normal())
    assert len(calls) == built
    smooth.prepare(0.9, Rademacher())
    assert len(calls) > built


def test_tables_can_be_used_after_inference_mode():
    smooth = Smooth(torch.tanh, "tanh")
    with torch.inference_mode():
        prepared = smooth.prepare(1.0, None)
    c = torch.tensor([0.4], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, dtype=torch.float64)
    f, g, _ = prepared.same(one, one, c, None)
    (slope,) = torch.autograd.grad(f.sum(), c)

    assert slope.item() == pytest.approx(g.item(), rel=1e-10)
    assert math.isfinite(f.item())


def test_a_function_that_is_odd_up_to_rounding_errors_has_a_table():
    smooth = Smooth(lambda x: torch.sigmoid(x) - 0.5, "centred sigmoid")
    q = torch.tensor([0.5, 1.0], dtype=torch.float64)
    for law in (None, Rademacher(), Normal()):
        prepared = smooth.prepare(1.0, law)
        f, _, _ = prepared.same(q, q, q, law)
        expected = smooth.same(q, q, q, law)[0]
        torch.testing.assert_close(f, expected, rtol=1e-9, atol=1e-12)

    assert prepared.cross(q, q, q, Normal())[0].abs().max() < 1e-15
