"""Reading arrays, data frames, targets and weights."""

from __future__ import annotations

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from tabular.problems import classes_of, classifier, mixed_table, regressor

from embens.tabular import frames
from embens.tabular.frames import from_array, from_frame


class TestInputs:
    def setup_method(self):
        self.X, self.target = mixed_table()
        self.y = classes_of(self.target)

    def test_columns_in_another_order_are_an_error(self):
        model = classifier(max_epochs=2).fit(self.X, self.y)
        with pytest.raises(ValueError, match="same order"):
            model.predict(self.X[self.X.columns[::-1]])

    def test_a_sparse_matrix_gives_the_same_model_as_a_dense_one(self, monkeypatch):
        from scipy import sparse

        X = sparse.random_array((200, 6), density=0.3, rng=0, format="csr")
        y = np.asarray(X.sum(1) > 1)
        probabilities = classifier(max_epochs=2).fit(X, y).predict_proba(X)
        dense = classifier(max_epochs=2).fit(X.toarray(), y).predict_proba(X.toarray())
        np.testing.assert_array_equal(probabilities, dense)
        monkeypatch.setattr(frames, "MAX_DENSE", 1000)
        with pytest.raises(ValueError, match="Select columns or rows"):
            classifier().fit(X, y)

    def test_a_target_can_be_a_pyarrow_array(self):
        table = pa.Table.from_pandas(self.X)
        expected = classifier().fit(self.X, self.y).predict_proba(self.X)
        for y in (pa.array(self.y), pa.chunked_array([self.y])):
            probabilities = classifier().fit(table, y).predict_proba(table)
            np.testing.assert_array_equal(probabilities, expected)

    @pytest.mark.parametrize("missing", [None, np.nan, pd.NA])
    def test_a_missing_target_is_an_error_that_names_the_row(self, missing):
        labels = self.y.astype(object)
        numbers = pd.Series(self.target, dtype="Float64")
        labels[3] = labels[5] = missing
        numbers[3] = numbers[5] = pd.NA
        with pytest.raises(ValueError, match=r"Input y contains NaN: .* in row 3 \(and 1 more\)"):
            classifier().fit(self.X, labels)
        with pytest.raises(ValueError, match=r"Input y contains NaN: .* in row 3 \(and 1 more\)"):
            regressor().fit(self.X, numbers)

    @pytest.mark.parametrize("infinite", [np.inf, np.float32(-np.inf)])
    def test_an_infinite_target_is_an_error_that_names_the_row_also_among_objects(self, infinite):
        numbers = self.target.astype(object)
        numbers[4] = infinite
        for model in (classifier(), regressor()):
            with pytest.raises(ValueError, match="Input y contains infinity in row 4"):
                model.fit(self.X, numbers)
        words = np.where(np.arange(len(self.X)) % 2, "inf", "nan").astype(object)
        assert set(classifier(max_epochs=1).fit(self.X, words).classes_) == {"inf", "nan"}

    def test_a_lazy_frame_is_an_error(self):
        with pytest.raises(TypeError, match=r"X\.collect\(\)"):
            classifier().fit(pl.from_pandas(self.X).lazy(), self.y)

    def test_frames_of_pandas_and_polars_give_the_same_model(self):
        with_pandas = classifier().fit(self.X, self.y).predict_proba(self.X)
        frame = pl.from_pandas(self.X)
        with_polars = classifier().fit(frame, pl.Series(self.y)).predict_proba(frame)
        np.testing.assert_array_equal(with_pandas, with_polars)


def test_infinite_numbers_are_an_error_that_names_the_column():
    frame = pd.DataFrame({"a": [1.0, np.inf] * 30, "b": 1.0})
    with pytest.raises(
        ValueError, match=r"infinity .* in row 1 \(and 29 more\) of column 'a'\. Replace it"
    ):
        classifier().fit(frame, np.arange(60) % 2)


def test_dates_are_converted_to_seconds():
    frame = pd.DataFrame({"day": pd.to_datetime(["2020-01-01", "2020-01-02", None])})
    numbers = from_frame(frame).numbers(0)
    assert numbers[1] - numbers[0] == 86400
    assert np.isnan(numbers[2])


def test_text_in_a_numeric_column_is_an_error_that_names_the_column():
    model = classifier(max_epochs=1).fit(pd.DataFrame({"a": np.arange(60.0)}), np.arange(60) % 2)
    with pytest.raises(
        ValueError,
        match=r"row 0 of column 'a': could not convert .* This is a numeric column",
    ):
        model.predict(pd.DataFrame({"a": ["x", "y"]}))


@pytest.mark.parametrize(
    ("array", "categorical"),
    [
        (np.array([["a"], ["b"]]), True),
        (np.array([[b"a"], [b"b"]]), True),
        (np.array([[True], [False]]), True),
        (np.array([["a"], [None]], dtype=object), True),
        (np.array([[1], [2]], dtype="uint8"), False),
        (np.array([[1.5], [2]], dtype="float16"), False),
        (np.array([["2020-01-01"], ["2020-01-02"]], dtype="datetime64[D]"), False),
        (np.array([[1.5], [None]], dtype=object), False),
    ],
)
def test_the_type_of_an_array_decides_whether_it_is_categorical(array, categorical):
    table = from_array(array)
    assert table.names == ["column 0"]
    assert (table.kind(0) == "category") == categorical
    if not categorical:
        expected = np.array(array[:, 0], dtype="float64")
        scale = 86400 if array.dtype.kind == "M" else 1
        np.testing.assert_array_equal(table.numbers(0), scale * expected)


def test_large_integers_in_arrow_tables_are_rounded():
    values = [2**60 + 1, None, 3]
    numbers = from_frame(pa.table({"id": values})).numbers(0)
    np.testing.assert_array_equal(numbers, [2.0**60, np.nan, 3.0])


@pytest.mark.filterwarnings("ignore:Columns read as seconds")
class TestDates:
    def setup_method(self):
        self.days = pd.date_range("2020-01-01", periods=100, tz="UTC")
        self.y = np.arange(100) % 2

    def frame(self, dates, rows=100):
        return pd.DataFrame({"size": np.arange(float(rows)), "day": dates})

    def fit(self):
        return classifier(max_epochs=2).fit(self.frame(self.days), self.y)

    @pytest.mark.parametrize("kind", ["date", "datetime", "period"])
    def test_objects_and_periods_are_dates(self, kind):
        values = {
            "date": [day.date() for day in self.days],
            "datetime": [day.to_pydatetime() for day in self.days],
            "period": self.days.tz_localize(None).to_period("D"),
        }[kind]
        if kind != "period":
            values = pd.Series(values, dtype=object)
        table, expected = from_frame(self.frame(values)), from_frame(self.frame(self.days))

        assert table.kind(1) == "date"
        for part in table.parts(1):
            np.testing.assert_array_equal(table.numbers(1, part), expected.numbers(1, part))

    @pytest.mark.parametrize("missing", [None, np.nan, pd.NaT])
    def test_one_row_without_a_date_is_predicted(self, missing):
        probabilities = self.fit().predict_proba(self.frame([missing], 1))
        expected = self.fit().predict_proba(self.frame(pd.to_datetime([None], utc=True), 1))
        np.testing.assert_array_equal(probabilities, expected)

    def test_numbers_in_a_column_of_dates_are_an_error(self):
        with pytest.raises(ValueError, match="'day' has numbers, but it had dates in fit"):
            self.fit().predict(self.frame([1.6e9], 1))

    def test_dates_in_a_column_of_numbers_are_an_error(self):
        model = classifier(max_epochs=2).fit(self.frame(np.arange(100)), self.y)
        with pytest.raises(ValueError, match="'day' has dates, but it had numbers in fit"):
            model.predict(self.frame(self.days))
