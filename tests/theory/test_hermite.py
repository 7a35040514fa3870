"""Tests of Hermite polynomials and their series."""

import math

import torch

from embens.theory.hermite import grid, sum_series, times_g, weighted_hermite


def both_sides(terms):
    """Return points and orthonormal polynomials times weights on the whole line."""
    points, _ = grid(terms)
    right = weighted_hermite(terms)
    left = right * (-1.0) ** torch.arange(terms)[:, None]
    return torch.cat([points, -points]), torch.cat([right, left], dim=1)


def test_weighted_polynomials_integrate_to_the_coefficients_of_an_exponential():
    """E[exp(t g) h_n(g)] = exp(t²/2) tⁿ / √n!."""
    points, weighted = both_sides(32)
    t = 0.7
    expected = [math.exp(t**2 / 2) * t**n / math.sqrt(math.factorial(n)) for n in range(32)]
    coefficients = weighted @ torch.exp(t * points)

    torch.testing.assert_close(
        coefficients, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-13
    )


def test_times_g_gives_the_coefficients_of_the_product_with_g():
    points, weighted = both_sides(32)
    function = torch.tanh(points) + torch.cos(points)
    product = times_g(weighted @ function)
    torch.testing.assert_close(product, (weighted @ (points * function))[:31], rtol=0, atol=1e-13)


def test_sum_series_gives_the_geometric_series_and_its_integral():
    rho = torch.tensor([-0.5, 0.0, 0.3], dtype=torch.float64)
    ones = torch.ones(64, 1, 3, dtype=torch.float64)
    integral, total = sum_series(torch.ones(1, dtype=torch.float64), ones, ones, rho)
    torch.testing.assert_close(total, 1 / (1 - rho), rtol=1e-14, atol=0)
    torch.testing.assert_close(integral, -torch.log1p(-rho), rtol=1e-14, atol=0)
