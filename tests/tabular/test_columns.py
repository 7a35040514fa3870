"""Learning the encoding of columns: bins, scores, categories and target statistics."""

from __future__ import annotations

import time

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from tabular.problems import mixed_table, regressor

from embens.tabular import columns
from embens.tabular.columns import learn_columns
from embens.tabular.defaults import Arguments
from embens.tabular.frames import from_array, from_frame
from embens.tabular.perceptron import Encoder


def learn(table, weights=None, **changes):
    return learn_columns(table, Arguments(**changes), weights)


def original_edges(column):
    return column.edges.double().numpy() * column.scale + column.centre


def scores(values, **changes):
    """Return the scores of one column in float64."""
    table = from_array(values[:, None])
    preprocessing = learn(table, **changes)
    encoder = Encoder(preprocessing).double()
    return encoder(*preprocessing.encode(table, torch.float64))[:, 0].numpy()


class TestKindsOfColumns:
    def test_types_decide_between_numeric_and_categorical(self):
        X, _ = mixed_table()
        preprocessing = learn(from_frame(X))
        assert [c.name for c in preprocessing.numeric] == ["size", "time"]
        assert [c.name for c in preprocessing.categorical] == ["colour", "open", "grade"]
        assert preprocessing.categorical[0].categories == ["blue", "green", "red"]
        assert [c.has_missing for c in preprocessing.numeric] == [True, False]
        assert [c.has_missing for c in preprocessing.categorical] == [True, False, False]

    @pytest.mark.parametrize(
        ("features", "positions"),
        [([-1], [1]), (np.array([False, True]), [1]), ([True, False], [0]), (None, []), ([], [])],
    )
    def test_categorical_columns_can_be_chosen(self, features, positions):
        table = from_array(np.array([[1, 5], [2, 6], [2, 7]]))
        preprocessing = learn(table, categorical_features=features)
        assert [c.position for c in preprocessing.categorical] == positions

    def test_numbers_can_be_categories(self):
        table = from_array(np.array([[1, 5], [2, 6], [2, 7]]))
        (column,) = learn(table, categorical_features=[0]).categorical
        assert column.categories == ["1", "2"]

    def test_a_date_has_calendar_parts(self):
        times = pd.to_datetime(["2024-02-29 23:10", "2025-01-05 00:00", None])
        table = from_frame(pd.DataFrame({"when": times, "x": [1.0, 2.0, 3.0]}))
        parts = [c.part for c in learn(table).numeric]
        assert parts == ["", "month", "day", "weekday", "hour", ""]
        assert [table.numbers(0, part)[0] for part in parts[1:5]] == [2, 29, 3, 23]
        assert [table.numbers(0, part)[1] for part in parts[1:5]] == [1, 5, 6, 0]
        assert np.isnan(table.numbers(0, "hour")[2])

    def test_free_text_is_ignored_with_a_note(self):
        text = [f"order {i} of it" for i in range(80)]
        table = from_frame(pd.DataFrame({"text": text, "x": np.arange(80.0)}))
        preprocessing = learn(table)
        assert preprocessing.categorical == []
        assert preprocessing.notes == [
            "text has a different text in nearly every row and is ignored"
        ]
        assert len(learn(table, categorical_features=["text"]).categorical) == 1

    def test_a_column_without_values_is_ignored_with_a_note(self):
        preprocessing = learn(from_array(np.array([[np.nan, 1.0], [np.nan, 2.0]])))
        assert preprocessing.notes == ["column 0 has no values and is ignored"]


class TestBins:
    def test_a_tied_value_is_an_edge_and_the_others_share_the_remaining_bins(self):
        rng = np.random.default_rng(0)
        values = np.where(rng.random(4000) < 0.92, 0.0, np.exp(rng.normal(size=4000)))
        (column,) = learn(from_array(values[:, None]), bins=16).numeric
        edges = original_edges(column)
        assert len(edges) == 17
        assert (edges == 0).sum() == 1
        positive = np.sort(values[values > 0])
        share = np.searchsorted(positive, edges[1:] * (1 + 1e-6)) / len(positive)
        np.testing.assert_allclose(share, np.linspace(0, 1, 16), atol=0.01)

    @pytest.mark.parametrize(("rows", "bins"), [(300, 32), (8192, 64), (40_000, 128)])
    def test_the_number_of_bins_grows_with_the_number_of_rows(self, rows, bins):
        values = np.random.default_rng(0).normal(size=(rows, 1))
        (column,) = learn(from_array(values)).numeric
        assert len(column.edges) == bins + 1

    def test_edges_of_a_tree_lie_where_the_target_changes(self):
        x = np.random.default_rng(0).uniform(size=(2000, 1))
        target = torch.from_numpy(x > 0.61).double()
        arguments = Arguments(binning="tree", bins=8)
        (column,) = learn_columns(from_array(x), arguments, None, target).numeric
        below = x[x <= 0.61].max()
        assert np.abs(original_edges(column) - below).min() < 1e-6

    def test_weights_equal_repeated_rows(self):
        rng = np.random.default_rng(0)
        values, weights = rng.normal(size=(30, 2)), rng.integers(1, 5, 30)
        weighted = learn(from_array(values), torch.from_numpy(weights).double(), bins=6)
        repeated = learn(from_array(values.repeat(weights, axis=0)), bins=6)
        for one, other in zip(weighted.numeric, repeated.numeric, strict=True):
            assert one.centre == pytest.approx(other.centre)
            torch.testing.assert_close(one.edges, other.edges)
            torch.testing.assert_close(one.scores, other.scores)


class TestScores:
    def test_quantile_scores_are_normal_for_any_distribution(self):
        values = np.exp(3 * np.random.default_rng(0).normal(size=2000))
        normal = scores(values, bins=32)
        assert normal.mean() == pytest.approx(0, abs=1e-6)
        assert normal.std() == pytest.approx(1, abs=1e-6)
        expected = stats.norm.ppf((stats.rankdata(values) - 0.5) / len(values))
        assert np.corrcoef(normal, expected)[0, 1] > 0.99

    def test_standard_scores_are_the_standardised_numbers(self):
        values = np.random.default_rng(0).uniform(5, 9, size=500)
        standardised = (values - values.mean()) / values.std()
        standard = scores(values, scaling="standard", bins=8)
        np.testing.assert_allclose(standard, standardised, atol=1e-5)


class TestCategories:
    def test_rare_and_unseen_categories_share_one_input(self):
        frame = pd.DataFrame({"a": ["x"] * 2000 + ["y"] * 1500 + ["once"]})
        preprocessing = learn(from_frame(frame))
        (column,) = preprocessing.categorical
        assert column.categories == ["x", "y"]
        assert column.has_rare
        table = from_frame(pd.DataFrame({"a": ["y", "once", "never", None]}))
        inputs = Encoder(preprocessing)(*preprocessing.encode(table))
        assert inputs.tolist() == [[0, 1, 0], [0, 0, 1], [0, 0, 1], [0, 0, 0]]

    def test_integers_that_a_csv_file_made_floats_are_the_same_categories(self):
        frame = pd.DataFrame({"a": pd.Categorical([1, 2, 3] * 10)})
        preprocessing = learn(from_frame(frame))
        floats = pd.DataFrame({"a": [1.0, np.nan, 3.0]})
        assert preprocessing.encode(from_frame(floats))[1][:, 0].tolist() == [0, 4, 2]

    def test_many_columns_of_text_stay_within_the_budget(self):
        rng = np.random.default_rng(0)
        frame = pd.DataFrame(rng.choice(list("abcdefghij"), (40, 1000))).add_prefix("c")
        preprocessing = learn(from_frame(frame))
        inputs = sum(len(column.used_codes) for column in preprocessing.categorical)
        assert inputs <= 2 * columns.MAX_INPUTS
        assert "1000 categorical columns: 4 categories kept of each" in preprocessing.notes

    def test_the_time_is_linear_in_the_number_of_columns(self):
        rng = np.random.default_rng(0)
        seconds = []
        for count in (250, 2000):
            frame = pd.DataFrame(rng.choice(list("abcdefgh"), (20, count))).add_prefix("c")
            attempts = []
            for _ in range(3):
                start = time.process_time()
                table = from_frame(frame)
                learn(table).encode(table)
                attempts.append(time.process_time() - start)
            seconds.append(min(attempts))
        assert seconds[1] < 20 * seconds[0]  # 8 times the columns; quadratic time would be 64


class TestTargetStatistics:
    def setup_method(self):
        rng = np.random.default_rng(0)
        self.codes = torch.from_numpy(rng.integers(0, 50, 3000))
        self.target = torch.from_numpy(rng.normal(size=(3000, 1)))
        self.folds = torch.from_numpy(rng.integers(0, columns.FOLDS, 3000))
        self.table = from_frame(pd.DataFrame({"a": [f"c{c:02}" for c in self.codes.tolist()]}))
        self.preprocessing = self.learn()

    def learn(self):
        return learn_columns(self.table, Arguments(), None, self.target, self.folds)

    def statistics(self, folds=None):
        numbers, _ = self.preprocessing.encode(self.table, torch.float64, folds)
        return numbers

    def test_they_are_shrunk_means_and_log_frequencies(self):
        y = self.target[:, 0]
        has_code = self.codes == 7
        count = has_code.sum()
        mean = (y[has_code] - y.mean()).sum() / (count + columns.PRIOR_ROWS)
        share = ((count + 1) / (3000 + 50)).log10()
        expected = pytest.approx([mean.item(), share.item()], abs=1e-6)
        assert self.statistics()[has_code][0].tolist() == expected

    def test_a_training_row_does_not_see_its_own_target(self):
        before = self.statistics(1 + self.folds)[0, 0].item()
        self.target[0] += 100
        self.preprocessing = self.learn()
        after = self.statistics(1 + self.folds)
        change_of_overall_mean = 100 / 3000
        assert after[0, 0].item() == pytest.approx(before, abs=change_of_overall_mean)
        others = (self.codes == self.codes[0]) & (self.folds != self.folds[0])
        assert after[others][0, 0] > 0.5

    def test_unseen_and_missing_labels_have_the_overall_mean(self):
        table = from_frame(pd.DataFrame({"a": ["never", None]}))
        numbers, _ = self.preprocessing.encode(table)
        assert numbers[:, 0].tolist() == [0.0, 0.0]

    def test_effects_of_rare_categories_are_learned(self):
        rng = np.random.default_rng(1)
        codes = rng.integers(0, 300, 1500)
        y = rng.normal(size=300)[codes] + 0.1 * rng.normal(size=1500)
        X = pd.DataFrame({"a": [f"c{c}" for c in codes]})
        model = regressor(max_categories=16).fit(X[:1200], y[:1200])
        assert model.score(X[1200:], y[1200:]) > 0.5  # near 0 without the statistics
