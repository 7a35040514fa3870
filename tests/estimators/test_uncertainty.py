"""Mixtures, temperatures and conformal intervals, each by two roads."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from estimators.problems import classes_of, classifier, fitted, mixed_table, regressor
from scipy import integrate, stats

from embens.estimators import mixture, neg_crps, neg_nll
from embens.estimators.calibration import best_scale, conformal_quantile
from embens.estimators.heads import Classes, Gaussians

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


class TestHeads:
    def test_the_class_metric_is_scikit_learns_log_loss_of_the_mean_probability(self):
        from sklearn.metrics import log_loss

        generator = torch.Generator().manual_seed(0)
        outputs = torch.randn(5, 30, 3, generator=generator, dtype=torch.float64)
        codes = torch.arange(30).remainder(3)[:, None]
        weights = torch.rand(30, generator=generator, dtype=torch.float64)
        chance = outputs.softmax(-1).mean(0).numpy()
        plain = Classes((3,))
        found = plain.metric(outputs, plain.pack(codes, None, torch.float64))
        assert found.item() == pytest.approx(log_loss(codes[:, 0], chance))
        head = Classes((3,), weighted=True)
        found = head.metric(outputs, head.pack(codes, weights, torch.float64))
        expected = log_loss(codes[:, 0], chance, sample_weight=weights.numpy())
        assert found.item() == pytest.approx(expected)

    def test_a_weighted_criterion_is_the_weighted_mean_of_the_plain_one(self):
        generator = torch.Generator().manual_seed(0)
        outputs = torch.randn(20, 5, generator=generator)
        codes = torch.stack([torch.arange(20) % 3, torch.arange(20) % 2], 1)
        several, weighted = Classes((3, 2)), Classes((3, 2), weighted=True)
        weights = torch.rand(20, generator=generator)
        one = several.criterion(outputs, several.pack(codes, None, torch.float32))
        other = weighted.criterion(outputs, weighted.pack(codes, weights, torch.float32))
        torch.testing.assert_close(other, one * weights)

    def test_the_gaussian_metric_is_the_mixtures_density(self):
        outputs = torch.cat([MEAN[..., None], 2 * STD.log()[..., None]], -1)
        target = torch.tensor([[0.4], [0.1]], dtype=torch.float64)
        found = Gaussians(1).metric(outputs, target)
        expected = -mixture.log_density(MEAN, STD, target[:, 0]).mean()
        torch.testing.assert_close(found, expected)


class TestConformal:
    def test_the_quantile_is_the_smallest_score_that_enough_scores_do_not_exceed(self):
        scores = torch.rand(99, generator=torch.Generator().manual_seed(0))
        found = conformal_quantile(scores, 0.9)
        assert int((scores <= found).sum()) == 90  # ⌈100 · 0.9⌉

    def test_intervals_cover_as_promised_over_many_calibration_sets(self):
        generator = torch.Generator().manual_seed(0)
        rounds, rows = 4000, 30
        scores = torch.rand(rounds, rows + 1, generator=generator)
        covered = [float(s[-1] <= conformal_quantile(s[:-1], 0.8)) for s in scores]
        error = math.sqrt(0.8 * 0.2 / rounds)
        expected = math.ceil(31 * 0.8) / 31  # exactly, for scores that don't tie
        assert np.mean(covered) == pytest.approx(expected, abs=4 * error)

    def test_too_few_rows_for_a_coverage_are_an_error_that_counts(self):
        with pytest.raises(ValueError, match="needs at least 19 held-out rows; there are 18"):
            conformal_quantile(torch.rand(18), 0.95)
        with pytest.raises(ValueError, match="between 0 and 1"):
            conformal_quantile(torch.rand(18), 90)


def test_the_best_temperature_undoes_one_that_was_put_in():
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(1, 20_000, 3, generator=generator, dtype=torch.float64)
    codes = torch.multinomial(logits[0].softmax(-1), 1, generator=generator)
    head = Classes((3,))
    target = head.pack(codes, None, torch.float64)
    assert best_scale(lambda t: head.metric(3 * logits / t, target)) == pytest.approx(3, rel=0.05)


class TestTheClassifier:
    def setup_method(self):
        self.model, X, y = fitted()
        self.test = (X, y)

    def test_uncertainty_adds_up_and_is_the_entropy_of_the_prediction(self):
        found = self.model.predict_uncertainty(self.test[0])
        chance = self.model.predict_proba(self.test[0])
        np.testing.assert_allclose(found.total, stats.entropy(chance, axis=1), atol=1e-9)
        np.testing.assert_allclose(found.aleatoric + found.epistemic, found.total)
        assert (found.epistemic >= 0).all()
        assert found.epistemic.max() > 0

    def test_members_average_to_the_prediction(self):
        members = self.model.predict_members(self.test[0])
        assert members.shape == (4, 100, 3)
        np.testing.assert_allclose(members.mean(0), self.model.predict_proba(self.test[0]))

    def test_calibration_is_no_worse_on_the_rows_it_is_chosen_by(self):
        X, target = mixed_table(400)
        plain = classifier(max_epochs=30, calibrate=False).fit(X[:300], classes_of(target[:300]))
        assert plain.temperature_ == 1.0
        assert self.model.temperature_ != 1.0
        factor = self.model.temperature_
        np.testing.assert_allclose(
            np.log(self.model.predict_members(self.test[0])[..., :1])
            - np.log(self.model.predict_members(self.test[0])[..., 1:]),
            (
                np.log(plain.predict_members(self.test[0])[..., :1])
                - np.log(plain.predict_members(self.test[0])[..., 1:])
            )
            / factor,
            rtol=1e-4, atol=1e-6,
        )  # fmt: skip


class TestTheRegressor:
    def setup_method(self):
        self.model, self.X, self.y = fitted("regressor")

    def test_standard_deviations_are_those_of_the_mixture(self):
        mean, std = self.model.predict(self.X, return_std=True)
        means, stds = self.model.predict_members(self.X)
        np.testing.assert_allclose(mean, means.mean(0))
        np.testing.assert_allclose(std**2, (stds**2 + means**2).mean(0) - means.mean(0) ** 2)
        unsure = self.model.predict_uncertainty(self.X)
        np.testing.assert_allclose(unsure.total, std**2)
        np.testing.assert_allclose(unsure.aleatoric + unsure.epistemic, unsure.total)

    def test_quantiles_are_those_of_the_mixture_and_in_order(self):
        found = self.model.predict_quantiles(self.X, (0.1, 0.5, 0.9))
        assert (np.diff(found, axis=1) > 0).all()
        means, stds = self.model.predict_members(self.X)
        shares = stats.norm.cdf(found[None, :, 2], means, stds).mean(0)
        np.testing.assert_allclose(shares, 0.9, atol=1e-8)

    def test_intervals_hold_their_coverage_on_new_rows(self):
        X, y = mixed_table(2000, seed=1)
        model = regressor(max_epochs=8).fit(X[:1000], y[:1000])
        interval = model.predict_interval(X[1000:], 0.9)
        covered = ((interval[:, 0] <= y[1000:]) & (y[1000:] <= interval[:, 1])).mean()
        held = len(model.scores_)
        assert held == 100
        error = math.sqrt(0.09 * (1 / 1000 + 1 / held))  # of test rows and of calibration rows
        assert covered > 0.9 - 4 * error
        assert covered < 0.9 + 4 * error + 1 / held

    def test_calibration_rows_are_used_for_nothing_else(self):
        """With other targets in the calibration rows, only the intervals may change."""
        from embens.estimators import choices
        from embens.estimators.fitting import draw_seed
        from embens.training import randomness

        X, y = mixed_table(300)
        model = regressor(max_epochs=5)
        seed = randomness.combine(draw_seed(model), 1)
        generator = torch.Generator().manual_seed(seed)
        parts = choices.split(300, "auto", calibrate=True, generator=generator)
        other = y.copy()
        other[parts.calibrate.numpy()] += 100.0
        first, second = model.fit(X, y).predict(X), regressor(max_epochs=5).fit(X, other)
        np.testing.assert_array_equal(first, second.predict(X))
        assert second.scores_.min() > 10 * model.scores_.max()

    def test_a_fit_without_held_out_rows_says_why_there_are_no_intervals(self):
        model = regressor(max_epochs=2, validation_fraction=0.0).fit(self.X, self.y)
        with pytest.raises(ValueError, match="held out none"):
            model.predict_interval(self.X)
        assert model.held_out_ is None


def test_a_classifier_that_is_right_on_all_held_out_rows_is_not_made_more_certain_without_bound():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 2))
    X[:, 0] += 4 * np.sign(X[:, 0])
    model = classifier(max_epochs=40).fit(X, X[:, 0] > 0)
    assert model.score(X, X[:, 0] > 0) == 1.0
    assert model.temperature_ > 0.5
    assert model.predict_proba(X).max(1).mean() > 0.95


def test_one_quantile_is_a_vector():
    model, X, _ = fitted("regressor")
    both = model.predict_quantiles(X, (0.3, 0.5))
    np.testing.assert_array_equal(model.predict_quantiles(X, 0.3), both[:, 0])


@pytest.mark.parametrize("scorer", [neg_nll, neg_crps])
def test_a_weight_counts_like_equal_rows_in_a_score(scorer):
    model, X, y = fitted("regressor")
    weights = np.arange(len(y)) % 3
    rows = np.repeat(np.arange(len(y)), weights)
    repeated = scorer(model, X.iloc[rows], y[rows])
    assert scorer(model, X, y, sample_weight=weights) == pytest.approx(repeated, rel=1e-6)


def test_a_classifier_is_told_which_scorer_is_its_own():
    model, X, y = fitted("classifier")
    with pytest.raises(TypeError, match="neg_log_loss"):
        neg_crps(model, X, y)


def test_a_few_held_out_rows_hardly_change_the_standard_deviations_and_many_do():
    rng = np.random.default_rng(0)
    model = regressor(max_epochs=1)
    model.single_, model.y_mean_, model.y_std_ = True, torch.zeros(1).double(), torch.ones(1)
    factors = []
    for rows in (7, 10_000):
        model._forget_calibration()
        near = torch.from_numpy(0.25 * rng.normal(size=(rows, 1)))
        outputs = torch.zeros(4, rows, 2)
        model._calibrate((outputs, near), (outputs, near), None)
        factors.append(float(model.temperature_[0]))
        by_hand = math.sqrt((float((near**2).sum()) + 30) / (rows + 30))
        assert factors[-1] == pytest.approx(by_hand, abs=1e-3)
    assert factors[0] > 0.85
    assert factors[1] < 0.3
