"""Mixtures of normals against torch.distributions, scipy and samples."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch.distributions import Categorical, MixtureSameFamily, Normal

from embens.mixtures import CACHED_VALUES, best_scale, crps, negative_log_likelihood, quantile


@pytest.fixture
def mixture() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    means = 2 * torch.randn(4, 7, generator=generator, dtype=torch.float64)
    stds = 0.2 + torch.rand(4, 7, generator=generator, dtype=torch.float64)
    return means, stds


@pytest.fixture
def target() -> torch.Tensor:
    return torch.linspace(-3, 3, 7, dtype=torch.float64)


def test_the_likelihood_is_that_of_torch_distributions(mixture, target):
    means, stds = mixture
    weights = Categorical(torch.ones(7, 4, dtype=torch.float64))
    expected = MixtureSameFamily(weights, Normal(means.T, stds.T)).log_prob(target)
    torch.testing.assert_close(negative_log_likelihood(means, stds, target), -expected)


def test_the_likelihood_of_point_masses_is_never_nan():
    point = torch.zeros(1, 2)
    values = negative_log_likelihood(point, point, torch.tensor([0.0, 1.0]))
    assert values[0] < -80
    assert values[1] == math.inf


def test_the_crps_of_a_normal_is_the_closed_form(target):
    # Gneiting and Raftery (2007), equation 21.
    mean, std = 0.5, 1.5
    z = (target.numpy() - mean) / std
    normal = stats.norm
    expected = std * (z * (2 * normal.cdf(z) - 1) + 2 * normal.pdf(z) - 1 / math.sqrt(math.pi))
    score = crps(torch.full((1, 7), mean).double(), torch.full((1, 7), std).double(), target)

    assert score.numpy() == pytest.approx(expected, rel=1e-12)


def test_the_crps_is_the_integral_of_the_squared_error_of_the_distribution(mixture, target):
    means, stds = mixture
    grid = torch.linspace(-15, 15, 60_001, dtype=torch.float64)
    cdf = torch.special.ndtr((grid[:, None, None] - means) / stds).mean(1)
    step = (grid[:, None] >= target).double()
    expected = torch.trapezoid((cdf - step).square(), grid, dim=0)

    torch.testing.assert_close(crps(means, stds, target), expected, rtol=0, atol=1e-3)


def test_the_crps_of_point_masses_is_that_of_the_empirical_distribution():
    means = torch.tensor([[0.0], [1.0], [5.0]])
    pairs = (means - means.T).abs().mean()
    expected = (means - 2.0).abs().mean(0) - pairs / 2
    torch.testing.assert_close(crps(means, torch.zeros(3, 1), torch.tensor([2.0])), expected)


def test_the_crps_of_many_rows_equals_that_of_each_row():
    rows = 2 * CACHED_VALUES // 40 + 3  # several blocks, the last one smaller
    means, stds = torch.randn(2, 40, rows, 1, dtype=torch.float64)
    stds, target = stds.abs() + 0.01, torch.zeros(rows, 1, dtype=torch.float64)
    scores = crps(means, stds, target)

    for row in (0, rows // 2, rows - 1):
        torch.testing.assert_close(scores[row], crps(means[:, row], stds[:, row], target[row]))


@pytest.mark.parametrize("q", [1e-6, 0.05, 0.5, 0.975])
def test_quantiles_invert_the_distribution_function(mixture, q):
    means, stds = mixture
    values = quantile(means, stds, q)
    probabilities = torch.special.ndtr((values - means) / stds).mean(0)
    torch.testing.assert_close(probabilities, torch.full_like(values, q), rtol=1e-9, atol=0)


def test_quantiles_of_point_masses_are_points():
    means = torch.tensor([[0.0], [1.0], [5.0]])
    assert quantile(means, torch.zeros(3, 1), 0.5).item() == pytest.approx(1.0)
    assert quantile(means[:1], torch.zeros(1, 1), 0.1).item() == 0


def test_quantiles_keep_the_dtype_and_raise_out_of_range():
    values = quantile(torch.zeros(1, 3), torch.ones(1, 3), 0.3)
    assert values.dtype == torch.float32
    with pytest.raises(ValueError, match="q must be a number between 0 and 1, got 1"):
        quantile(torch.zeros(1, 3), torch.ones(1, 3), 1)


def test_the_best_scale_is_a_minimum_or_one():
    assert best_scale(lambda scale: torch.tensor((math.log(scale) - 1) ** 2)) == pytest.approx(
        math.e, rel=1e-3
    )
    assert best_scale(lambda scale: torch.tensor(0.0)) == 1.0
