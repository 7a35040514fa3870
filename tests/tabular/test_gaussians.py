"""Gaussian head: losses, mixtures and transforms against closed forms and quadrature."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from tabular.problems import fitted, mixed_table, regressor

from embens.mixtures import crps, negative_log_likelihood
from embens.tabular import gaussians, load, neg_crps, neg_nll
from embens.tabular.gaussians import GaussianHead

MEAN = torch.tensor([[-1.0, 0.3], [0.5, 0.2], [2.0, 7.0]], dtype=torch.float64)
STD = torch.tensor([[0.5, 1.0], [1.0, 0.1], [0.3, 2.0]], dtype=torch.float64)
OUTPUTS = torch.stack([MEAN, 2 * STD.log()], -1)
Y = torch.tensor([[0.4, 1.0], [0.1, 1.0]], dtype=torch.float64)  # a number and its weight
LOSSES = ("likelihood", "squared", "quantile", "student")


def test_the_metric_is_the_negative_log_density_of_the_mixture():
    found = GaussianHead(1).metric(OUTPUTS, Y)
    torch.testing.assert_close(found, negative_log_likelihood(MEAN, STD, Y[:, 0]).mean())


def test_losses_equal_their_definitions():
    normal = -stats.norm.logpdf(Y[:, 0], MEAN, STD)
    found = GaussianHead(1, loss="likelihood").criterion(OUTPUTS, Y)
    np.testing.assert_allclose(found, normal)
    student = -stats.t.logpdf(Y[:, 0], 4, MEAN, STD)  # five GaussianHead are nearly as good
    found = GaussianHead(1, loss="student").criterion(OUTPUTS[:2], Y)
    np.testing.assert_allclose(found, student[:2], atol=0.15)
    levels = gaussians.LEVELS.double()
    quantiles = torch.linspace(-1, 2, 9, dtype=torch.float64).expand(1, 2, 9)
    found = GaussianHead(1, loss="quantile").criterion(quantiles, Y)
    off = Y[:, :1] - quantiles[0]
    pinball = torch.where(off > 0, levels * off, (levels - 1) * off)
    torch.testing.assert_close(found[0], 2 * pinball.mean(-1))


def test_the_scales_are_quantiles_of_students_t():
    expected = np.sqrt(4 / stats.chi2.ppf([0.1, 0.3, 0.5, 0.7, 0.9], 4))
    np.testing.assert_allclose(gaussians.STUDENT_SCALES, expected, atol=1e-3)


def test_quantiles_of_a_normal_give_a_mixture_with_its_moments():
    points = torch.special.ndtri(gaussians.LEVELS.double())
    outputs = (3 + 0.5 * points).expand(4, 6, 9)
    mean, std = GaussianHead(1, loss="quantile").summarise(outputs)
    np.testing.assert_allclose(mean, 3.0, atol=1e-6)
    np.testing.assert_allclose(std, 0.5, rtol=1e-5)


def test_the_log_transform_gives_the_moments_of_a_lognormal():
    head = GaussianHead(1, transform="log", knots=torch.zeros(1, 1))
    mean, log_std = 1.2, math.log(0.3)
    outputs = torch.tensor([mean, 2 * log_std]).expand(2, 3, 2)
    found = head.summarise(outputs)
    law = stats.lognorm(0.3, scale=math.exp(mean))
    np.testing.assert_allclose(found[0], law.mean(), rtol=5e-3)
    np.testing.assert_allclose(found[1], law.std(), rtol=5e-2)
    parts = [p[:, :1, 0] for p in head.mixture(outputs)]
    grid = torch.from_numpy(law.ppf((np.arange(500) + 0.5) / 500))
    divergence = law.logpdf(grid) + negative_log_likelihood(*parts, grid).numpy()
    assert 0 < divergence.mean() < 0.02  # nats


@pytest.mark.parametrize("transform", ["log", "quantile"])
def test_a_transform_and_its_way_back_are_inverse(transform):
    values = torch.from_numpy(np.random.default_rng(0).lognormal(size=(500, 2)))
    head = GaussianHead(2, transform=transform).scaled(values, torch.ones(500).double())
    packed = head.pack(values, torch.ones(500), torch.float64)
    torch.testing.assert_close(head.unpack(packed)[0], values)
    if transform == "quantile":
        assert stats.skew(packed[:, 0].numpy()) == pytest.approx(0, abs=0.2)


def test_the_log_transform_of_negative_targets_is_an_error():
    with pytest.raises(ValueError, match="not negative"):
        regressor(target_transform="log").fit(np.eye(60), np.arange(60.0) - 1)


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_learns_has_intervals_and_can_be_saved(loss, tmp_path):
    X, y = mixed_table(400)
    model = regressor(loss=loss, max_epochs=40, lr=0.01).fit(X[:300], y[:300])
    assert model.score(X[300:], y[300:]) > 0.6
    inside = model.predict_interval(X[300:], 0.9)
    assert 0.75 < ((inside[:, 0] <= y[300:]) & (y[300:] <= inside[:, 1])).mean() <= 1
    model.save(tmp_path / "model.safetensors")
    again = load(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(again.predict(X), model.predict(X))
    assert neg_nll(again, X, y) == neg_nll(model, X, y) > -2


def test_a_skewed_target_is_transformed_if_that_improves_the_score():
    X, y = mixed_table(500)
    skewed = np.exp(3 * y)
    model = regressor(tune=True).fit(X[:400], skewed[:400])
    assert model.head_.transform in ("log", "quantile")
    plain = regressor(target_transform="none").fit(X[:400], skewed[:400])
    assert neg_crps(model, X[400:], skewed[400:]) > neg_crps(plain, X[400:], skewed[400:])
    low, high = model.predict_quantiles(X[400:], (0.1, 0.9)).T
    assert 0.5 < ((low <= skewed[400:]) & (skewed[400:] <= high)).mean() < 0.97


def test_the_stopping_metric_depends_on_the_loss_by_default():
    for loss, metric in (("likelihood", "nll"), ("squared", "rmse"), ("quantile", "crps")):
        assert GaussianHead.learn(np.zeros(2), regressor(loss=loss)).stopping == metric
        explicit = GaussianHead.learn(np.zeros(2), regressor(loss=loss, metric="crps"))
        assert explicit.stopping == "crps"


def test_the_stopping_crps_is_that_of_the_transformed_target():
    plain = GaussianHead(1, stopping="crps", mean=3.0, std=2.0)
    torch.testing.assert_close(plain.metric(OUTPUTS, Y), plain.crps(OUTPUTS, Y))
    values = torch.exp(torch.randn(200, 1, dtype=torch.float64))
    head = GaussianHead(1, stopping="crps", transform="log").scaled(values, torch.ones(200))
    expected = head.std * crps(MEAN, STD, Y[:, 0]).mean()
    torch.testing.assert_close(head.metric(OUTPUTS, Y), expected.squeeze())


def test_the_constant_prediction_has_the_quantiles_of_the_target():
    target = torch.stack([torch.arange(1000.0), torch.ones(1000)], 1)
    head = GaussianHead(1, loss="quantile")
    constant = head.constant_outputs(target)
    np.testing.assert_allclose(constant[0, 0], gaussians.LEVELS * 999, rtol=1e-5)
    assert GaussianHead(3).constant_outputs(target).shape == (1, 1, 6)


class TestBounds:
    """Quantiles and intervals have values that the target can have."""

    def predictions(self, y):
        X, _ = mixed_table(300)
        model = regressor(max_epochs=10, validation_fraction=0.7).fit(X, y)
        quantiles = model.predict_quantiles(X, (0.001, 0.5, 0.999))
        return np.column_stack([quantiles, model.predict_interval(X, 0.97)])

    def test_a_target_that_is_not_negative_has_no_negative_quantiles(self):
        _, y = mixed_table(300)
        assert self.predictions(y - y.min()).min() == 0
        assert self.predictions(y - 0.5).min() < y.min() - 0.5

    def test_quantiles_of_counts_are_counts(self):
        _, y = mixed_table(300)
        counts = np.random.default_rng(0).poisson(np.exp(y - 1))
        values = self.predictions(counts)
        assert values.min() == 0
        np.testing.assert_array_equal(values, values.round())

    def test_a_target_between_0_and_1_has_no_quantiles_outside(self):
        _, y = mixed_table(300)
        fraction = (y - y.min()) / np.ptp(y)
        assert self.predictions(fraction).max() == 1
        assert self.predictions(1.1 * fraction).max() > 1.1
        assert self.predictions(fraction - 0.5).max() > 0.5

    @pytest.mark.parametrize("transform", ["none", "log", "quantile"])
    def test_a_constant_target_is_predicted_exactly(self, transform):
        X, y = mixed_table(60)
        targets = np.stack([np.full(60, 3.0), np.exp(y)], 1)
        model = regressor(target_transform=transform, validation_fraction=0.3).fit(X, targets)

        assert (model.predict(X)[:, 0] == 3).all()
        assert (model.predict_quantiles(X, (0.01, 0.99))[..., 0] == 3).all()
        assert (model.predict_interval(X, 0.8)[..., 0] == 3).all()
        assert model.predict(X)[:, 1].std() > 0

    def test_later_rows_widen_the_range_of_the_target(self):
        X, y = mixed_table(100)
        model = regressor(max_epochs=30).partial_fit(X, np.zeros(100))
        assert (model.predict(X) == 0).all()
        model.partial_fit(X, y)
        assert model.predict(X).min() < 0 < model.predict(X).max()

    def test_intervals_of_integers_keep_every_integer_inside_and_no_other(self):
        head = GaussianHead(1, integer=torch.tensor([True]))
        ends = torch.linspace(-3, 3, 25, dtype=torch.float64)
        low, high = torch.combinations(ends, with_replacement=True).unsqueeze(-1).unbind(1)
        first, last = head.interval_within_bounds(low, high)
        integers = torch.arange(-4, 5)
        inside = (low <= integers) & (integers <= high)
        has_integer = inside.any(1)

        found = (first <= integers) & (integers <= last)
        assert torch.equal(found[has_integer], inside[has_integer])
        assert (found.sum(1)[~has_integer] == 1).all()
        assert ((first - (low + high) / 2).abs()[~has_integer] <= 0.5).all()
        assert (first.frac() == 0).all()
        assert (last.frac() == 0).all()

    def test_intervals_of_integers_have_the_requested_coverage(self):
        # Rounding each end to the nearest integer made intervals of small counts too wide.
        rng = np.random.default_rng(0)
        X = rng.normal(size=(4000, 2))
        y = rng.poisson(np.exp(0.3 * X[:, 0] + 0.7))
        model = regressor(max_epochs=4, folds=4, members=8, bins=4).fit(X[:1000], y[:1000])
        low, high = model.predict_interval(X[1000:], 0.9).T
        covered = ((low <= y[1000:]) & (y[1000:] <= high)).mean()

        error = math.sqrt(0.9 * 0.1 * (1 / 1000 + 1 / 3000))
        assert (low == low.round()).all()
        assert (high == high.round()).all()
        assert abs(covered - 0.9) < 4 * error


def test_a_quantile_level_of_one_is_an_error():
    model, X, _ = fitted("regressor")
    with pytest.raises(ValueError, match="between 0 and 1"):
        model.predict_quantiles(X, [0.5, 1.0])


@pytest.mark.parametrize("transform", ["none", "log", "quantile"])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_fast_mean_is_that_of_the_whole_mixture(loss, transform):
    torch.manual_seed(0)
    values = torch.rand(50, 2, dtype=torch.float64)
    head = GaussianHead(2, loss, transform=transform).with_range(values)
    head = head.scaled(values, torch.ones(50))
    outputs = torch.randn(4, 30, head.outputs) - torch.linspace(0, 4, 30)[:, None]
    (mean,) = head.predict_mean(outputs)

    torch.testing.assert_close(mean, head.summarise(outputs)[0])
    assert (mean == 0).any() or transform != "none"  # some means are bounded by 0


def group_outputs(means, std=1.0):
    """Return outputs ``(group, member, row, output)`` of groups with one Gaussian member each."""
    log_variance = torch.full_like(means, 2 * math.log(std))
    return torch.stack([means, log_variance], -1).unsqueeze(1)


def test_scores_of_the_mean_of_groups_are_smaller_by_the_variance_between_groups():
    # Two rows, held out by groups 0 and 1; the other two groups differ by 0.2 and by 0.4.
    means = torch.tensor([[9.0, 0.3], [0.1, 9.0], [-0.1, -0.1]], dtype=torch.float64)
    scores = torch.tensor([[1.0], [0.5]], dtype=torch.float64)
    head = GaussianHead(1, scores=scores)
    corrected = head.for_mean_of_groups(group_outputs(means, std=0.5), torch.tensor([0, 1]))
    variance = (0.2**2 / 2 + 0.4**2 / 2) / 2 / 0.5**2
    factor = math.sqrt(1 - 2 / 3 * variance / ((1.0**2 + 0.5**2) / 2))

    torch.testing.assert_close(corrected.scores, factor * scores)


def test_scores_are_not_corrected_below_errors_that_only_groups_explain():
    means = 10 * torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).double()
    head = GaussianHead(1, scores=torch.ones(50, 1).double())
    fold_of_row = torch.arange(50) % 4

    corrected = head.for_mean_of_groups(group_outputs(means), fold_of_row)
    torch.testing.assert_close(corrected.scores, torch.full((50, 1), 0.5).double())  # √(1/4)
    two_groups = head.for_mean_of_groups(group_outputs(means[:2]), fold_of_row % 2)
    assert two_groups.scores is head.scores


def test_groups_differ_more_on_unseen_rows_as_far_as_their_members_do():
    # Means of members are the group's mean ± 0.2 on rows that it has not seen, ± 0.1 on others.
    generator = torch.Generator().manual_seed(0)
    means = 0.1 * torch.randn(4, 40, generator=generator, dtype=torch.float64)
    fold_of_row = torch.arange(40) % 4
    spread = torch.full_like(means, 0.1)
    spread[fold_of_row, torch.arange(40)] = 0.2
    members = torch.stack([means - spread, means + spread], 1)
    outputs = torch.stack([members, torch.zeros_like(members)], -1)
    plain = torch.stack([means, means], 1)
    equal_members = torch.stack([plain, torch.zeros_like(plain)], -1)
    head = GaussianHead(1, scores=torch.ones(40, 1).double())

    def share(outputs, fold_of_row):
        factor = head.for_mean_of_groups(outputs, fold_of_row).scores[0, 0]
        return (1 - factor**2) / 0.75

    std = (1 + 0.2**2) ** 0.5  # of the group that has not seen a row
    expected = 4 * share(equal_members, fold_of_row) / std**2
    torch.testing.assert_close(share(outputs, fold_of_row), expected)


def test_corrected_intervals_around_the_mean_of_groups_have_the_coverage():
    rows = 40_000
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(rows, generator=generator)
    means = 0.5 * torch.randn(4, rows, generator=generator)  # the true mean is 0
    fold_of_row = torch.arange(rows) % 4
    errors = noise - means[fold_of_row, torch.arange(rows)]
    head = GaussianHead(1, scores=errors.abs()[:, None])
    corrected = head.for_mean_of_groups(group_outputs(means), fold_of_row)
    half_widths = [h.scores.quantile(0.9).item() for h in (head, corrected)]

    new_errors = torch.randn(rows, generator=generator)
    new_errors -= 0.5 * torch.randn(4, rows, generator=generator).mean(0)
    before, after = ((new_errors.abs() <= width).double().mean() for width in half_widths)
    tolerance = 4 * math.sqrt(0.09 * 2 / rows)
    assert before > 0.9 + tolerance
    assert abs(after - 0.9) < tolerance
