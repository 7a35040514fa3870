"""The scikit-learn estimator checks, without expected failures, and scikit-learn tools."""

from __future__ import annotations

import copy

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.model_selection import GridSearchCV, cross_val_predict, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from tabular.problems import classes_of, classifier, fitted, mixed_table, regressor

from embens.tabular import (
    EmbeddedEnsembleClassifier,
    EmbeddedEnsembleRegressor,
    estimator,
    neg_crps,
    neg_nll,
)
from embens.tabular.descent import Descent
from embens.tabular.frames import from_array, from_frame

QUICK = [
    EmbeddedEnsembleClassifier(members=2, width=16, max_epochs=10, tune=False, lr=0.02),
    EmbeddedEnsembleRegressor(members=2, width=16, max_epochs=15, tune=False, lr=0.05),
]
IGNORED = (
    "ignore:SCIPY_ARRAY_API",
    "ignore::sklearn.exceptions.SkipTestWarning",
    "ignore::sklearn.exceptions.DataConversionWarning",
    "ignore:Columns with one value only",
)


@pytest.mark.filterwarnings(*IGNORED)
@parametrize_with_checks(QUICK)
def test_the_estimator_passes_the_checks_of_scikit_learn(estimator, check):
    check(estimator)


class TestTools:
    def setup_method(self):
        self.X, self.target = mixed_table(150)
        self.y = classes_of(self.target)

    def test_a_pipeline_with_a_scaler_and_a_grid_search_work(self):
        X = self.X[["size", "time"]].fillna(0.0)
        pipeline = make_pipeline(StandardScaler(), classifier(max_epochs=5))
        grid = {"embeddedensembleclassifier__p": [0.0, 0.9]}
        search = GridSearchCV(pipeline, grid, cv=2, scoring="neg_log_loss").fit(X, self.y)
        assert search.best_params_["embeddedensembleclassifier__p"] in (0.0, 0.9)

    def test_cross_validation_predicts_all_rows(self):
        predictions = cross_val_predict(classifier(max_epochs=5), self.X, self.y, cv=2)
        assert set(predictions) <= set(self.y)
        assert predictions.shape == self.y.shape

    def test_probabilities_can_be_calibrated_by_scikit_learn(self):
        model = CalibratedClassifierCV(classifier(max_epochs=5), cv=2).fit(self.X, self.y)
        np.testing.assert_allclose(model.predict_proba(self.X).sum(1), 1.0)

    def test_a_clone_has_the_arguments_and_is_not_fitted(self):
        model = classifier(p=0.7).fit(self.X, self.y)
        copy = clone(model)
        assert copy.get_params() == model.get_params()
        assert not hasattr(copy, "ensemble_")

    @pytest.mark.parametrize("scorer", [neg_nll, neg_crps])
    def test_scorers_prefer_the_model_with_informative_columns(self, scorer):
        useless = self.X[["open"]]
        informed_score = cross_val_score(regressor(), self.X, self.target, scoring=scorer, cv=2)
        blind_score = cross_val_score(regressor(), useless, self.target, scoring=scorer, cv=2)
        assert informed_score.mean() > blind_score.mean()


class TestArguments:
    def setup_method(self):
        self.X, self.target = mixed_table()
        self.y = classes_of(self.target)

    def test_numpy_integers_are_accepted(self):
        names = ("members", "width", "depth", "max_epochs", "patience", "batch_size", "bins")
        model = classifier(n_jobs=np.int64(1), **dict.fromkeys(names, np.int64(2)))
        same = classifier(n_jobs=1, **dict.fromkeys(names, 2))
        pairs = (m.fit(self.X, self.y).predict_proba(self.X) for m in (model, same))
        np.testing.assert_array_equal(*pairs)

    def test_n_jobs_changes_the_number_of_threads_during_fit_only(self):
        before = torch.get_num_threads()
        classifier(n_jobs=2, max_epochs=1).fit(self.X, self.y)
        assert torch.get_num_threads() == before
        with pytest.raises(ValueError, match="n_jobs"):
            classifier(n_jobs=0).fit(self.X, self.y)


@pytest.mark.parametrize("embedding", ["piecewise", "none"])
def test_every_input_of_the_network_has_a_name(embedding):
    X, target = mixed_table(100)
    X["when"] = pd.date_range("2024-01-01", periods=100, freq="h")
    model = classifier(numerical_embedding=embedding, max_epochs=1)
    with pytest.warns(UserWarning, match="dates: 'when'"):
        model.fit(X, classes_of(target))
    names = model.feature_names_out_
    encoder = model.fitted_.encoder
    inputs = encoder(*model.preprocessing_.encode(from_frame(X)))

    assert len(names) == inputs.shape[1] == len(set(names))
    assert {"size (score)", "size", "when:weekday", "colour = red", "size is missing"} <= {*names}


def test_a_refit_uses_the_validation_rows_and_keeps_intervals():
    X, target = mixed_table(300)
    plain, again = (regressor(refit=refit).fit(X, target) for refit in (False, True))
    assert len(again.head_.scores) == len(plain.head_.scores)
    assert np.abs(again.predict(X) - plain.predict(X)).max() > 1e-4
    assert again.score(X, target) > 0.5


class TestFittedAttributes:
    def test_the_weights_of_the_best_epoch_are_kept(self, monkeypatch):
        # Epochs are validated in bfloat16 where it is fast, the fitted model is not.
        monkeypatch.setattr(Descent, "_uses_bfloat16", lambda self: False)
        X, target = mixed_table()
        model = classifier().fit(X, classes_of(target))
        frame = model.history_
        best = model.run_.best_epoch
        assert frame.set_index("epoch")["metric"].idxmin() == best
        kept = frame.set_index("epoch")["validation_loss"][best]
        assert kept == pytest.approx(np.mean(model.held_out_["members"]))
        # The metric is that of the best temperature, held_out_ that of temperature 1.
        assert frame["metric"].min() == pytest.approx(model.held_out_["ensemble"], rel=0.1)

    def test_the_ensemble_is_better_than_the_mean_member(self):
        model, _, _ = fitted()
        losses = model.members_["held_out_loss"]
        assert len(losses) == 4
        assert model.held_out_["ensemble"] < losses.mean()

    def test_gamma_is_the_natural_one_of_the_laws(self):
        model, _, _ = fitted()
        assert model.ensemble_.natural_gamma == 4  # the members are not coupled
        X, target = mixed_table(60)
        shared = classifier(own=False, sites="hidden", p=0.25, max_epochs=1)
        gamma = shared.fit(X, classes_of(target)).ensemble_.natural_gamma
        assert gamma == pytest.approx(4 / (1 + 3 * 0.25**4))  # two hidden sites

    def test_members_share_most_parameters(self):
        shared = fitted("classifier", "batch_ensemble")[0].n_parameters_
        separate = fitted("classifier", "independent")[0].n_parameters_
        assert shared < separate / 2


@pytest.mark.parametrize("kind", [EmbeddedEnsembleClassifier, EmbeddedEnsembleRegressor])
@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("epochs", "'max_epochs'"),
        ("learning_rate", "'lr'"),
        ("n_estimators", "'members'"),
        ("seed", "'random_state'"),
        ("progress", "verbose=1"),
        ("device", "CPU"),
        ("member", "did you mean 'members'"),
    ],
)
def test_arguments_of_other_libraries_get_a_hint(kind, name, fix):
    with pytest.raises(TypeError, match=f"{kind.__name__} has no argument '{name}'.*{fix}"):
        kind(**{name: 1})
    assert copy.copy(kind(members=3)).members == 3


class TestFastPrediction:
    """Whole matrices and blocks of rows give the predictions of the members one by one."""

    @pytest.mark.parametrize("make", [classifier, regressor])
    @pytest.mark.parametrize("family", ["batch_ensemble", "mc_dropout", "independent"])
    def test_blocks_agree_with_each_member_alone(self, make, family, monkeypatch):
        rng = np.random.default_rng(0)
        X = rng.normal(size=(150, 4))
        X[::9, 1] = np.nan
        y = X[:, 0] > 0
        if make is regressor:
            y = X[:, 0] * 3
        model = make(family, max_epochs=3).fit(X, y)
        monkeypatch.setattr(estimator, "PREDICTION_ROWS", 64)
        fitted_model = model.fitted_
        numbers, codes = fitted_model.preprocessing.encode(from_array(X))
        with torch.no_grad():
            inputs = fitted_model.encoder(numbers, codes)
            members = [fitted_model.ensemble.member(a).eval()(inputs) for a in range(4)]
        expected = fitted_model.head.summarise(torch.stack(members))[0]
        if make is regressor:
            np.testing.assert_allclose(model.predict(X), expected[:, 0], rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_allclose(model.predict_proba(X), expected, rtol=1e-5, atol=1e-6)

    def test_one_conversion_of_all_columns_agrees_with_columns_one_by_one(self):
        rng = np.random.default_rng(0)
        frame = pd.DataFrame(rng.normal(size=(120, 3)), columns=list("abc"))
        frame["d"] = rng.integers(0, 9, 120)
        frame.loc[::5, "b"] = np.nan
        model = regressor(max_epochs=2).fit(frame, frame["a"])
        by_columns = frame.astype("Float64")  # extension types are read one by one
        np.testing.assert_array_equal(model.predict(frame), model.predict(by_columns))
        one_row = model.predict(frame[:1])  # products of other shapes round differently
        np.testing.assert_allclose(model.predict(frame)[:1], one_row, rtol=1e-4)
