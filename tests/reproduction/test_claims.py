"""Statistics, their intervals, and verdicts."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy
import pandas
import pytest

from reproduction.claims import (
    FAILS,
    HOLDS,
    UNDECIDED,
    Claim,
    growth_of_best,
    judge,
    rise_and_fall,
    slope,
    verdict,
)
from reproduction.intervals import bootstrap, interval
from reproduction.rows import MissingCellsError, Rows


def claim_of(statistic, **options):
    return Claim(statement="s", measure="m", statistic=statistic, **options)


def seeds(*values):
    return pandas.DataFrame({"seed": range(len(values)), "y": values})


def test_a_statistic_that_jumps_is_judged_by_the_bootstrap():
    noise = numpy.random.default_rng(2).normal(0, 0.012, (5, 4))
    rows = []
    for seed, accuracies in enumerate(numpy.array([0.90, 0.95, 0.953, 0.90]) + noise):
        for doublings, accuracy in enumerate(accuracies):
            rows.append({"seed": seed, "members": 2**doublings, "accuracy": accuracy})
    table = pandas.DataFrame(rows)
    claim = claim_of(rise_and_fall(lambda rows: rows))
    jumping, plain = judge([replace(claim, jumps=True), claim], table)
    drawn = interval(table, lambda t: t.rise_and_fall("members"), samples=bootstrap(table))

    assert (jumping.value, jumping.low, jumping.high, jumping.seeds) == drawn
    assert jumping.low != plain.low


@pytest.mark.parametrize(
    ("low", "high", "above", "below", "expected"),
    [
        (1.0, 2.0, 0.0, math.inf, HOLDS),
        (-2.0, -1.0, 0.0, math.inf, FAILS),
        (-1.0, 1.0, 0.0, math.inf, UNDECIDED),
        (0.0, 0.0, 0.0, math.inf, FAILS),
        (0.2, 0.3, 0.1, 0.4, HOLDS),
        (0.5, 0.6, 0.1, 0.4, FAILS),
        (0.3, 0.6, 0.1, 0.4, UNDECIDED),
        (0.0, 0.9, 0.1, 0.4, UNDECIDED),
        (math.nan, math.nan, 0.0, 1.0, UNDECIDED),
    ],
)
def test_a_verdict_follows_from_interval_and_region(low, high, above, below, expected):
    assert verdict(low, high, above, below) == expected


def test_a_claim_says_why_it_is_undecided():
    one_seed = claim_of(lambda t: t["y"].mean(), above=0).judge(seeds(1.0))
    no_cells = claim_of(lambda t: t.where(y=7.0)["y"].mean(), above=0).judge(seeds(1.0, 2.0))
    undefined = claim_of(lambda t: math.nan, above=0).judge(seeds(1.0, math.nan))

    for claim in (one_seed, no_cells, undefined):
        assert claim.verdict == UNDECIDED
    assert one_seed.note == "one seed gives no interval"
    assert no_cells.note == "missing: cells with y=7.0"
    assert undefined.note == "the statistic is not defined on this table"


def test_a_claim_becomes_plain_values():
    claim = claim_of(lambda t: t["y"].mean(), above=0).judge(seeds(1.0, 1.1))
    values = claim.to_dict()

    assert values["below"] is None
    assert values["region"] == "above 0"
    assert claim_of(lambda t: 1.0, below=2).region == "below 2"
    assert claim_of(lambda t: 1.0, above=1, below=2).region == "from 1 to 2"


def table_with_quadratic_growth_of_best():
    """Return accuracies whose best M is the square of the width."""
    rows = []
    for seed in range(2):
        for width in (1, 2, 4):
            for members in (1, 2, 4, 8, 16):
                accuracy = -abs(math.log2(members / width**2))
                row = {"seed": seed, "width": width, "members": members, "accuracy": accuracy}
                rows.append(row)
    return pandas.DataFrame(rows)


def test_best_number_of_members_grows_with_an_exponent():
    exponent = growth_of_best(lambda rows: rows)

    assert exponent(Rows(table_with_quadratic_growth_of_best())) == pytest.approx(2.0)


def test_growth_of_the_best_needs_the_same_members_at_every_width():
    table = table_with_quadratic_growth_of_best()
    incomplete = table[(table["width"] < 4) | (table["members"] < 16)]

    with pytest.raises(MissingCellsError, match="as many members at every width"):
        growth_of_best(lambda rows: rows)(Rows(incomplete))


def test_seeds_without_the_largest_members_do_not_count_in_the_growth_of_the_best():
    table = table_with_quadratic_growth_of_best()
    incomplete = table[(table["seed"] == 0) | (table["members"] < 8)]

    assert growth_of_best(lambda rows: rows)(Rows(incomplete)) == pytest.approx(2.0)


def test_the_growth_of_the_best_needs_neighbouring_numbers_of_members():
    table = table_with_quadratic_growth_of_best()
    some = sorted(table["members"].unique())
    coarse = table[~table["members"].isin(some[1:3])]
    with pytest.raises(MissingCellsError, match="between"):
        growth_of_best(lambda rows: rows)(Rows(coarse))


def test_a_trend_is_the_slope_of_some_rows():
    table = pandas.DataFrame({"k": list("aab"), "members": [1, 2, 4], "y": [1.0, 2.0, 9.0]})
    assert slope(lambda rows: rows.where(k="a"), "y")(Rows(table)) == 1.0
