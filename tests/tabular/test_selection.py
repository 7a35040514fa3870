"""Wide tables use the columns that explain the target."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from tabular.problems import regressor

from embens.tabular import load
from embens.tabular.columns import learn_columns
from embens.tabular.defaults import Arguments
from embens.tabular.frames import from_array, from_frame


class TestSelection:
    def setup_method(self):
        rng = np.random.default_rng(0)
        self.values = rng.normal(size=(500, 300))
        self.y = 2 * np.abs(self.values[:, 5]) + self.values[:, 7] * (self.values[:, 8] > 0)

    def learn(self, values, y, **changes):
        target = torch.from_numpy(y)[:, None]
        return learn_columns(from_array(values), Arguments(**changes), None, target)

    def test_the_columns_that_explain_the_target_are_used(self):
        self.values[0, 9] = 1e30
        self.values[::3, 10] = np.nan
        preprocessing = self.learn(self.values, self.y)
        positions = [column.position for column in preprocessing.numeric]
        assert len(positions) == 32
        assert {5, 7, 8} <= set(positions)
        assert len(preprocessing.numeric[0].edges) == 33  # bins of 32 columns, not of 300
        (note,) = preprocessing.notes
        assert "the 32 numeric columns that explain the target best are used" in note
        assert note.endswith("and 248 more.")

    def test_all_columns_are_used_where_all_matter_a_little(self):
        y = self.values @ np.random.default_rng(1).normal(size=300)
        assert len(self.learn(self.values, y).numeric) == 300

    def test_tables_with_few_columns_or_many_rows_are_not_wide(self):
        assert len(self.learn(self.values[:, :256], self.y).numeric) == 256
        values = np.tile(self.values, (3, 1))
        assert len(self.learn(values, np.tile(self.y, 3)).numeric) == 300

    def test_max_columns_overrides_the_default(self):
        assert len(self.learn(self.values, self.y, max_columns=300).numeric) == 300
        preprocessing = self.learn(self.values[:, :20], self.y, max_columns=3)
        assert [column.position for column in preprocessing.numeric] == [5, 7, 8]

    def test_the_parts_of_a_date_are_selected_together(self):
        days = pd.date_range("2024-01-01", periods=500)
        frame = pd.DataFrame({"when": days, "noise": self.values[:, 0]})
        target = torch.from_numpy(np.asarray(days.day_of_week, dtype=float))[:, None]
        preprocessing = learn_columns(from_frame(frame), Arguments(max_columns=1), None, target)

        assert [column.name for column in preprocessing.numeric] == [
            *("when", "when:month", "when:day", "when:weekday", "when:hour")
        ]

    def test_a_wide_table_is_fitted_saved_and_predicted(self, tmp_path):
        with pytest.warns(UserWarning, match="Columns ignored"):
            model = regressor(max_epochs=2, max_columns=5).fit(self.values, self.y)
        model.save(tmp_path / "model")
        expected = model.predict(self.values)
        np.testing.assert_array_equal(load(tmp_path / "model").predict(self.values), expected)
