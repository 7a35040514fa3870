"""The split of rows, and that calibration rows stay unused."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from tabular.problems import classifier, mixed_table, regressor

from embens.tabular.preparation import split_rows


def split(rows, fraction="auto", *, stride=4, strata=None):
    return split_rows(rows, fraction, stride, strata, seed=0)


@pytest.mark.parametrize("stride", [2, 4])
@pytest.mark.parametrize("rows", [10, 49, 50, 1000])
def test_every_row_is_in_exactly_one_part(rows, stride):
    parts = split(rows, stride=stride)
    together = np.concatenate([parts.train, parts.validation, parts.calibration])
    assert sorted(together) == list(range(rows))
    held_out = 0 if rows < 50 else rows // 5
    assert len(parts.calibration) == held_out // stride
    assert len(parts.validation) == held_out - held_out // stride


def test_at_most_ten_thousand_rows_are_held_out_by_default():
    assert len(split(200_000).validation) == 7_500
    assert len(split(1000, 0.5).validation) == 375
    assert len(split(1000, 0).validation) == 0


def test_strata_keep_their_proportions_and_none_is_held_out_completely():
    strata = np.array([0] * 700 + [1] * 290 + [2] * 9 + [3])
    parts = split(1000, strata=strata)
    held_out = np.bincount(strata[np.concatenate([parts.validation, parts.calibration])], None, 4)
    assert held_out.tolist() == pytest.approx([140, 58, 1.8, 0], abs=1)
    assert (np.bincount(strata[parts.train]) > 0).all()


def test_classes_with_one_row_are_not_held_out_even_if_there_are_many():
    strata = np.concatenate([np.zeros(60, int), np.arange(1, 41)])
    parts = split(100, strata=strata)
    assert len(parts.train) == 80
    assert set(strata[parts.train]) == set(strata)


def test_a_fraction_that_leaves_no_training_rows_is_an_error():
    with pytest.raises(ValueError, match="leaves no training rows"):
        split(1, 0.9)


def test_calibration_rows_are_used_for_nothing_else():
    """Other targets in the calibration rows change the intervals only."""
    X, y = mixed_table(300)
    model = regressor(max_epochs=5)
    random_state = np.random.RandomState(model.random_state)
    random_state.randint(2**31 - 1)  # the seed of training
    split_seed = random_state.randint(2**31 - 1)
    parts = split_rows(300, "auto", 2, None, split_seed)
    other = y.copy()
    other[parts.calibration] += 100.0
    first, second = model.fit(X, y).predict(X), regressor(max_epochs=5).fit(X, other)

    np.testing.assert_array_equal(first, second.predict(X))
    assert second.head_.scores.min() > 10 * model.head_.scores.max()


def test_a_table_without_information_is_an_error_that_names_the_columns():
    X = pd.DataFrame({"same": ["x"] * 60, "never": pd.Series([None] * 60, dtype="string")})
    with pytest.raises(ValueError, match=r"no column to learn from\. .* 'same'\. .* 'never'"):
        classifier().fit(X, np.arange(60) % 2)
