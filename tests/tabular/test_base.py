"""scikit-learn's whole battery, without expected failures, and its tools."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from estimators.problems import classes_of, classifier, fitted, mixed_table, regressor
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.model_selection import GridSearchCV, cross_val_predict, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from embens.estimators import EmbeddedEnsembleClassifier, EmbeddedEnsembleRegressor, neg_crps
from embens.estimators import neg_nll as nll

QUICK = [
    EmbeddedEnsembleClassifier(members=4, width=32, max_epochs=40, tune=False),
    EmbeddedEnsembleRegressor(members=4, width=32, max_epochs=60, tune=False, lr=0.01),
]
IGNORED = (
    "ignore:SCIPY_ARRAY_API",
    "ignore::sklearn.exceptions.SkipTestWarning",
    "ignore::sklearn.exceptions.DataConversionWarning",
)


@pytest.mark.filterwarnings(*IGNORED)
@parametrize_with_checks(QUICK)
def test_the_estimator_keeps_scikit_learns_contract(estimator, check):
    check(estimator)


class TestTheTools:
    def setup_method(self):
        self.X, self.target = mixed_table(150)
        self.y = classes_of(self.target)

    def test_a_pipeline_with_a_scaler_and_a_grid_search_work(self):
        X = self.X[["size", "time"]].fillna(0.0)
        pipeline = make_pipeline(StandardScaler(), classifier(max_epochs=5))
        grid = {"embeddedensembleclassifier__p": [0.0, 0.9]}
        search = GridSearchCV(pipeline, grid, cv=2, scoring="neg_log_loss").fit(X, self.y)
        assert search.best_params_["embeddedensembleclassifier__p"] in (0.0, 0.9)

    def test_cross_validated_predictions_are_those_of_the_folds(self):
        found = cross_val_predict(classifier(max_epochs=5), self.X, self.y, cv=2)
        assert set(found) <= set(self.y)
        assert found.shape == self.y.shape

    def test_probabilities_can_be_calibrated_by_scikit_learn(self):
        model = CalibratedClassifierCV(classifier(max_epochs=5), cv=2).fit(self.X, self.y)
        np.testing.assert_allclose(model.predict_proba(self.X).sum(1), 1.0)

    def test_a_clone_has_the_arguments_and_nothing_else(self):
        model = classifier(p=0.7).fit(self.X, self.y)
        copy = clone(model)
        assert copy.get_params() == model.get_params()
        assert not hasattr(copy, "ensemble_")

    @pytest.mark.parametrize("scorer", [nll, neg_crps])
    def test_scorers_prefer_the_model_that_knows_more(self, scorer):
        useless = self.X[["open"]]
        known = cross_val_score(regressor(), self.X, self.target, scoring=scorer, cv=2).mean()
        blind = cross_val_score(regressor(), useless, self.target, scoring=scorer, cv=2).mean()
        assert known > blind


class TestEveryKindOfInput:
    def setup_method(self):
        self.X, self.target = mixed_table()
        self.y = classes_of(self.target)

    def test_whole_numbers_of_numpy_are_as_good_as_pythons(self):
        names = ("members", "width", "depth", "max_epochs", "patience", "batch_size", "bins")
        model = classifier(n_jobs=np.int64(1), **dict.fromkeys(names, np.int64(2)))
        same = classifier(n_jobs=1, **dict.fromkeys(names, 2))
        pairs = (m.fit(self.X, self.y).predict_proba(self.X) for m in (model, same))
        np.testing.assert_array_equal(*pairs)

    def test_threads_are_set_for_the_fit_alone(self):
        before = torch.get_num_threads()
        classifier(n_jobs=2, max_epochs=1).fit(self.X, self.y)
        assert torch.get_num_threads() == before
        with pytest.raises(ValueError, match="n_jobs"):
            classifier(n_jobs=0).fit(self.X, self.y)


@pytest.mark.parametrize("embedding", ["piecewise", "none"])
def test_every_input_of_the_network_has_a_name(embedding):
    X, target = mixed_table(100)
    X["when"] = pd.date_range("2024-01-01", periods=100, freq="h")
    model = classifier(numerical_embedding=embedding, max_epochs=1).fit(X, classes_of(target))
    names = model.feature_names_out_
    first = next(p for n, p in model.ensemble_.named_parameters() if p.dim() == 2)
    assert len(names) == first.shape[1] == len(set(names))
    assert {"size (score)", "size", "when:weekday", "colour = red", "size is missing"} <= {*names}


def test_a_refit_sees_the_rows_that_were_held_out_and_keeps_intervals():
    X, target = mixed_table(300)
    plain, again = (regressor(refit=refit).fit(X, target) for refit in (False, True))
    assert len(again.head_.scores) == len(plain.head_.scores)
    assert np.abs(again.predict(X) - plain.predict(X)).max() > 1e-4
    assert again.score(X, target) > 0.5


def test_members_can_be_selected_and_kept_by_a_file(tmp_path):
    X, target = mixed_table(200)
    model = classifier(select=3, max_epochs=4).fit(X, classes_of(target))
    assert model.ensemble_.members == 3
    assert len(model.held_out_["members"]) == 3
    model.save(tmp_path / "model.safetensors")
    again = EmbeddedEnsembleClassifier.load(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))


class TestLooking:
    def test_the_history_is_a_frame_and_the_best_weights_are_kept(self):
        model, _, _ = fitted()
        frame = model.history_
        best = model.run_.best_epoch
        assert frame.set_index("epoch")["metric"].idxmin() == best
        kept = frame.set_index("epoch")["validation_loss"][best]
        assert kept == pytest.approx(np.mean(model.held_out_["members"]))
        near = pytest.approx(model.held_out_["ensemble"], rel=0.1)
        assert frame["metric"].min() == near  # but for the temperature

    def test_the_members_are_a_frame_and_the_ensemble_beats_their_mean(self):
        model, _, _ = fitted()
        losses = model.members_["held_out_loss"]
        assert len(losses) == 4
        assert model.held_out_["ensemble"] < losses.mean()

    def test_the_gradient_scale_is_the_natural_one_of_the_members(self):
        model, _, _ = fitted()
        assert model.ensemble_.natural_gamma == 4  # nothing couples them
        X, target = mixed_table(60)
        shared = classifier(own=False, sites="hidden", p=0.25, max_epochs=1)
        gamma = shared.fit(X, classes_of(target)).ensemble_.natural_gamma
        assert gamma == pytest.approx(4 / (1 + 3 * 0.25**4))  # two hidden sites

    def test_members_share_their_parameters(self):
        shared = fitted("classifier", "batch_ensemble")[0].n_parameters_
        separate = fitted("classifier", "independent")[0].n_parameters_
        assert shared < separate / 2
