"""Classifier: probabilities, uncertainty, calibration, sets, several labels."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from sklearn.datasets import make_multilabel_classification
from sklearn.utils.class_weight import compute_sample_weight
from tabular.problems import classes_of, classifier, fitted, mixed_table


class TestTheClassifier:
    def setup_method(self):
        self.model, self.X, self.y = fitted()

    def test_uncertainty_adds_up_and_is_the_entropy_of_the_prediction(self):
        uncertainty = self.model.predict_uncertainty(self.X)
        probabilities = self.model.predict_proba(self.X)
        entropy = stats.entropy(probabilities, axis=1)

        np.testing.assert_allclose(uncertainty.total, entropy, atol=1e-9)
        np.testing.assert_allclose(uncertainty.aleatoric + uncertainty.epistemic, uncertainty.total)
        assert (uncertainty.epistemic >= 0).all()
        assert uncertainty.epistemic.max() > 0

    def test_members_average_to_the_prediction(self):
        members = self.model.predict_members(self.X)
        assert members.shape == (4, 100, 3)
        np.testing.assert_allclose(members.mean(0), self.model.predict_proba(self.X))

    def test_the_temperature_divides_the_logits(self):
        X, target = mixed_table(400)
        plain = classifier(max_epochs=30, calibrate=False).fit(X[:300], classes_of(target[:300]))
        assert plain.temperature_ == 1.0
        assert self.model.temperature_ != 1.0
        log_ratio = log_ratios(self.model.predict_members(self.X))
        plain_log_ratio = log_ratios(plain.predict_members(self.X))
        expected = plain_log_ratio / self.model.temperature_
        np.testing.assert_allclose(log_ratio, expected, rtol=1e-4, atol=1e-6)


def log_ratios(probabilities):
    return np.log(probabilities[..., :1]) - np.log(probabilities[..., 1:])


class TestSeveralLabels:
    def setup_method(self):
        self.X, self.target = mixed_table()
        self.y = classes_of(self.target)

    def test_several_labels_give_one_chance_each(self):
        X, y = make_multilabel_classification(200, 10, n_classes=4, random_state=0)
        model = classifier(max_epochs=40, lr=0.004).fit(X, y)
        assert model.predict_proba(X).shape == y.shape
        assert (model.predict(X) == y).mean() > 0.8
        assert model.predict_uncertainty(X).total.shape == y.shape

    def test_several_targets_of_classes_give_a_list(self):
        y = np.stack([self.y, np.where(self.X["open"], "yes", "no")], 1)
        model = classifier(max_epochs=40).fit(self.X, y)
        assert [p.shape[1] for p in model.predict_proba(self.X)] == [3, 2]
        assert (model.predict(self.X)[:, 1] == y[:, 1]).mean() > 0.9


def test_the_temperature_of_a_classifier_without_errors_is_bounded():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 2))
    X[:, 0] += 4 * np.sign(X[:, 0])
    model = classifier(max_epochs=40).fit(X, X[:, 0] > 0)

    assert model.score(X, X[:, 0] > 0) == 1.0
    assert model.temperature_ > 0.5
    assert model.predict_proba(X).max(1).mean() > 0.95


@pytest.mark.parametrize("weights", ["balanced", {"low": 3.0, "mid": 0.5, "high": 1.0}])
def test_class_weights_multiply_sample_weights(weights):
    X, target = mixed_table()
    y, rows = classes_of(target), np.random.default_rng(0).uniform(0.5, 2, len(X))
    ours = classifier(class_weight=weights, max_epochs=3).fit(X, y, sample_weight=rows)
    both = rows * compute_sample_weight(weights, y)
    theirs = classifier(max_epochs=3).fit(X, y, sample_weight=both)

    np.testing.assert_allclose(ours.predict_proba(X), theirs.predict_proba(X), rtol=1e-6)


def test_one_class_and_invalid_class_weights_are_errors():
    with pytest.raises(ValueError, match="only one class, 1"):
        classifier().fit(np.eye(20), np.ones(20, int))
    with pytest.raises(ValueError, match="class_weight must have numbers"):
        classifier(class_weight={0: "a"}).fit(np.eye(20), np.arange(20) % 2)
    with pytest.raises(ValueError, match="class_weight must have numbers"):
        classifier(class_weight={0: -1.0}).fit(np.eye(20), np.arange(20) % 2)
    with pytest.raises(ValueError, match="at least one of them positive"):
        classifier(class_weight={0: 0.0, 1: 0.0}).fit(np.eye(20), np.arange(20) % 2)


class TestPredictionSets:
    def test_sets_have_the_requested_coverage(self):
        X, target = mixed_table(3000)
        y = classes_of(target)
        model = classifier(max_epochs=4, validation_fraction=0.5).fit(X[:1500], y[:1500])
        for coverage in (0.8, 0.95):
            sets = model.predict_set(X[1500:], coverage)
            inside = sets[np.arange(1500), np.searchsorted(model.classes_, y[1500:])].mean()
            rows = len(model.head_.scores)
            error = np.sqrt(coverage * (1 - coverage) * (1 / rows + 1 / 1500))
            assert inside == pytest.approx(coverage, abs=4 * error)

        assert sets.shape == (1500, 3)

    def test_sets_without_held_out_rows_are_an_error(self):
        with pytest.raises(ValueError, match="need held-out rows"):
            classifier(max_epochs=1).fit(np.eye(20), np.arange(20) % 2).predict_set(np.eye(20))


def test_partial_fit_learns_new_rows_and_classes_that_were_declared():
    X, target = mixed_table(600)
    y = classes_of(target)
    without_high = y[:300] != "high"
    model = classifier(max_epochs=8)
    model.partial_fit(X[:300][without_high], y[:300][without_high], classes=["high", "low", "mid"])
    assert list(model.classes_) == ["high", "low", "mid"]
    before = (model.predict(X[500:]) == y[500:]).mean()
    ensemble = model.ensemble_
    model.partial_fit(X[300:500], y[300:500])
    assert model.ensemble_ is ensemble
    assert (model.predict(X[500:]) == y[500:]).mean() > before


def test_sets_of_fewer_than_a_hundred_calibration_rows_are_reported():
    X, target = mixed_table(360)
    model = classifier(max_epochs=1).fit(X, classes_of(target))
    with pytest.warns(UserWarning, match=r"Only 18 held-out rows .* deviation of 0\.07"):
        model.predict_set(X)
