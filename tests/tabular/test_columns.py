"""Learning the encoding of columns: bins, scores, categories and target statistics."""

from __future__ import annotations

import time

import numpy as np
import pandas as pd
import pytest
import torch
from tabular.problems import mixed_table, regressor

from embens.tabular import columns
from embens.tabular.columns import learn_columns
from embens.tabular.defaults import Arguments
from embens.tabular.frames import from_array, from_frame
from embens.tabular.perceptron import Encoder


def learn(table, weights=None, **changes):
    return learn_columns(table, Arguments(**changes), weights)


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
        (note,) = preprocessing.notes
        assert note.startswith("Columns with a different text in nearly every row, ignored")
        assert note.endswith("'text'.")
        assert len(learn(table, categorical_features=["text"]).categorical) == 1

    def test_columns_that_are_ignored_or_read_as_numbers_are_named(self):
        frame = pd.DataFrame({"number": np.arange(60.0), "letter": list("ab") * 30})
        assert learn(from_frame(frame)).notes == []
        frame["nothing"] = np.nan
        frame["never"] = pd.Series([None] * 60, dtype="string")
        frame["one"] = 1.0
        frame["same"] = "x"
        frame["flag"] = pd.Series([1.0, np.nan] * 30)  # being missing is information
        frame["when"] = pd.date_range("2024-01-01", periods=60)
        frame["wait"] = pd.to_timedelta(np.arange(60), unit="h")
        assert learn(from_frame(frame)).notes == [
            "Columns without a value, ignored: 'nothing', 'never'.",
            "Columns with one value only, ignored: 'one', 'same'.",
            "Columns read as seconds and as month, day, weekday, hour, because they are dates: "
            "'when'.",
            "Columns read as seconds, because they are times or durations: 'wait'.",
        ]
        many = from_array(np.ones((3, 30)))
        assert learn(many).notes[0].endswith("'column 19' and 10 more.")

    def test_text_that_looks_like_dates_or_numbers_is_named_with_the_fix(self):
        days = pd.date_range("2024-01-01", periods=80).strftime("%Y-%m-%d")
        frame = pd.DataFrame(
            {
                "day": days,
                "month": [f"{k % 25 + 1}/01/2024" for k in range(80)],
                "price": [f"{k / 7:.3f}" for k in range(80)],
                "code": [f"{k % 30}" for k in range(80)],
                "grade": [f"{k % 5}" for k in range(80)],
            }
        )
        preprocessing = learn(from_frame(frame))
        assert [column.name for column in preprocessing.categorical] == ["month", "code", "grade"]
        different = "Columns with a different text in nearly every row, ignored"
        to_dates = "(convert them with pandas.to_datetime to use them as dates)"
        to_numbers = "(convert them with pandas.to_numeric to use them as numbers)"
        assert preprocessing.notes == [
            f"Columns of text that looks like dates, used as categories {to_dates}: 'month'.",
            f"Columns of text that looks like numbers, used as categories {to_numbers}: 'code'.",
            f"{different} {to_dates}: 'day'.",
            f"{different} {to_numbers}: 'price'.",
        ]
        assert learn(from_frame(frame), categorical_features=list(frame)).notes == []

    def test_columns_whose_categories_are_cut_are_named(self):
        frame = pd.DataFrame({"a": [f"c{k % 300}" for k in range(3000)], "b": list("xy") * 1500})
        assert learn(from_frame(frame)).notes == [
            "Columns of which only the 256 most frequent categories are kept, the others share "
            "one: 'a'."
        ]
        assert learn(from_frame(frame), max_categories=100).notes == []


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
        assert preprocessing.notes[0].startswith("Columns of which only the 4 most frequent")

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


def test_flags_and_the_digits_0_and_1_are_the_same_categories():
    flags = pd.Series([True, False, None, True], dtype=object)
    digits = pd.Series([1.0, 0.0, None, 1.0])
    for fitted, predicted in ((flags, digits), (digits, flags)):
        table = from_frame(pd.DataFrame({"a": fitted}))
        preprocessing = learn_columns(table, Arguments(categorical_features=["a"]))
        _, expected = preprocessing.encode(table)
        _, codes = preprocessing.encode(from_frame(pd.DataFrame({"a": predicted})))
        assert codes.tolist() == expected.tolist()
