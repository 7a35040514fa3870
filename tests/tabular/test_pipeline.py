"""From a table to a fitted ensemble: members, schedule, time limit, weights, warm start."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from tabular.problems import classes_of, classifier, mixed_table, regressor

import embens
from embens import laws
from embens.tabular import EmbeddedEnsembleClassifier, defaults, pipeline
from embens.training import History


def test_members_and_law_have_defaults_and_can_be_chosen():
    X = torch.randn(100, 2, generator=torch.Generator().manual_seed(0)).numpy()
    small = {"width": 8, "max_epochs": 1, "tune": False, "random_state": 0}
    auto = EmbeddedEnsembleClassifier(**small).fit(X, X[:, 0] > 0)
    assert (auto.sizes_.p, auto.ensemble_.members) == (0.0, 16)
    (site,) = auto.ensemble_.spec.sites  # the output of the first layer
    assert (site.kind, site.law) == ("pre", laws.Signs(0.0))
    chosen = EmbeddedEnsembleClassifier(members=12, p=0.1, **small).fit(X, X[:, 0] > 0)
    assert (chosen.sizes_.p, chosen.ensemble_.members) == (0.1, 12)


def test_the_rate_rises_in_the_first_epoch_and_falls_along_a_cosine():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = pipeline.cosine_schedule(5, 4, math.inf)(optimizer)
    rates = []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    steps = np.arange(20)
    final = pipeline.FINAL_RATE
    cosine = final + (1 - final) * (1 + np.cos(np.pi * steps / 20)) / 2
    np.testing.assert_allclose(rates, np.minimum(1, (steps + 1) / 5) * cosine)


def test_a_fit_ends_at_its_time_limit():
    X, target = mixed_table(3000)
    began = time.monotonic()
    model = classifier(time_limit=4.0, max_epochs=100_000, patience=100_000, tune=True)
    model.fit(X, classes_of(target))
    assert model.run_.stopped == "time"
    assert time.monotonic() - began < 30  # generous, for a busy machine


def test_a_run_that_diverges_is_repeated_with_a_lower_rate(monkeypatch):
    rates, fit = [], embens.fit

    def diverges_twice(ensemble, *args, optimizer, **options):
        rates.append(optimizer.param_groups[-1]["lr"])
        if len(rates) < 3:
            raise embens.Divergence("not finite.", History([], []))
        return fit(ensemble, *args, optimizer=optimizer, **options)

    monkeypatch.setattr(embens, "fit", diverges_twice)
    x, target = mixed_table(200)
    y = classes_of(target)
    with pytest.warns(UserWarning, match="Trying again with lr="):
        model = classifier(lr=0.016, tune=False).fit(x, y)
    assert rates == [0.016, 0.004, 0.001]
    assert model.predict(x).shape == y.shape


def test_calibration_rows_are_used_for_nothing_else():
    """Other targets in the calibration rows change the intervals only."""
    X, y = mixed_table(300)
    model = regressor(max_epochs=5)
    random_state = np.random.RandomState(model.random_state)
    random_state.randint(2**31 - 1)  # the seed of training
    split_seed = random_state.randint(2**31 - 1)
    generator = torch.Generator().manual_seed(split_seed)
    split = defaults.split_rows(300, "auto", stride=2, generator=generator)
    other = y.copy()
    other[split.calibration.numpy()] += 100.0
    first, second = model.fit(X, y).predict(X), regressor(max_epochs=5).fit(X, other)
    np.testing.assert_array_equal(first, second.predict(X))
    assert second.head_.scores.min() > 10 * model.head_.scores.max()


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
