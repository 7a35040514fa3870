"""The encoder, the reference network, and that every ensemble of tables runs folded."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tabular.problems import classes_of, classifier, fitted, mixed_table, regressor
from torch import nn

import embens
from embens import laws
from embens.tabular import perceptron
from embens.tabular.columns import learn_columns
from embens.tabular.defaults import Arguments
from embens.tabular.frames import from_array, from_frame
from embens.tabular.layers import Periodic
from embens.tabular.perceptron import (
    Dropout,
    EncodedBatches,
    Encoder,
    Rows,
    build_network,
    predict_rows,
)


def encoded_columns(values, **changes):
    """Return the preprocessing of an array, its encoder, and its numbers and codes in float64."""
    table = from_array(np.asarray(values, dtype=float).reshape(len(values), -1))
    preprocessing = learn_columns(table, Arguments(**changes))
    encoder = Encoder(preprocessing).double()
    return preprocessing, encoder, preprocessing.encode(table, torch.float64)


def encode(values, **changes):
    """Return the preprocessing of an array and the inputs of the network, in float64."""
    preprocessing, encoder, columns = encoded_columns(values, **changes)
    return preprocessing, encoder(*columns)


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


@pytest.mark.parametrize("value", [np.nan, 7.0])
def test_a_column_without_information_is_encoded_as_zeros_for_any_value(value):
    preprocessing, inputs = encode([[value, 1.0], [value, 2.0], [value, 3.0]], bins=2)
    assert inputs[:, [0, 2]].abs().sum() == 0
    other = preprocessing.encode(from_array(np.array([[9.0, 2.0]])), torch.float64)
    torch.testing.assert_close(Encoder(preprocessing).double()(*other), inputs[1:2])


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
    network = build_network(model.fitted_.encoder, model.head_, model, model.sizes_)
    assert isinstance(network[0], Periodic) == (embedding in ("periodic", "both"))


@pytest.mark.parametrize("embedding", ["piecewise", "both"])
@pytest.mark.parametrize("loss", ["quantile", "squared"])
def test_tables_with_categories_and_missing_values_run_folded(embedding, loss):
    X, target = mixed_table(60)
    X["number"] = np.arange(60.0)  # without missing values
    model = regressor(numerical_embedding=embedding, loss=loss, dropout=0.1, max_epochs=1)
    ensemble = model.fit(X, target).ensemble_
    assert ensemble.executor == "folded"


@pytest.mark.parametrize("encoded_values", [0, 10**6])
def test_batches_cover_all_rows_in_a_new_order_in_every_pass(encoded_values, monkeypatch):
    monkeypatch.setattr(perceptron, "ENCODED_VALUES", encoded_values)
    _, encoder, table = encoded_columns(np.arange(10.0), bins=2)
    numbers, codes = table
    rows = Rows(numbers, codes, torch.arange(10.0)[:, None])
    batches = EncodedBatches(rows, encoder, 4, torch.Generator().manual_seed(0))
    orders = []
    for _ in range(2):
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        orders.append(targets[:, 0].tolist())
        torch.testing.assert_close(inputs, encoder(numbers, codes)[targets[:, 0].long()])
    assert [sorted(order) for order in orders] == [list(range(10))] * 2
    assert orders[0] != orders[1] != list(range(10))
    (inputs, target), *_ = EncodedBatches(rows, encoder, 4)
    torch.testing.assert_close(inputs, encoder(numbers, codes)[:4])
    assert target[:, 0].tolist() == [0, 1, 2, 3]


def test_outputs_of_many_rows_are_those_of_each_row():
    model, X, _ = fitted()
    preprocessing, encoder = model.preprocessing_, model.fitted_.encoder
    numbers, codes = preprocessing.encode(from_frame(X))
    rows = Rows(numbers, codes, torch.zeros(len(X), 1))
    many = predict_rows(model.ensemble_, encoder, rows[torch.arange(len(X)).repeat(20)])
    few = predict_rows(model.ensemble_, encoder, rows)

    torch.testing.assert_close(many, few.repeat(1, 20, 1))


def test_dropout_follows_every_hidden_layer():
    X, target = mixed_table(60)
    model = regressor(depth=3, dropout=0.2, max_epochs=1).fit(X, target)
    network = build_network(model.fitted_.encoder, model.head_, model, model.sizes_)
    kinds = [type(module).__name__ for module in network]
    assert kinds == ["Linear", "ReLU", "Dropout"] * 3 + ["Linear"]
    rates = [module.p for module in network if isinstance(module, nn.Dropout)]
    assert rates == [0.2] * 3


def test_dropout_keeps_the_rate_and_the_mean():
    layer = Dropout(0.1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        outputs = layer(torch.ones(100_001))

    rate = 26 / 256
    error = math.sqrt(rate * (1 - rate) / 100_001)
    assert abs((outputs == 0).double().mean() - rate) < 4 * error
    assert outputs.unique().tolist() == [0.0, pytest.approx(1 / (1 - rate))]


def test_dropout_masks_are_independent_and_follow_the_seed():
    layer = Dropout(0.5)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first, second = layer(torch.ones(2, 40_000)) - 1
        torch.manual_seed(0)
        repeated = layer(torch.ones(2, 40_000)) - 1

    assert abs((first * second).mean()) < 4 / math.sqrt(40_000)
    assert torch.equal(repeated[0], first)


def test_dropout_has_the_gradient_of_its_mask():
    inputs = torch.ones(64, 5, dtype=torch.bfloat16, requires_grad=True)
    outputs = Dropout(0.3)(inputs)
    outputs.sum().backward()

    assert outputs.dtype is torch.bfloat16
    assert torch.equal(inputs.grad, outputs)


@pytest.mark.parametrize("rate", [0.0, 0.001, 1.0])
def test_dropout_of_extreme_rates(rate):
    expected = torch.ones(8, 8) * (rate < 1)

    assert torch.equal(Dropout(rate)(torch.ones(8, 8)), expected)
    assert torch.equal(Dropout(rate).eval()(torch.ones(8, 8)), torch.ones(8, 8))


def test_members_draw_separate_dropout_masks_in_a_folded_network():
    reference = nn.Sequential(nn.Linear(3, 8), Dropout(0.5), nn.Linear(8, 8))
    ensemble = embens.embed(reference, 2, pre=laws.Constant(1), post=laws.Constant(1)).train()
    first, second = ensemble(torch.ones(40, 3))

    assert "runs folded" in repr(ensemble)
    assert not torch.equal(first, second)
    assert torch.equal(*ensemble.eval()(torch.ones(40, 3)))
