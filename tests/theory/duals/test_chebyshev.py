"""Chebyshev interpolation, against numpy's polynomials and its own accuracy."""

import numpy as np
import pytest
import torch

from embens.theory.duals import chebyshev
from embens.theory.duals.chebyshev import Axis


@pytest.mark.parametrize("count", [2, 5, 16])
def test_basis_and_sums_are_numpys(count):
    x = torch.linspace(-1, 1, 7, dtype=torch.float64)
    expected = np.polynomial.chebyshev.chebvander(x.numpy(), count - 1)
    np.testing.assert_allclose(chebyshev.basis(x, count), expected, atol=1e-14)
    series = torch.randn(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    summed = chebyshev.clenshaw(series[:, None].expand(count, 7), x)
    np.testing.assert_allclose(summed, expected @ series.numpy(), atol=1e-13)


def test_values_at_the_nodes_and_coefficients_are_a_matrix_apart():
    nodes = chebyshev.nodes(9)
    values = nodes**3 - nodes / 2  # (T_3 + T_1) / 4
    coefficients = chebyshev.to_coefficients(9) @ values
    expected = torch.tensor([0, 0.25, 0, 0.25, 0, 0, 0, 0, 0], dtype=torch.float64)
    torch.testing.assert_close(coefficients, expected, rtol=0, atol=1e-15)


def test_an_axis_is_refined_until_it_interpolates():
    axis = Axis(0.0, 5.0, 1.0).refine(lambda roots: torch.tanh(roots)[:, None])
    roots = torch.linspace(0, 5, 50, dtype=torch.float64)
    values = axis.interpolation(roots) @ torch.tanh(axis.nodes())
    torch.testing.assert_close(values, torch.tanh(roots), rtol=0, atol=1e-12)
    assert 8 < axis.count < 192
