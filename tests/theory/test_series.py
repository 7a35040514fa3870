"""Tests of series in the correlation and their tabulation."""

import torch

from embens.theory.interpolation import CorrelationAxis, evaluate
from embens.theory.series import Series, correlation_error, tabulate


def geometric(terms=64, count=4):
    """Return series whose coefficients are all 2⁻ⁿ."""
    slopes = (0.5 ** torch.arange(terms, dtype=torch.float64))[:, None, None]
    slopes = slopes.expand(terms, count, count)
    return Series(torch.ones(count, count, dtype=torch.float64), slopes, slopes)


def test_sums_are_those_of_powers_of_the_correlation():
    rho = torch.tensor([-1.0, 0.4, 1.0], dtype=torch.float64)
    f, g, h = geometric().sums(rho)
    torch.testing.assert_close(g[:, 0, 0], 1 / (1 - rho / 2), rtol=1e-14, atol=0)
    torch.testing.assert_close(f[:, 1, 2], -2 * torch.log1p(-rho / 2), rtol=1e-14, atol=0)
    assert torch.equal(g, h)


def test_the_error_falls_with_the_number_of_nodes():
    errors = [
        correlation_error(geometric().corner(), CorrelationAxis(margin=0.2, count=count), floor=0.0)
        for count in (5, 9, 17, 65)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-14


def test_tabulated_sums_are_interpolated():
    axis = CorrelationAxis(margin=0.2, count=65)
    sums = tabulate(geometric(), axis.nodes())
    constant = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)  # the same at all roots
    rho = torch.tensor([-0.9, 0.1, 0.77], dtype=torch.float64)
    values = evaluate(sums.g, constant, constant, axis.to_unit(rho))

    torch.testing.assert_close(values, 1 / (1 - rho / 2), rtol=1e-13, atol=0)
