"""Merged weights give the outputs of the ensemble."""

from __future__ import annotations

import pytest
import torch
from tabular.problems import classes_of, classifier, mixed_table, regressor

from embens.tabular.predictor import can_merge, predict_members


@pytest.fixture(scope="module")
def table():
    return mixed_table()


def rows_of(model, X):
    from embens.tabular.frames import from_frame

    fitted = model.fitted_
    return fitted.encoder, *fitted.preprocessing.encode(from_frame(X), fitted.dtype)


def expected_outputs(model, X):
    encoder, numbers, codes = rows_of(model, X)
    with torch.no_grad():
        return model.ensemble_.eval()(encoder(numbers, codes))


@pytest.mark.parametrize(
    ("options", "merges"),
    [
        ({}, True),
        ({"sites": "hidden"}, True),
        ({"depth": 1}, True),
        ({"folds": 2}, True),
        ({"numerical_embedding": "none"}, True),
        ({"max_categories": 2}, True),
        ({"own": False}, True),
        ({"numerical_embedding": "both"}, True),
        ({"family": "mc_dropout"}, True),
        ({"sites": "all"}, False),
        ({"family": "last_layer_dropout"}, False),
        ({"family": "independent"}, False),
    ],
)
def test_merged_weights_give_the_outputs_of_the_ensemble(table, options, merges):
    X, y = table
    model = classifier(max_epochs=1, **options).fit(X, classes_of(y))
    for group in getattr(model.ensemble_, "groups", [model.ensemble_]):
        assert can_merge(group) == merges
    outputs = predict_members(model.ensemble_, *rows_of(model, X))
    torch.testing.assert_close(outputs, expected_outputs(model, X))


@pytest.mark.parametrize("loss", ["quantile", "squared"])
def test_merged_weights_give_the_outputs_of_a_regressor(table, loss):
    X, y = table
    model = regressor(max_epochs=1, loss=loss).fit(X, y)
    outputs = predict_members(model.ensemble_, *rows_of(model, X))
    torch.testing.assert_close(outputs, expected_outputs(model, X))


def test_weights_are_merged_again_after_a_change(table):
    X, y = table
    model = classifier(max_epochs=1).fit(X, classes_of(y))
    rows = rows_of(model, X)
    before = predict_members(model.ensemble_, *rows)
    with torch.no_grad():
        next(model.ensemble_.individual_parameters()).mul_(2)
    after = predict_members(model.ensemble_, *rows)

    assert not torch.equal(before, after)
    torch.testing.assert_close(after, expected_outputs(model, X))
