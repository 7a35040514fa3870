"""What is learnt about columns, and how the network encodes them."""

from __future__ import annotations

import time

import numpy as np
import pandas as pd
import pytest
import torch
from estimators.problems import classes_of, classifier, mixed_table
from scipy import stats

from embens.estimators import preprocessing
from embens.estimators.choices import Options
from embens.estimators.network import Encode, Periodic, build
from embens.estimators.tables import from_array, from_frame


def learn(table, weights=None, **changes):
    return preprocessing.learn(table, Options(**changes), weights)


def encode(values, **changes):
    table = from_array(np.asarray(values, dtype=float).reshape(len(values), -1))
    learnt = learn(table, **changes)
    return learnt, Encode(learnt), learnt.encode(table, torch.float64)


def test_columns_are_told_apart_by_their_types():
    X, _ = mixed_table()
    learnt = learn(from_frame(X))
    assert [learnt.names[j] for j in learnt.numeric] == ["size", "time"]
    assert [learnt.names[j] for j in learnt.categorical] == ["colour", "open", "grade"]
    assert learnt.categories[0] == ["blue", "green", "red"]
    assert learnt.missing == [True, False]
    assert learnt.absent == [True, False, False]


def test_columns_can_be_named_categorical():
    table = from_array(np.array([[1, 5], [2, 6], [2, 7]]))
    assert learn(table, categorical_features=[-1]).categorical == [1]
    assert learn(table, categorical_features=[True, False]).categorical == [0]
    assert learn(table, categorical_features=[0]).categories == [["1", "2"]]


def test_the_bins_are_the_piecewise_linear_encoding_written_by_hand():
    values = np.random.default_rng(0).normal(size=200)
    learnt, module, inputs = encode(values, bins=5)
    ours = module.double()(*inputs)[:, 1:].numpy()
    edges = learnt.edges[0].double().numpy() * float(learnt.scale[0]) + float(learnt.centre[0])
    for b in range(5):
        low = -1.0 if b == 0 else 0.0
        high = 2.0 if b == 4 else 1.0
        ramp = np.clip((values - edges[b]) / (edges[b + 1] - edges[b]), low, high)
        np.testing.assert_allclose(ours[:, b], ramp, atol=1e-6)


def test_quantile_scores_are_normal_whatever_the_column():
    values = np.exp(3 * np.random.default_rng(0).normal(size=2000))
    _, module, inputs = encode(values, bins=32)
    scores = module.double()(*inputs)[:, 0].numpy()
    assert scores.mean() == pytest.approx(0, abs=1e-6)
    assert scores.std() == pytest.approx(1, abs=1e-6)
    expected = stats.norm.ppf((stats.rankdata(values) - 0.5) / len(values))
    assert np.corrcoef(scores, expected)[0, 1] > 0.99


def test_standard_scores_are_the_standardised_numbers_within_the_range_of_the_table():
    values = np.random.default_rng(0).uniform(5, 9, size=500)
    _, module, inputs = encode(values, scaling="standard", bins=8)
    scores = module.double()(*inputs)[:, 0].numpy()
    np.testing.assert_allclose(scores, (values - values.mean()) / values.std(), atol=1e-5)


def test_numbers_far_outside_are_held_one_bin_beyond_the_edge():
    learnt, module, _ = encode(np.arange(100.0), bins=4)
    table = from_array(np.array([[1e9], [1e12], [-1e9], [-1e12]]))
    found = module(*learnt.encode(table))
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[2], found[3])
    assert found.isfinite().all()


def test_a_missing_number_has_an_indicator_and_nothing_else():
    learnt, module, inputs = encode([1.0, 2.0, np.nan, 4.0], bins=2)
    row = module.double()(*inputs)[2]
    assert row[:-1].abs().sum() == 0
    assert row[-1] == 1
    assert learnt.missing == [True]


def test_large_numbers_keep_their_differences():
    values = 1.6e9 + np.arange(1000.0)
    _, module, inputs = encode(values, bins=4)
    scores = module(inputs[0].float(), inputs[1])[:, 0]
    assert (scores.diff() > 0).all()


def test_categories_become_one_input_each_and_unseen_ones_are_rare():
    frame = pd.DataFrame({"a": ["x"] * 2000 + ["y"] * 1500 + ["once"]})
    learnt = learn(from_frame(frame))
    assert learnt.categories == [["x", "y"]]
    assert learnt.rare == [True]
    inputs = learnt.encode(from_frame(pd.DataFrame({"a": ["y", "once", "never", None]})))
    expected = [[0, 1, 0], [0, 0, 1], [0, 0, 1], [0, 0, 0]]
    assert Encode(learnt)(*inputs).tolist() == expected


def test_categories_survive_a_round_trip_by_csv():
    frame = pd.DataFrame({"a": pd.Categorical([1, 2, 3] * 10)})
    learnt = learn(from_frame(frame))
    floats = pd.DataFrame({"a": [1.0, np.nan, 3.0]})
    assert learnt.encode(from_frame(floats))[1][:, 0].tolist() == [0, 4, 2]


def test_weights_count_like_rows():
    rng = np.random.default_rng(0)
    values, weights = rng.normal(size=(30, 2)), rng.integers(1, 5, 30)
    ours = learn(from_array(values), torch.from_numpy(weights).double(), bins=6)
    repeated = learn(from_array(values.repeat(weights, axis=0)), bins=6)
    np.testing.assert_allclose(ours.centre, repeated.centre)
    torch.testing.assert_close(ours.edges, repeated.edges)
    torch.testing.assert_close(ours.scores, repeated.scores)


def test_a_large_table_is_encoded_in_blocks_with_the_same_result(monkeypatch):
    X, _ = mixed_table()
    table = from_frame(X)
    learnt = learn(table)
    whole = learnt.encode(table)
    monkeypatch.setattr(preprocessing, "BLOCK", 37)
    rows = torch.randperm(len(X), generator=torch.Generator().manual_seed(0))
    for part, all_rows in zip(learnt.encode(table), whole, strict=True):
        torch.testing.assert_close(part, all_rows, equal_nan=True)
    for part, all_rows in zip(learnt.encode(table, rows=rows), whole, strict=True):
        torch.testing.assert_close(part, all_rows[rows], equal_nan=True)


def test_a_column_without_a_value_is_ignored_and_said_so():
    learnt, module, inputs = encode([[np.nan, 1.0], [np.nan, 2.0], [np.nan, 3.0]], bins=2)
    assert learnt.notes == ["column 0 has no value at all and is ignored"]
    assert module.double()(*inputs)[:, 0].abs().sum() == 0


def test_a_thousand_columns_of_text_stay_within_the_budget():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.choice(list("abcdefghij"), (40, 1000))).add_prefix("c")
    learnt = learn(from_frame(frame))
    assert len(learnt.slots) <= 2 * preprocessing.ENCODED
    assert "1000 categorical columns: 4 categories kept of each" in learnt.notes


@pytest.mark.parametrize("embedding", ["piecewise", "periodic", "none"])
def test_every_numerical_embedding_trains_and_is_run_once_for_all_members(embedding):
    X, target = mixed_table()
    model = classifier(numerical_embedding=embedding, max_epochs=25).fit(X, classes_of(target))
    assert model.score(X, classes_of(target)) > 0.6
    network = build(model.preprocessing_, 3, model, model.fitted_.sizes)
    assert isinstance(network.body[0], Periodic) == (embedding == "periodic")


def test_the_time_for_columns_of_text_grows_no_faster_than_their_number():
    rng, seconds = np.random.default_rng(0), []
    for columns in (500, 4000):
        frame = pd.DataFrame(rng.choice(list("abcdefgh"), (20, columns))).add_prefix("c")
        tries = []
        for _ in range(3):
            start = time.process_time()
            table = from_frame(frame).check()
            learn(table).encode(table)
            tries.append(time.process_time() - start)
        seconds.append(min(tries))
    assert seconds[1] < 20 * seconds[0]  # 8 times as many columns; squared, 64
