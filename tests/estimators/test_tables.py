"""Every kind of input, and what is refused."""

from __future__ import annotations

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from estimators.problems import classes_of, classifier, mixed_table, regressor

from embens.estimators.tables import from_frame


class TestEveryKindOfInput:
    def setup_method(self):
        self.X, self.target = mixed_table()
        self.y = classes_of(self.target)

    def test_columns_in_another_order_are_an_error(self):
        model = classifier(max_epochs=2).fit(self.X, self.y)
        with pytest.raises(ValueError, match="same order"):
            model.predict(self.X[self.X.columns[::-1]])

    def test_sparse_input_is_refused_with_what_to_do(self):
        from scipy import sparse

        with pytest.raises(TypeError, match="dense"):
            classifier().fit(sparse.csr_array(np.eye(20)), np.arange(20) % 2)

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

    def test_frames_of_pandas_and_polars_give_the_same_model(self):
        ours = classifier().fit(self.X, self.y).predict_proba(self.X)
        frame = pl.from_pandas(self.X)
        theirs = classifier().fit(frame, pl.Series(self.y)).predict_proba(frame)
        np.testing.assert_array_equal(ours, theirs)


def test_infinite_numbers_are_an_error_that_names_the_column():
    frame = pd.DataFrame({"a": [1.0, np.inf] * 30, "b": 1.0})
    with pytest.raises(ValueError, match=r"infinity .* in a\. Replace it"):
        classifier().fit(frame, np.arange(60) % 2)


def test_dates_are_numbers_of_seconds():
    frame = pd.DataFrame({"day": pd.to_datetime(["2020-01-01", "2020-01-02", None])})
    numbers = from_frame(frame).numbers(0)
    assert numbers[1] - numbers[0] == 86400
    assert np.isnan(numbers[2])


def test_text_where_numbers_were_is_an_error_that_names_the_column():
    model = classifier(max_epochs=1).fit(pd.DataFrame({"a": np.arange(60.0)}), np.arange(60) % 2)
    with pytest.raises(
        ValueError, match=r"a: could not convert .* had numbers where it was fitted"
    ):
        model.predict(pd.DataFrame({"a": ["x", "y"]}))
