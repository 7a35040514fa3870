"""The classifier: probabilities, uncertainty, calibration, several labels."""

from __future__ import annotations

import numpy as np
import pytest
from estimators.problems import classes_of, classifier, fitted, mixed_table
from scipy import stats
from sklearn.datasets import make_multilabel_classification
from sklearn.utils.class_weight import compute_sample_weight


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


class TestSeveralLabels:
    def setup_method(self):
        self.X, self.target = mixed_table()
        self.y = classes_of(self.target)

    def test_several_labels_give_one_chance_each(self):
        X, y = make_multilabel_classification(200, 10, n_classes=4, random_state=0)
        model = classifier(max_epochs=40).fit(X, y)
        assert model.predict_proba(X).shape == y.shape
        assert (model.predict(X) == y).mean() > 0.8
        assert model.predict_uncertainty(X).total.shape == y.shape

    def test_several_targets_of_classes_give_a_list(self):
        y = np.stack([self.y, np.where(self.X["open"], "yes", "no")], 1)
        model = classifier(max_epochs=40).fit(self.X, y)
        assert [p.shape[1] for p in model.predict_proba(self.X)] == [3, 2]
        assert (model.predict(self.X)[:, 1] == y[:, 1]).mean() > 0.9


def test_a_classifier_that_is_right_on_all_held_out_rows_is_not_made_more_certain_without_bound():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 2))
    X[:, 0] += 4 * np.sign(X[:, 0])
    model = classifier(max_epochs=40).fit(X, X[:, 0] > 0)
    assert model.score(X, X[:, 0] > 0) == 1.0
    assert model.temperature_ > 0.5
    assert model.predict_proba(X).max(1).mean() > 0.95


@pytest.mark.parametrize("weights", ["balanced", {"low": 3.0, "mid": 0.5, "high": 1.0}])
def test_class_weights_multiply_the_weights_of_rows_as_in_scikit_learn(weights):
    X, target = mixed_table()
    y, rows = classes_of(target), np.random.default_rng(0).uniform(0.5, 2, len(X))
    ours = classifier(class_weight=weights, max_epochs=3).fit(X, y, sample_weight=rows)
    both = rows * compute_sample_weight(weights, y)
    theirs = classifier(max_epochs=3).fit(X, y, sample_weight=both)
    np.testing.assert_allclose(ours.predict_proba(X), theirs.predict_proba(X), rtol=1e-6)


def test_one_class_and_a_negative_class_weight_are_refused():
    with pytest.raises(ValueError, match="one class only, 1"):
        classifier().fit(np.eye(20), np.ones(20, int))
    with pytest.raises(ValueError, match="class_weight: expected a number"):
        classifier(class_weight={0: -1.0}).fit(np.eye(20), np.arange(20) % 2)
