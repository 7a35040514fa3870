"""scikit-learn's whole battery, without expected failures, and its tools."""

from __future__ import annotations

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from estimators.problems import classes_of, classifier, mixed_table, regressor
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import make_multilabel_classification
from sklearn.model_selection import GridSearchCV, cross_val_predict, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from embens.estimators import EmbeddedEnsembleClassifier, EmbeddedEnsembleRegressor, neg_crps
from embens.estimators import neg_nll as nll

QUICK = [
    EmbeddedEnsembleClassifier(members=4, width=32, max_epochs=40),
    EmbeddedEnsembleRegressor(members=4, width=32, max_epochs=60),
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

    def test_frames_of_pandas_and_polars_give_the_same_model(self):
        ours = classifier().fit(self.X, self.y).predict_proba(self.X)
        frame = pl.from_pandas(self.X)
        theirs = classifier().fit(frame, pl.Series(self.y)).predict_proba(frame)
        np.testing.assert_array_equal(ours, theirs)

    def test_columns_in_another_order_are_an_error(self):
        model = classifier(max_epochs=2).fit(self.X, self.y)
        with pytest.raises(ValueError, match="same order"):
            model.predict(self.X[self.X.columns[::-1]])

    def test_sparse_input_is_refused_with_what_to_do(self):
        from scipy import sparse

        with pytest.raises(TypeError, match="dense"):
            classifier().fit(sparse.csr_array(np.eye(20)), np.arange(20) % 2)

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

    def test_a_target_may_be_a_column_of_pyarrow(self):
        table = pa.Table.from_pandas(self.X)
        first = classifier().fit(self.X, self.y).predict_proba(self.X)
        for y in (pa.array(self.y), pa.chunked_array([self.y])):
            found = classifier().fit(table, y).predict_proba(table)
            np.testing.assert_array_equal(found, first)

    @pytest.mark.parametrize("missing", [None, np.nan, pd.NA])
    def test_a_missing_target_is_an_error_that_counts_the_rows(self, missing):
        labels = self.y.astype(object)
        numbers = pd.Series(self.target, dtype="Float64")
        labels[3] = labels[5] = missing
        numbers[3] = numbers[5] = pd.NA
        with pytest.raises(ValueError, match="Input y contains NaN: the target of 2 rows"):
            classifier().fit(self.X, labels)
        with pytest.raises(ValueError, match="Input y contains NaN: the target of 2 rows"):
            regressor().fit(self.X, numbers)

    def test_a_lazy_frame_is_refused_with_what_to_do(self):
        with pytest.raises(TypeError, match=r"X\.collect\(\)"):
            classifier().fit(pl.from_pandas(self.X).lazy(), self.y)

    def test_whole_numbers_of_numpy_are_as_good_as_pythons(self):
        names = ("members", "width", "depth", "max_epochs", "patience", "batch_size", "bins")
        model = classifier(n_jobs=np.int64(1), **dict.fromkeys(names, np.int64(2)))
        same = classifier(n_jobs=1, **dict.fromkeys(names, 2))
        pairs = (m.fit(self.X, self.y).predict_proba(self.X) for m in (model, same))
        np.testing.assert_array_equal(*pairs)

    def test_weights_change_what_is_learnt(self):
        X = self.X[["open"]]
        y = np.where(np.arange(len(X)) % 2, "a", "b")
        heavy = classifier(max_epochs=30).fit(X, y, sample_weight=np.where(y == "a", 9.0, 1.0))
        assert heavy.predict_proba(X)[:, 0].mean() == pytest.approx(0.9, abs=0.05)

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

    def test_several_targets_of_numbers_are_each_predicted(self):
        y = np.stack([self.target, -5 * self.target + 100], 1)
        model = regressor(max_epochs=40).fit(self.X, y)
        assert model.score(self.X, y) > 0.5
        assert model.predict_interval(self.X).shape == (240, 2, 2)
        assert model.predict_quantiles(self.X).shape == (240, 3, 2)

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

    def test_threads_are_set_for_the_fit_alone(self):
        before = torch.get_num_threads()
        classifier(n_jobs=2, max_epochs=1).fit(self.X, self.y)
        assert torch.get_num_threads() == before
        with pytest.raises(ValueError, match="n_jobs"):
            classifier(n_jobs=0).fit(self.X, self.y)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "bach_ensemble"}, "did you mean 'batch_ensemble'"),
        ({"members": 0}, "members: expected a whole number of at least 1 or 'auto'; got 0"),
        ({"p": 2.0}, "p: expected a number from -1 to 1"),
        ({"depth": "auto"}, "depth: expected a whole number of at least 1; got 'auto'"),
        ({"law": 0.9}, "law: expected a law"),
        ({"validation_fraction": 1.0}, "validation_fraction: expected a number from 0 to 0.9"),
        ({"categorical_features": ["siz"]}, "no column 'siz'; did you mean 'size'"),
        ({"categorical_features": "size"}, r"For one column write \['size'\]"),
        ({"categorical_features": [True]}, "expected a mask of 5 columns; got one of 1"),
        ({"categorical_features": [9]}, "no column 9; there are 5"),
    ],
)
def test_arguments_without_a_meaning_say_what_was_expected(changes, message):
    X, target = mixed_table(60)
    with pytest.raises(ValueError, match=message):
        classifier(**changes).fit(X, classes_of(target))


def test_a_law_for_a_family_without_masks_is_an_error():
    from embens import laws

    X, target = mixed_table(60)
    with pytest.raises(ValueError, match="has no masks"):
        classifier(law=laws.Bernoulli(0.9)).fit(X, classes_of(target))


def test_infinite_numbers_are_an_error_that_names_the_column():
    frame = pd.DataFrame({"a": [1.0, np.inf] * 30, "b": 1.0})
    with pytest.raises(ValueError, match=r"infinity .* in a\. Replace it"):
        classifier().fit(frame, np.arange(60) % 2)
