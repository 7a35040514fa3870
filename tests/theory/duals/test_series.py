"""Chebyshev and Hermite series, against numpy's polynomials and Mehler's formula."""

import math

import numpy as np
import pytest
import torch

from embens.theory.duals import series
from embens.theory.duals.series import Axis


@pytest.mark.parametrize("count", [2, 5, 16])
def test_basis_and_sums_are_numpys(count):
    x = torch.linspace(-1, 1, 7, dtype=torch.float64)
    expected = np.polynomial.chebyshev.chebvander(x.numpy(), count - 1)
    np.testing.assert_allclose(series.chebyshev_basis(x, count), expected, atol=1e-14)
    random = torch.randn(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    summed = series.clenshaw(random[:, None].expand(count, 7), x)
    np.testing.assert_allclose(summed, expected @ random.numpy(), atol=1e-13)


def test_values_at_the_nodes_and_coefficients_are_a_matrix_apart():
    nodes = series.chebyshev_nodes(9)
    values = nodes**3 - nodes / 2  # (T_3 + T_1) / 4
    coefficients = series.to_chebyshev(9) @ values
    expected = torch.tensor([0, 0.25, 0, 0.25, 0, 0, 0, 0, 0], dtype=torch.float64)
    torch.testing.assert_close(coefficients, expected, rtol=0, atol=1e-15)


def test_an_axis_is_refined_until_it_interpolates():
    axis = Axis(0.0, 5.0, 1.0).refine(lambda roots: torch.tanh(roots)[:, None])
    roots = torch.linspace(0, 5, 50, dtype=torch.float64)
    values = axis.interpolation(roots) @ torch.tanh(axis.nodes())
    torch.testing.assert_close(values, torch.tanh(roots), rtol=0, atol=1e-12)
    assert 8 < axis.count < 192


def test_coefficients_are_those_of_gauss_hermite_integrals():
    scales = torch.tensor([0.3, 1.0], dtype=torch.float64)
    found = series.to_hermite(lambda x: torch.exp(-(x**2)) + x, scales, 8)
    points, weights = np.polynomial.hermite_e.hermegauss(120)
    for row, s in zip(found, scales.tolist(), strict=True):
        for n, value in enumerate(row.tolist()):
            polynomial = np.polynomial.hermite_e.hermeval(points, [0] * n + [1])
            function = np.exp(-((s * points) ** 2)) + s * points
            integral = (weights * function * polynomial).sum() / math.sqrt(2 * math.pi)
            assert abs(value - integral / math.sqrt(math.factorial(n))) < 1e-12


def test_mehlers_formula_gives_the_expectation_of_a_product():
    one, rho = torch.ones(1, dtype=torch.float64), 0.7
    a = series.to_hermite(torch.erf, one, 200)[0]
    found = (a**2 * rho ** torch.arange(200).double()).sum().item()
    assert abs(found - 2 / math.pi * math.asin(2 * rho / 3)) < 1e-13
