"""Regressor: mixture, quantiles, conformal intervals, several targets, scorers."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from scipy import stats
from tabular.problems import fitted, mixed_table, regressor

from embens.tabular import neg_crps, neg_nll


class TestTheRegressor:
    def setup_method(self):
        self.model, self.X, self.y = fitted("regressor")

    def test_standard_deviations_are_those_of_the_mixture(self):
        mean, std = self.model.predict(self.X, return_std=True)
        means, stds = self.model.predict_members(self.X)
        np.testing.assert_allclose(mean, means.mean(0))
        np.testing.assert_allclose(std**2, (stds**2 + means**2).mean(0) - means.mean(0) ** 2)
        uncertainty = self.model.predict_uncertainty(self.X)
        np.testing.assert_allclose(uncertainty.total, std**2)
        np.testing.assert_allclose(uncertainty.aleatoric + uncertainty.epistemic, uncertainty.total)

    def test_quantiles_are_those_of_the_mixture_and_in_order(self):
        quantiles = self.model.predict_quantiles(self.X, (0.1, 0.5, 0.9))
        assert (np.diff(quantiles, axis=1) > 0).all()
        means, stds = self.model.predict_mixture(self.X)
        levels = stats.norm.cdf(quantiles[None, :, 2], means, stds).mean(0)
        np.testing.assert_allclose(levels, 0.9, atol=1e-8)

    def test_intervals_have_the_requested_coverage(self):
        X, y = mixed_table(2000, seed=1)
        model = regressor(max_epochs=8).fit(X[:1000], y[:1000])
        interval = model.predict_interval(X[1000:], 0.9)
        covered = ((interval[:, 0] <= y[1000:]) & (y[1000:] <= interval[:, 1])).mean()
        calibration_rows = len(model.head_.scores)
        assert calibration_rows == 100
        error = math.sqrt(0.09 * (1 / 1000 + 1 / calibration_rows))
        assert covered > 0.9 - 4 * error
        assert covered < 0.9 + 4 * error + 1 / calibration_rows

    def test_intervals_without_held_out_rows_are_an_error(self):
        model = regressor(max_epochs=2, validation_fraction=0.0).fit(self.X, self.y)
        with pytest.raises(ValueError, match="held out none"):
            model.predict_interval(self.X)
        assert model.held_out_ is None


def test_intervals_of_fewer_than_a_hundred_calibration_rows_are_reported():
    X, y = mixed_table(600)
    model = regressor(max_epochs=8, validation_fraction=0.3).fit(X, y)
    assert len(model.head_.scores) == 90
    with pytest.warns(UserWarning, match=r"Only 90 held-out rows .* deviation of 0\.03"):
        model.predict_interval(X)
    model = regressor(max_epochs=8, validation_fraction=0.4).fit(X, y)
    assert len(model.head_.scores) == 120
    with warnings.catch_warnings(action="error"):
        model.predict_interval(X)


def test_one_quantile_is_a_vector():
    model, X, _ = fitted("regressor")
    both = model.predict_quantiles(X, (0.3, 0.5))
    np.testing.assert_array_equal(model.predict_quantiles(X, 0.3), both[:, 0])


def test_several_targets_are_predicted_together():
    X, target = mixed_table()
    y = np.stack([target, -5 * target + 100], 1)
    model = regressor(max_epochs=40).fit(X, y)

    assert model.score(X, y) > 0.5
    assert model.predict_interval(X).shape == (240, 2, 2)
    assert model.predict_quantiles(X).shape == (240, 3, 2)


@pytest.mark.parametrize("scorer", [neg_nll, neg_crps])
def test_a_weight_equals_repeated_rows_in_a_score(scorer):
    model, X, y = fitted("regressor")
    weights = np.arange(len(y)) % 3
    rows = np.repeat(np.arange(len(y)), weights)
    repeated = scorer(model, X.iloc[rows], y[rows])
    assert scorer(model, X, y, sample_weight=weights) == pytest.approx(repeated, rel=1e-6)


def test_a_distribution_score_of_a_classifier_is_an_error_with_the_right_scorer():
    model, X, y = fitted("classifier")
    with pytest.raises(TypeError, match="neg_log_loss"):
        neg_crps(model, X, y)


def test_the_mean_of_a_target_that_is_never_negative_is_not_negative():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 2))
    y = np.maximum(X[:, 0], 0.0)
    model = regressor(max_epochs=5, target_transform="none").fit(X, y)
    assert model.predict(4 * X).min() >= 0
    shifted = regressor(max_epochs=5, target_transform="none").fit(X, y - 1)
    assert shifted.predict(4 * X).min() < 0
