"""Validation of arguments, the rules behind "auto", and the split of rows."""

from __future__ import annotations

import pytest
import torch
from tabular.problems import classes_of, classifier, mixed_table

from embens import laws
from embens.tabular import defaults
from embens.tabular.defaults import Arguments


def split(rows, fraction="auto", *, stride=4, strata=None):
    generator = torch.Generator().manual_seed(0)
    return defaults.split_rows(rows, fraction, stride=stride, strata=strata, generator=generator)


@pytest.mark.parametrize("stride", [2, 4])
@pytest.mark.parametrize("rows", [10, 49, 50, 1000])
def test_every_row_is_in_exactly_one_part(rows, stride):
    parts = split(rows, stride=stride)
    together = torch.cat([parts.train, parts.validation, parts.calibration])
    assert together.sort().values.tolist() == list(range(rows))
    held_out = 0 if rows < 50 else rows // 5
    assert len(parts.calibration) == held_out // stride
    assert len(parts.validation) == held_out - held_out // stride


def test_at_most_ten_thousand_rows_are_held_out_by_default():
    assert len(split(200_000).validation) == 7_500
    assert len(split(1000, 0.5).validation) == 375
    assert len(split(1000, 0).validation) == 0


def test_strata_keep_their_proportions_and_none_is_held_out_completely():
    strata = torch.tensor([0] * 700 + [1] * 290 + [2] * 9 + [3])
    parts = split(1000, strata=strata)
    held_out = strata[torch.cat([parts.validation, parts.calibration])].bincount(minlength=4)
    assert held_out.tolist() == pytest.approx([140, 58, 1.8, 0], abs=1)
    assert (strata[parts.train].bincount() > 0).all()


def test_a_fraction_that_leaves_no_training_rows_is_an_error():
    with pytest.raises(ValueError, match="leaves no training rows"):
        split(1, 0.9)


def test_a_tiny_table_is_one_batch_without_dropout():
    sizes = defaults.choose_sizes(30, Arguments())
    assert (sizes.batch_size, sizes.dropout) == (30, 0.0)


def test_a_large_table_has_the_smallest_number_of_epochs():
    assert defaults.choose_sizes(10**6, Arguments()).epochs == defaults.MIN_EPOCHS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "bach_ensemble"}, "family must be one of 'batch_ensemble', "),
        ({"members": 0}, "members must be a positive integer or 'auto', got 0"),
        ({"members": True}, "members must be a positive integer or 'auto', got True"),
        ({"p": 2.0}, "p must be a number from -1 to 1 or 'auto', got 2.0"),
        ({"depth": "auto"}, "depth must be a positive integer, got 'auto'"),
        ({"law": 0.9}, "law must be a law of embens.laws or None, got 0.9"),
        ({"time_limit": 0}, "time_limit must be a number from 1 to inf or None, got 0"),
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


def test_the_race_compares_only_what_is_auto():
    sizes = defaults.choose_sizes(1000, Arguments())
    assert len(defaults.race_candidates(sizes, Arguments())) == len(defaults.RACE)
    fixed_dropout = defaults.race_candidates(sizes, Arguments(dropout=0.2))
    assert {candidate.dropout for candidate in fixed_dropout} == {0.2}
    assert len(fixed_dropout) == 2
    assert len(defaults.race_candidates(sizes, Arguments(dropout=0.2, weight_decay=0.0))) == 1
