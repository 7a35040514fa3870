"""Arguments without a meaning are refused when an estimator is fitted."""

from __future__ import annotations

import pytest
from estimators.problems import classes_of, classifier, mixed_table


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "bach_ensemble"}, "did you mean 'batch_ensemble'"),
        ({"members": 0}, "members: expected a whole number of at least 1 or 'auto'; got 0"),
        ({"p": 2.0}, "p: expected a number from -1 to 1"),
        ({"depth": "auto"}, "depth: expected a whole number of at least 1; got 'auto'"),
        ({"law": 0.9}, "law: expected a law"),
        ({"validation_fraction": 1.0}, "validation_fraction: expected a number from 0 to 0.9"),
        ({"categorical_features": ["siz"]}, "no column 'siz'; did you mean 'size'"),
        ({"categorical_features": "size"}, r"For one column write \['size'\]"),
        ({"categorical_features": [True]}, "expected a mask of 5 columns; got one of 1"),
        ({"categorical_features": [9]}, "no column 9; there are 5"),
    ],
)
def test_arguments_without_a_meaning_say_what_was_expected(changes, message):
    X, target = mixed_table(60)
    with pytest.raises(ValueError, match=message):
        classifier(**changes).fit(X, classes_of(target))


def test_a_law_for_a_family_without_masks_is_an_error():
    from embens import laws

    X, target = mixed_table(60)
    with pytest.raises(ValueError, match="has no masks"):
        classifier(law=laws.Bernoulli(0.9)).fit(X, classes_of(target))
