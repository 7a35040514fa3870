"""Bin edges and scores of numeric columns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from embens.tabular.columns import learn_columns
from embens.tabular.defaults import Arguments
from embens.tabular.frames import from_array
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
