"""Hermite coefficients, against numpy's polynomials and Mehler's formula."""

import math

import numpy as np
import torch

from embens.theory.duals import hermite


def test_coefficients_are_those_of_gauss_hermite_integrals():
    scales = torch.tensor([0.3, 1.0], dtype=torch.float64)
    found = hermite.coefficients(lambda x: torch.exp(-(x**2)) + x, scales, 8)
    points, weights = np.polynomial.hermite_e.hermegauss(120)
    for row, s in zip(found, scales.tolist(), strict=True):
        for n, value in enumerate(row.tolist()):
            polynomial = np.polynomial.hermite_e.hermeval(points, [0] * n + [1])
            function = np.exp(-((s * points) ** 2)) + s * points
            integral = (weights * function * polynomial).sum() / math.sqrt(2 * math.pi)
            assert abs(value - integral / math.sqrt(math.factorial(n))) < 1e-12


def test_mehlers_formula_gives_the_expectation_of_a_product():
    one, rho = torch.ones(1, dtype=torch.float64), 0.7
    a = hermite.coefficients(torch.erf, one, 200)[0]
    found = (a**2 * rho ** torch.arange(200).double()).sum().item()
    assert abs(found - 2 / math.pi * math.asin(2 * rho / 3)) < 1e-13
