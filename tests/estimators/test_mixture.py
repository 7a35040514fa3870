"""A mixture of Gaussians: density, quantiles and score, each by two roads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from embens.estimators import mixture

MEAN = torch.tensor([[-1.0, 0.3], [0.5, 0.2], [2.0, 7.0]], dtype=torch.float64)
STD = torch.tensor([[0.5, 1.0], [1.0, 0.1], [0.3, 2.0]], dtype=torch.float64)


def distribution(y, column):
    parts = [stats.norm.cdf(y, m, s) for m, s in zip(MEAN[:, column], STD[:, column], strict=True)]
    return np.mean(parts, 0)


@pytest.mark.parametrize("column", [0, 1])
class TestAMixture:
    def test_has_the_density_that_is_its_distributions_slope(self, column):
        y, step = 0.7, 1e-5
        slope = (distribution(y + step, column) - distribution(y - step, column)) / (2 * step)
        found = mixture.log_density(MEAN[:, column], STD[:, column], torch.tensor(y)).exp()
        assert found.item() == pytest.approx(slope, rel=1e-6)

    @pytest.mark.parametrize("level", [0.01, 0.3, 0.5, 0.95])
    def test_has_quantiles_that_its_distribution_undoes(self, column, level):
        found = mixture.quantile(MEAN, STD, level)[column].item()
        assert distribution(found, column) == pytest.approx(level, abs=1e-9)

    def test_has_the_score_that_the_integral_gives(self, column):
        y = 0.4
        expected = integrate.quad(
            lambda t: (distribution(t, column) - (t >= y)) ** 2, -40, 60, points=[y], limit=400
        )[0]
        found = mixture.crps(MEAN, STD, torch.full((2,), y, dtype=torch.float64))[column]
        assert found.item() == pytest.approx(expected, abs=1e-7)


def test_a_quantile_level_outside_is_an_error():
    with pytest.raises(ValueError, match="between 0 and 1"):
        mixture.quantile(MEAN, STD, 1.0)
