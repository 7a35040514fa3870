"""Validation of arguments, and the rules behind "auto"."""

from __future__ import annotations

import pytest
from tabular.problems import classes_of, classifier, mixed_table

from embens import laws
from embens.tabular import EmbeddedEnsembleRegressor, defaults
from embens.tabular.defaults import Arguments, choose_sizes, size_candidates


def test_a_tiny_table_is_one_batch_without_dropout():
    sizes = choose_sizes(30, Arguments())
    assert (sizes.batch_size, sizes.dropout) == (30, 0.0)


def test_a_large_table_has_the_smallest_number_of_epochs():
    assert choose_sizes(10**6, Arguments()).epochs == defaults.MIN_EPOCHS


def test_the_quantile_loss_has_half_of_the_steps_at_twice_the_rate():
    quantile = choose_sizes(6000, EmbeddedEnsembleRegressor())
    likelihood = choose_sizes(6000, EmbeddedEnsembleRegressor(loss="likelihood"))
    assert quantile.lr == 2 * likelihood.lr
    assert quantile.epochs == pytest.approx(likelihood.epochs / 2, abs=1)
    assert quantile.batch_size == likelihood.batch_size == 256
    assert choose_sizes(6000, EmbeddedEnsembleRegressor(batch_size=64)).batch_size == 64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "bach_ensemble"}, "family must be one of 'batch_ensemble', "),
        ({"members": 0}, "members must be a positive integer or 'auto', got 0"),
        ({"members": True}, "members must be a positive integer or 'auto', got True"),
        ({"tune": "no"}, "tune must be True or False, got 'no'"),
        ({"own": None}, "own must be True or False, got None"),
        ({"p": 2.0}, "p must be a number from -1 to 1 or 'auto', got 2.0"),
        ({"depth": "auto"}, "depth must be a positive integer, got 'auto'"),
        ({"law": 0.9}, "law must be a law of embens.laws or None, got 0.9"),
        ({"lr": 0}, "lr must be a positive number or 'auto', got 0"),
        ({"lr": float("inf")}, "lr must be a positive number or 'auto', got inf"),
        ({"time_limit": 0}, "time_limit must be a number from 1 to inf or None, got 0"),
        ({"n_jobs": 0}, "n_jobs must be a positive number of threads, .* got 0"),
        ({"n_jobs": [2]}, r"n_jobs must be a positive number of threads, .* got \[2\]"),
        ({"sites": "last"}, "sites must be one of 'auto', 'first', 'hidden', 'all', got 'last'"),
        ({"validation_fraction": 1.0}, "validation_fraction must be a number from 0 to 0.9"),
        ({"categorical_features": ["siz"]}, r"the column 'siz', .* columns are \['size', "),
        ({"categorical_features": "size"}, r"For one column pass \['size'\]"),
        ({"categorical_features": [True]}, "boolean index did not match .* size of axis is 5"),
        ({"categorical_features": [9]}, "index 9 is out of bounds for axis 0 with size 5"),
    ],
)
def test_invalid_arguments_raise_what_was_expected_and_received(changes, message):
    X, target = mixed_table(60)
    with pytest.raises(ValueError, match=message):
        classifier(**changes).fit(X, classes_of(target))


def test_separate_networks_take_no_law():
    X, target = mixed_table(60)
    with pytest.raises(ValueError, match="have no modulations"):
        classifier("independent", law=laws.Bernoulli(0.9)).fit(X, classes_of(target))


def candidates(arguments):
    return size_candidates(choose_sizes(1000, arguments), arguments)


def test_the_search_compares_only_what_is_auto():
    assert len(candidates(Arguments())) == len(defaults.REGULARISATIONS)
    fixed_dropout = candidates(Arguments(dropout=0.2))
    assert {candidate.dropout for candidate in fixed_dropout} == {0.2}
    assert len(fixed_dropout) == 2
    assert len(candidates(Arguments(dropout=0.2, weight_decay=0.0))) == 1
