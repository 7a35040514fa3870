"""What is learnt about columns, and how the network encodes them."""

from __future__ import annotations

import time

import numpy as np
import pandas as pd
import pytest
import torch
from estimators.problems import classes_of, classifier, mixed_table, regressor
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
    assert learn(table, categorical_features=np.array([False, True])).categorical == [1]
    assert learn(table, categorical_features=[True, False]).categorical == [0]
    assert learn(table, categorical_features=[0]).categories == [["1", "2"]]


def test_the_bins_are_the_piecewise_linear_encoding_written_by_hand():
    values = np.random.default_rng(0).normal(size=200)
    learnt, module, inputs = encode(values, bins=5)
    ours = module.double()(*inputs)[:, 2:].numpy()
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


def test_a_tied_value_is_an_edge_and_the_others_share_the_bins_that_are_left():
    rng = np.random.default_rng(0)
    values = np.where(rng.random(4000) < 0.92, 0.0, np.exp(rng.normal(size=4000)))
    edges = learn(from_array(values[:, None]), bins=16).edges[0]
    found = edges[~edges.isnan()]
    assert len(found) == 17
    assert (found == 0).sum() == 1  # centre and scale of zeros are 0 and their mean distance
    rest = np.sort(values[values > 0])
    learnt = learn(from_array(values[:, None]), bins=16)
    ours = found[1:].double() * learnt.scale + learnt.centre
    share = np.searchsorted(rest, ours.numpy() * (1 + 1e-6)) / len(rest)
    np.testing.assert_allclose(share, np.linspace(0, 1, 16), atol=0.01)


def test_full_resolution_is_kept_beside_the_bins():
    values = np.random.default_rng(0).normal(size=500)
    _, module, inputs = encode(values, bins=2)
    near = module.double()(*inputs)[:, 1]
    x = inputs[0][:, 0]
    torch.testing.assert_close(near, x / (1 + x**2 / 9).sqrt())
    assert len(near.unique()) == 500


def test_the_number_of_bins_follows_that_of_rows():
    rng = np.random.default_rng(0)
    for rows, bins in ((300, 32), (8192, 64), (40_000, 128)):
        assert learn(from_array(rng.normal(size=(rows, 1)))).edges.shape == (1, bins + 1)


def test_bins_of_a_tree_lie_where_the_target_changes():
    x = np.random.default_rng(0).uniform(size=(2000, 1))
    target = torch.from_numpy(x > 0.61).double()
    learnt = preprocessing.learn(from_array(x), Options(binning="tree", bins=8), None, target)
    edges = learnt.edges[0].double() * learnt.scale + learnt.centre
    below = x[x <= 0.61].max()
    assert (edges - below).abs().min() < 1e-6


def test_a_date_has_its_parts():
    times = pd.to_datetime(["2024-02-29 23:10", "2025-01-05 00:00", None])
    table = from_frame(pd.DataFrame({"when": times, "x": [1.0, 2.0, 3.0]}))
    learnt = learn(table)
    assert learnt.parts == ["", "month", "day", "weekday", "hour", ""]
    assert [table.numbers(0, part)[0] for part in learnt.parts[1:5]] == [2, 29, 3, 23]
    assert [table.numbers(0, part)[1] for part in learnt.parts[1:5]] == [1, 5, 6, 0]
    assert np.isnan(table.numbers(0, "hour")[2])


def test_free_text_is_ignored_and_said_so():
    frame = pd.DataFrame({"text": [f"order {i} of it" for i in range(80)], "x": np.arange(80.0)})
    learnt = learn(from_frame(frame))
    assert learnt.categorical == []
    assert learnt.notes == ["text has another text in nearly every row and is ignored"]
    assert learn(from_frame(frame), categorical_features=["text"]).categorical == [0]


class TestStatisticsOfManyCategories:
    def setup_method(self):
        rng = np.random.default_rng(0)
        self.codes = torch.from_numpy(rng.integers(0, 50, 3000))
        self.frame = pd.DataFrame({"a": [f"c{c:02}" for c in self.codes.tolist()]})
        self.target = torch.from_numpy(rng.normal(size=(3000, 1)))
        self.folds = torch.from_numpy(rng.integers(0, preprocessing.FOLDS, 3000))
        self.table = from_frame(self.frame)
        self.learnt = preprocessing.learn(self.table, Options(), None, self.target, self.folds)

    def seen(self, **changes):
        inputs = self.learnt.encode(self.table, **changes)
        return Encode(self.learnt).double()(*inputs)[:, :2]

    def test_they_are_means_drawn_to_the_mean_of_all(self):
        y = self.target[:, 0]
        mine = self.codes == 7
        expected = (y[mine] - y.mean()).sum() / (mine.sum() + preprocessing.ADDED)
        assert self.seen()[mine][0, 0].item() == pytest.approx(expected.item(), abs=1e-6)
        share = (mine.sum() + 1) / (3000 + 50)
        assert self.seen()[mine][0, 1].item() == pytest.approx(share.log10().item(), abs=1e-6)

    def test_a_row_to_train_on_does_not_see_its_own_target(self):
        before = self.seen(folds=self.folds)[0, 0].item()
        self.target[0] += 100
        self.learnt = preprocessing.learn(self.table, Options(), None, self.target, self.folds)
        after = self.seen(folds=self.folds)
        mean = 100 / 3000  # by which the mean of all rows moves, of which a part is in each
        assert after[0, 0].item() == pytest.approx(before, abs=mean)
        others = (self.codes == self.codes[0]) & (self.folds != self.folds[0])
        assert after[others][0, 0] > 0.5

    def test_a_label_that_is_not_known_has_the_mean(self):
        inputs = self.learnt.encode(from_frame(pd.DataFrame({"a": ["never", None]})))
        assert Encode(self.learnt)(*inputs)[:, 0].tolist() == [0.0, 0.0]

    def test_effects_of_rare_categories_are_learnt(self):
        rng = np.random.default_rng(1)
        codes = rng.integers(0, 300, 1500)
        y = rng.normal(size=300)[codes] + 0.1 * rng.normal(size=1500)
        X = pd.DataFrame({"a": [f"c{c}" for c in codes]})
        model = regressor(max_categories=16).fit(X[:1200], y[:1200])
        assert model.score(X[1200:], y[1200:]) > 0.5  # with statistics of 16 kept ones: near 0


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


@pytest.mark.parametrize("embedding", ["piecewise", "periodic", "both", "none"])
def test_every_numerical_embedding_trains_and_is_run_once_for_all_members(embedding):
    X, target = mixed_table()
    model = classifier(numerical_embedding=embedding, max_epochs=25).fit(X, classes_of(target))
    assert model.score(X, classes_of(target)) > 0.6
    network = build(model.preprocessing_, model.head_, model, model.fitted_.sizes)
    assert isinstance(network.body[0], Periodic) == (embedding in ("periodic", "both"))


def test_the_time_for_columns_of_text_grows_no_faster_than_their_number():
    rng, seconds = np.random.default_rng(0), []
    for columns in (250, 2000):
        frame = pd.DataFrame(rng.choice(list("abcdefgh"), (20, columns))).add_prefix("c")
        tries = []
        for _ in range(3):
            start = time.process_time()
            table = from_frame(frame).check()
            learn(table).encode(table)
            tries.append(time.process_time() - start)
        seconds.append(min(tries))
    assert seconds[1] < 20 * seconds[0]  # 8 times as many columns; squared, 64
