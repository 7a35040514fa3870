"""The rules behind "auto", how rows are dealt out, and arguments without a meaning."""

from __future__ import annotations

import pytest
import torch
from estimators.problems import classes_of, classifier, mixed_table

from embens.estimators import choices
from embens.estimators.choices import Options


def deal(rows, fraction="auto", **changes):
    generator = torch.Generator().manual_seed(0)
    return choices.split(rows, fraction, generator=generator, **{"apart": 4, **changes})


@pytest.mark.parametrize("apart", [2, 4])
@pytest.mark.parametrize("rows", [10, 49, 50, 1000])
def test_every_row_is_in_one_part(rows, apart):
    parts = deal(rows, apart=apart)
    assert torch.cat(parts).sort().values.tolist() == list(range(rows))
    held = 0 if rows < 50 else rows // 5
    assert (len(parts.stop), len(parts.calibrate)) == (held - held // apart, held // apart)


def test_at_most_ten_thousand_rows_are_held_out():
    assert len(deal(200_000).stop) == 7_500
    assert len(deal(1000, 0.5).stop) == 375
    assert len(deal(1000, 0).stop) == 0


def test_classes_keep_their_shares_and_none_is_held_out_whole():
    groups = torch.tensor([0] * 700 + [1] * 290 + [2] * 9 + [3])
    parts = deal(1000, groups=groups)
    held = groups[torch.cat(parts[1:])].bincount(minlength=4)
    train = groups[parts.train].bincount()
    assert held.tolist() == pytest.approx([140, 58, 1.8, 0], abs=1)
    assert (train > 0).all()


def test_a_tiny_table_is_one_batch_without_dropout():
    sizes = choices.choose_sizes(30, Options())
    assert (sizes.batch_size, sizes.dropout) == (30, 0.0)
    assert choices.choose_sizes(10**6, Options()).epochs == choices.EPOCHS[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "bach_ensemble"}, "did you mean 'batch_ensemble'"),
        ({"members": 0}, "members: expected a whole number of at least 1 or 'auto'; got 0"),
        ({"p": 2.0}, "p: expected a number from -1 to 1"),
        ({"depth": "auto"}, "depth: expected a whole number of at least 1; got 'auto'"),
        ({"law": 0.9}, "law: expected a law"),
        ({"time_limit": 0}, "time_limit: expected a number from 1 to inf or None; got 0"),
        ({"sites": "last"}, "sites: unknown 'last'"),
        ({"validation_fraction": 1.0}, "validation_fraction: expected a number from 0 to 0.9"),
        ({"categorical_features": ["siz"]}, "no column 'siz'; did you mean 'size'"),
        ({"categorical_features": "size"}, r"For one column write \['size'\]"),
        ({"categorical_features": [True]}, "boolean index did not match .* size of axis is 5"),
        ({"categorical_features": [9]}, "index 9 is out of bounds for axis 0 with size 5"),
    ],
)
def test_arguments_without_a_meaning_say_what_was_expected(changes, message):
    X, target = mixed_table(60)
    with pytest.raises(ValueError, match=message):
        classifier(**changes).fit(X, classes_of(target))


def test_options_that_contradict_each_other_are_an_error():
    from embens import laws

    X, target = mixed_table(60)
    with pytest.raises(ValueError, match="have no modulations"):
        classifier("independent", law=laws.Bernoulli(0.9)).fit(X, classes_of(target))
    with pytest.raises(ValueError, match="leaves no rows to select"):
        classifier(refit=True, select=2).fit(X, classes_of(target))


def test_a_race_is_run_between_what_is_not_given():
    sizes = choices.choose_sizes(1000, Options())
    assert len(choices.candidates(sizes, Options())) == len(choices.RACE)
    fixed = choices.candidates(sizes, Options(dropout=0.2))
    assert {mine.dropout for mine in fixed} == {0.2}
    assert len(fixed) == 2
    assert len(choices.candidates(sizes, Options(dropout=0.2, weight_decay=0.0))) == 1
