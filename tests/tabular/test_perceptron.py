"""The reference network: its encoder, its parts, and that torch.fx can trace it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tabular.problems import classes_of, classifier, mixed_table, regressor
from torch import nn

from embens.tabular.columns import learn_columns
from embens.tabular.defaults import Arguments
from embens.tabular.frames import from_array, from_frame
from embens.tabular.perceptron import Encoder, Periodic, build_network


def encode(values, **changes):
    """Return the preprocessing of an array and its encoded columns, in float64."""
    table = from_array(np.asarray(values, dtype=float).reshape(len(values), -1))
    preprocessing = learn_columns(table, Arguments(**changes))
    encoder = Encoder(preprocessing).double()
    return preprocessing, encoder(*preprocessing.encode(table, torch.float64))


def test_bins_are_the_piecewise_linear_encoding():
    values = np.random.default_rng(0).normal(size=200)
    preprocessing, inputs = encode(values, bins=5)
    (column,) = preprocessing.numeric
    edges = column.edges.double().numpy() * column.scale + column.centre
    for b in range(5):
        low = -1.0 if b == 0 else 0.0
        high = 2.0 if b == 4 else 1.0
        ramp = np.clip((values - edges[b]) / (edges[b + 1] - edges[b]), low, high)
        np.testing.assert_allclose(inputs[:, 2 + b], ramp, atol=1e-6)


def test_the_compressed_number_keeps_all_distinct_values():
    values = np.random.default_rng(0).normal(size=500)
    preprocessing, inputs = encode(values, bins=2)
    (column,) = preprocessing.numeric
    x = torch.from_numpy((values - column.centre) / column.scale)
    torch.testing.assert_close(inputs[:, 1], x / (1 + x**2 / 9).sqrt())
    assert len(inputs[:, 1].unique()) == 500


def test_numbers_far_outside_are_clipped_one_bin_beyond_the_edge():
    preprocessing, _ = encode(np.arange(100.0), bins=4)
    table = from_array(np.array([[1e9], [1e12], [-1e9], [-1e12]]))
    inputs = Encoder(preprocessing)(*preprocessing.encode(table))
    torch.testing.assert_close(inputs[0], inputs[1])
    torch.testing.assert_close(inputs[2], inputs[3])
    assert inputs.isfinite().all()


def test_a_missing_number_has_an_indicator_and_zeros():
    preprocessing, inputs = encode([1.0, 2.0, np.nan, 4.0], bins=2)
    assert inputs[2, :-1].abs().sum() == 0
    assert inputs[2, -1] == 1
    assert preprocessing.numeric[0].has_missing


def test_a_column_without_values_is_encoded_as_zeros():
    _, inputs = encode([[np.nan, 1.0], [np.nan, 2.0], [np.nan, 3.0]], bins=2)
    assert inputs[:, 0].abs().sum() == 0


def test_large_numbers_keep_their_differences_in_float32():
    table = from_array(1.6e9 + np.arange(1000.0)[:, None])
    preprocessing = learn_columns(table, Arguments(bins=4))
    scores = Encoder(preprocessing)(*preprocessing.encode(table))[:, 0]
    assert (scores.diff() > 0).all()


@pytest.mark.parametrize("embedding", ["piecewise", "periodic", "both", "none"])
def test_every_numerical_embedding_trains(embedding):
    X, target = mixed_table()
    model = classifier(numerical_embedding=embedding, max_epochs=25).fit(X, classes_of(target))
    assert model.score(X, classes_of(target)) > 0.6
    network = build_network(model.preprocessing_, model.head_, model, model.sizes_)
    assert isinstance(network.body[0], Periodic) == (embedding in ("periodic", "both"))


@pytest.mark.parametrize("embedding", ["piecewise", "both"])
@pytest.mark.parametrize("loss", ["quantile", "squared"])
def test_fx_traces_the_network_and_rows_are_independent(embedding, loss):
    X, target = mixed_table(60)
    X["number"] = np.arange(60.0)  # without missing values
    model = regressor(numerical_embedding=embedding, loss=loss, dropout=0.1, max_epochs=1)
    model.fit(X, target)
    network = build_network(model.preprocessing_, model.head_, model, model.sizes_).eval()
    numbers, codes = model.preprocessing_.encode(from_frame(X))
    traced = torch.fx.symbolic_trace(network)
    outputs = traced(numbers, codes)
    torch.testing.assert_close(outputs, network(numbers, codes))
    torch.testing.assert_close(traced(numbers[7:8], codes[7:8]), outputs[7:8])


def test_periodic_appends_sines_and_cosines():
    layer = Periodic(2, frequencies=3)
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    outputs = layer(x)
    assert outputs.shape == (5, 4 + 2 * 2 * 3)
    angle = 2 * torch.pi * x[:, 1] * layer.frequencies[1, 2]
    torch.testing.assert_close(outputs[:, 4 + 5], angle.sin())
    torch.testing.assert_close(outputs[:, 4 + 6 + 5], angle.cos())


def test_dropout_follows_every_hidden_layer():
    X, target = mixed_table(60)
    model = regressor(depth=3, dropout=0.2, max_epochs=1).fit(X, target)
    network = build_network(model.preprocessing_, model.head_, model, model.sizes_)
    kinds = [type(module).__name__ for module in network.body]
    assert kinds == ["Linear", "ReLU", "Dropout"] * 3 + ["Linear"]
    rates = [module.p for module in network.body if isinstance(module, nn.Dropout)]
    assert rates == [0.2] * 3
