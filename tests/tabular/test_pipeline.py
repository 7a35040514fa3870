"""From a table to a fitted ensemble: who decides what, and which rows take part in it."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from estimators.problems import classes_of, classifier, mixed_table, regressor

import embens
from embens import laws
from embens.estimators import EmbeddedEnsembleClassifier, choices, pipeline
from embens.training import History, randomness


def test_members_and_their_law_are_fixed_numbers_unless_they_are_given():
    X = torch.randn(100, 2, generator=torch.Generator().manual_seed(0)).numpy()
    small = {"width": 8, "max_epochs": 1, "tune": False, "random_state": 0}
    auto = EmbeddedEnsembleClassifier(**small).fit(X, X[:, 0] > 0)
    assert (auto.sizes_.p, auto.ensemble_.members) == (0.0, 16)
    (site,) = auto.ensemble_.plan.sites  # what the first layer gives
    assert (site.kind, site.law) == ("pre", laws.Signs(0.0))
    assert auto.ensemble_.plan.own_last
    given = EmbeddedEnsembleClassifier(members=12, p=0.1, **small)
    given.fit(X, X[:, 0] > 0)
    assert (given.sizes_.p, given.ensemble_.members) == (0.1, 12)


def test_the_rate_rises_in_the_first_epoch_and_falls_along_a_cosine():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = pipeline.falling(5, 4, math.inf)(optimizer)
    rates = []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    done = np.arange(20) / 20
    fall = pipeline.FLOOR + (1 - pipeline.FLOOR) * (1 + np.cos(np.pi * done)) / 2
    np.testing.assert_allclose(rates, np.minimum(1, (np.arange(20) + 1) / 5) * fall)


def test_a_fit_keeps_its_time_limit():
    X, target = mixed_table(3000)
    began = time.monotonic()
    model = classifier(time_limit=4.0, max_epochs=100_000, patience=100_000, tune=True)
    model.fit(X, classes_of(target))
    assert model.run_.stopped == "time"
    assert 2.0 < time.monotonic() - began < 30  # a guard, also on a busy machine


def test_a_fit_that_diverges_is_tried_again_more_slowly(monkeypatch):
    rates, fit = [], embens.fit

    def diverges_twice(ensemble, *args, lr, **options):
        rates.append(lr)
        if len(rates) < 3:
            raise embens.Divergence("not finite.", History([], []))
        return fit(ensemble, *args, lr=lr, **options)

    monkeypatch.setattr(embens, "fit", diverges_twice)
    x, target = mixed_table(200)
    y = classes_of(target)
    with pytest.warns(UserWarning, match="Trying again with lr="):
        model = classifier(lr=0.016, tune=False).fit(x, y)
    assert rates == [0.016, 0.004, 0.001]
    assert model.predict(x).shape == y.shape


def test_calibration_rows_are_used_for_nothing_else():
    """With other targets in the calibration rows, only the intervals may change."""

    X, y = mixed_table(300)
    model = regressor(max_epochs=5)
    seed = np.random.RandomState(model.random_state).randint(2**31 - 1)
    seed = randomness.combine(int(seed), 1)
    generator = torch.Generator().manual_seed(seed)
    parts = choices.split(300, "auto", apart=2, generator=generator)
    other = y.copy()
    other[parts.calibrate.numpy()] += 100.0
    first, second = model.fit(X, y).predict(X), regressor(max_epochs=5).fit(X, other)
    np.testing.assert_array_equal(first, second.predict(X))
    assert second.head_.scores.min() > 10 * model.head_.scores.max()


class TestAFit:
    def setup_method(self):
        self.X, self.target = mixed_table()
        self.y = classes_of(self.target)

    def test_a_weight_is_as_good_as_equal_rows_and_none_as_no_row(self):
        X, y = self.X[:20], self.y[:20]
        weights = np.arange(20) % 3
        weighted = classifier().fit(X, y, sample_weight=weights)
        rows = np.repeat(np.arange(20), weights)
        repeated = classifier().fit(X.iloc[rows], y[rows])
        np.testing.assert_allclose(weighted.predict_proba(X), repeated.predict_proba(X), rtol=1e-7)

    def test_weights_that_are_all_equal_change_nothing(self):
        plain = regressor().fit(self.X, self.target)
        heavy = regressor().fit(self.X, self.target, sample_weight=np.full(len(self.X), 7.0))
        np.testing.assert_allclose(heavy.predict(self.X), plain.predict(self.X), rtol=1e-4)

    def test_weights_change_what_is_learnt(self):
        X = self.X[["open"]]
        y = np.where(np.arange(len(X)) % 2, "a", "b")
        heavy = classifier(max_epochs=30).fit(X, y, sample_weight=np.where(y == "a", 9.0, 1.0))
        assert heavy.predict_proba(X)[:, 0].mean() == pytest.approx(0.9, abs=0.05)

    def test_a_warm_start_goes_on_from_where_it_was(self):
        model = classifier(warm_start=True, max_epochs=3).fit(self.X, self.y)
        first = model.held_out_["ensemble"]
        ensemble = model.ensemble_
        model.set_params(max_epochs=15).fit(self.X, self.y)
        assert model.ensemble_ is ensemble
        assert model.held_out_["ensemble"] < first
        with pytest.raises(ValueError, match="warm start can't add classes"):
            model.fit(self.X, np.where(self.X["open"], "new", self.y))

    def test_the_same_random_state_gives_the_same_model_and_leaves_the_global_one_alone(self):
        state = torch.get_rng_state()
        first, second = (classifier().fit(self.X, self.y).predict_proba(self.X) for _ in "ab")
        other = classifier(random_state=1).fit(self.X, self.y).predict_proba(self.X)
        np.testing.assert_array_equal(first, second)
        assert np.abs(first - other).max() > 1e-4
        assert torch.equal(torch.get_rng_state(), state)
