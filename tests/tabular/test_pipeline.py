"""From encoded rows to a fitted ensemble: time limit, remarks, weights, warm start."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning
from tabular.problems import classes_of, classifier, mixed_table, regressor

from embens import laws
from embens.tabular import EmbeddedEnsembleClassifier, load, pipeline, preparation


def test_members_and_law_have_defaults_and_can_be_chosen():
    X = torch.randn(100, 2, generator=torch.Generator().manual_seed(0)).numpy()
    small = {"width": 8, "max_epochs": 1, "tune": False, "random_state": 0}
    auto = EmbeddedEnsembleClassifier(**small).fit(X, X[:, 0] > 0)
    assert (auto.sizes_.p, auto.ensemble_.members) == (0.0, 16)
    for group in auto.ensemble_.groups:
        (site,) = group.spec.sites  # the output of the first layer
        assert (site.kind, site.law) == ("pre", laws.Signs(0.0))
    chosen = EmbeddedEnsembleClassifier(members=12, p=0.1, **small).fit(X, X[:, 0] > 0)
    assert (chosen.sizes_.p, chosen.ensemble_.members) == (0.1, 12)


class TestTimeLimit:
    """A limited fit ends in time, with a warning that training was cut short."""

    def fit(self, rows, seconds, **changes):
        X, target = mixed_table(rows)
        model = classifier(time_limit=seconds, max_epochs=100_000, patience=100_000, **changes)
        start = time.monotonic()
        with pytest.warns(ConvergenceWarning, match=f"time_limit={seconds:g} ended training in"):
            model.fit(X, classes_of(target))
        return model, time.monotonic() - start

    @pytest.mark.parametrize("rows", [300, 3000])
    def test_the_fit_takes_the_limited_time(self, rows, monkeypatch):
        """By the time of the processor, which other processes do not change."""
        monkeypatch.setattr(time, "monotonic", time.process_time)
        model, seconds = self.fit(rows, 2.0, tune=True, width=128, members=16)
        assert model.run_.stopped == "time"
        assert model.head_.scores is not None
        assert seconds == pytest.approx(2.0, rel=0.25)

    def test_rows_are_drawn_if_their_preparation_would_take_too_long(self, monkeypatch):
        monkeypatch.setattr(preparation, "PREPARATION_SHARE", 0.0)
        X, target = mixed_table(1200)
        y = classes_of(target)
        y[0] = "rare"
        model = classifier(time_limit=60, max_epochs=1)
        with pytest.warns(ConvergenceWarning, match="1000 of 1200 were drawn at random"):
            model.fit(X, y)

        assert "rare" in model.classes_
        assert model.predict_proba(X).shape == (1200, len(np.unique(y)))

    @pytest.mark.parametrize(
        "options", [{}, {"own": False}, {"sites": "all"}, {"family": "last_layer_dropout"}]
    )
    def test_a_model_without_time_to_learn_predicts_the_class_frequencies(self, options):
        X, target = mixed_table(400)
        y = classes_of(target)
        model = classifier(time_limit=1, lr=1e-9, max_epochs=10_000, calibrate=False, **options)
        with (
            pytest.warns(ConvergenceWarning, match="time_limit=1 ended"),
            pytest.warns(ConvergenceWarning, match="predicts the class frequencies for every row"),
        ):
            model.fit(X, y)
        probabilities = model.predict_proba(X)

        np.testing.assert_allclose(probabilities - probabilities[0], 0, atol=1e-6)
        np.testing.assert_allclose(
            probabilities[0], [np.mean(y == c) for c in model.classes_], atol=0.02
        )
        assert model.held_out_["ensemble"] == pytest.approx(model.held_out_["constant"])

    @pytest.mark.parametrize("loss", ["quantile", "squared"])
    def test_a_regressor_without_time_to_learn_predicts_the_mean(self, loss):
        X, target = mixed_table(400)
        model = regressor(time_limit=1, lr=1e-9, max_epochs=10_000, calibrate=False, loss=loss)
        with (
            pytest.warns(ConvergenceWarning, match="time_limit=1 ended"),
            pytest.warns(ConvergenceWarning, match="predicts the mean and spread of all rows"),
        ):
            model.fit(X, target)
        mean, std = model.predict(X, return_std=True)

        np.testing.assert_allclose(mean, target.mean(), atol=0.1 * target.std())
        np.testing.assert_allclose(std, target.std(), rtol=0.25)

    def test_a_slow_calibration_gets_fewer_rows_and_an_earlier_deadline(self, monkeypatch):
        """Calibration takes 2 ms a row on this machine, whatever its real speed is."""
        calibrate = pipeline.calibrate
        slowed = []

        def slow(ensemble, prepared):
            rows = len(prepared.validation)
            slowed.append(rows)
            time.sleep(0.002 * rows)
            return calibrate(ensemble, prepared)

        monkeypatch.setattr(pipeline, "calibrate", slow)
        _, seconds = self.fit(3000, 3.0)
        assert max(slowed) < 300  # of 450
        assert seconds < 4.5

    # A busy machine may leave too little time to learn anything.
    @pytest.mark.filterwarnings("ignore:The training was too short")
    def test_there_is_no_search_if_the_training_itself_is_cut_short(self, monkeypatch):
        monkeypatch.setattr(pipeline, "search", None)  # would raise if it were called
        self.fit(300, 1.0, tune=True)


@pytest.mark.parametrize("seed", range(3))
def test_skewed_counts_stay_counts_when_their_transform_is_chosen(seed):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(120, 3))
    counts = np.exp(2 * rng.normal(size=120) + X[:, 0]).round()
    model = regressor(members=2, width=16, max_epochs=4, tune=True).fit(X, counts)
    quantiles = model.predict_quantiles(X, (0.01, 0.9))

    assert quantiles.min() >= 0
    np.testing.assert_array_equal(quantiles, quantiles.round())


def test_an_ensemble_that_is_worse_than_a_constant_is_reported():
    X, target = mixed_table(200)
    for model, y, name in (
        (classifier(max_epochs=1, lr=1e-6, calibrate=False), classes_of(target), "frequencies"),
        (regressor(max_epochs=1, lr=1e-6, calibrate=False), target, "mean and spread"),
    ):
        with pytest.warns(ConvergenceWarning, match=f"worse than a constant .* {name}"):
            model.fit(X, y)
        assert model.held_out_["ensemble"] > model.held_out_["constant"]
        assert "worse than a constant" in model.summary()
    tiny = classifier(max_epochs=1, lr=1e-6)
    with pytest.warns(ConvergenceWarning, match="on 30 rows"):
        tiny.fit(X[:30], classes_of(target[:30]))


class TestKeepMembers:
    """``keep_members`` keeps the members that predict the validation rows best together."""

    @pytest.mark.parametrize("make", [classifier, regressor])
    def test_a_fit_keeps_as_many_members_and_reports_the_loss_of_all(self, make, tmp_path):
        X, target = mixed_table()
        y = classes_of(target) if make is classifier else target
        everything = make(max_epochs=3).fit(X, y)
        model = make(max_epochs=3, keep_members=2).fit(X, y)
        assert model.ensemble_.members == model.sizes_.members == len(model.members_) == 2
        assert model.held_out_["all_members"] == pytest.approx(everything.held_out_["ensemble"])
        best_member = min(everything.held_out_["members"])
        assert np.isclose(model.held_out_["members"], best_member).any()
        assert "all members before selection" in model.summary()
        model.save(tmp_path / "model")
        np.testing.assert_array_equal(load(tmp_path / "model").predict(X), model.predict(X))

    def test_validation_rows_are_needed(self):
        X, target = mixed_table(40)
        with pytest.warns(ConvergenceWarning, match="keep_members needs validation rows"):
            model = regressor(keep_members=2, max_epochs=1).fit(X, target)

        assert model.ensemble_.members == 4
        with pytest.raises(ValueError, match="refit=True trains with them"):
            regressor(keep_members=2, refit=True).fit(X, target)
        with pytest.raises(ValueError, match="keep_members must be a positive integer or 'all'"):
            regressor(keep_members=0).fit(X, target)


class TestFit:
    def setup_method(self):
        self.X, self.target = mixed_table()
        self.y = classes_of(self.target)

    def test_an_integer_weight_equals_repeated_rows(self):
        X, y = self.X[:20], self.y[:20]
        weights = np.arange(20) % 3
        weighted = classifier().fit(X, y, sample_weight=weights)
        rows = np.repeat(np.arange(20), weights)
        repeated = classifier().fit(X.iloc[rows], y[rows])

        np.testing.assert_allclose(weighted.predict_proba(X), repeated.predict_proba(X), rtol=1e-7)

    def test_equal_weights_change_nothing(self):
        plain = regressor().fit(self.X, self.target)
        heavy = regressor().fit(self.X, self.target, sample_weight=np.full(len(self.X), 7.0))
        np.testing.assert_allclose(heavy.predict(self.X), plain.predict(self.X), rtol=1e-4)

    def test_weights_change_the_prediction(self):
        X = self.X[["open"]]
        y = np.where(np.arange(len(X)) % 2, "a", "b")
        model = classifier(max_epochs=30, validation_fraction=0.0)
        model.fit(X, y, sample_weight=np.where(y == "a", 9.0, 1.0))
        assert model.predict_proba(X)[:, 0].mean() == pytest.approx(0.9, abs=0.05)

    def test_a_warm_start_continues_from_the_current_weights(self):
        model = classifier(warm_start=True, max_epochs=3).fit(self.X, self.y)
        first = model.held_out_["ensemble"]
        ensemble = model.ensemble_
        model.set_params(max_epochs=15).fit(self.X, self.y)

        assert model.ensemble_ is ensemble
        assert model.held_out_["ensemble"] < first
        with pytest.raises(ValueError, match="warm start cannot add classes"):
            model.fit(self.X, np.where(self.X["open"], "new", self.y))

    def test_the_same_random_state_gives_the_same_model_and_leaves_the_global_one_alone(self):
        state = torch.get_rng_state()
        first, second = (classifier().fit(self.X, self.y).predict_proba(self.X) for _ in "ab")
        other = classifier(random_state=1).fit(self.X, self.y).predict_proba(self.X)

        np.testing.assert_array_equal(first, second)
        assert np.abs(first - other).max() > 1e-4
        assert torch.equal(torch.get_rng_state(), state)
