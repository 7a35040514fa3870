"""Statistics, their intervals, and verdicts."""

from __future__ import annotations

import math

import numpy
import pandas
import pytest
from scipy import stats

from embens.experiments.claims import (
    FAILS,
    HOLDS,
    UNDECIDED,
    Missing,
    Rows,
    interval,
    judge,
    trend,
    verdict,
)


def seeds(*values):
    return pandas.DataFrame({"seed": range(len(values)), "y": values})


def test_the_interval_of_a_mean_is_students():
    values = [1.0, 2.0, 4.0, 3.5, 0.5]
    value, low, high, count = interval(seeds(*values), lambda t: t["y"].mean())
    expected = stats.t.interval(
        0.95, len(values) - 1, loc=numpy.mean(values), scale=stats.sem(values)
    )
    assert count == 5
    assert value == pytest.approx(numpy.mean(values))
    assert (low, high) == pytest.approx(expected)


def test_the_interval_covers_a_ratio_of_means_as_often_as_it_says():
    generator = numpy.random.default_rng(0)
    covered, runs = 0, 400
    for _ in range(runs):
        table = pandas.DataFrame(
            {
                "seed": range(8),
                "x": generator.normal(2.0, 0.3, 8),
                "y": generator.normal(6.0, 0.5, 8),
            }
        )
        _, low, high, _ = interval(table, lambda t: t["y"].mean() / t["x"].mean())
        covered += low < 3.0 < high
    error = math.sqrt(0.95 * 0.05 / runs)
    assert abs(covered / runs - 0.95) < 5 * error


def test_all_cells_of_a_seed_are_left_out_together():
    table = pandas.DataFrame({"seed": [0, 0, 0, 1, 1, 1], "y": [1.0, 1.0, 1.0, 3.0, 3.0, 3.0]})
    together = interval(table, lambda t: t["y"].mean())
    assert together[1:3] == pytest.approx(interval(seeds(1.0, 3.0), lambda t: t["y"].mean())[1:3])


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
    one = judge(seeds(1.0), "n", lambda t: t["y"].mean(), above=0)
    assert (one.verdict, one.note) == (UNDECIDED, "1 seed has no interval")
    none = judge(seeds(1.0, 2.0), "n", lambda t: t.where(y=7.0)["y"].mean(), above=0)
    assert (none.verdict, none.note) == (UNDECIDED, "missing: cells with y=7.0")
    undefined = judge(seeds(1.0, math.nan), "n", lambda t: math.nan, above=0)
    assert undefined.note == "the statistic is not defined on this table"


def test_a_claim_gets_its_words():
    claim = judge(seeds(1.0, 1.1), "n", lambda t: 1.0, above=0, measure="m")
    assert claim.says("s", paper="p").measure == "m"
    said = claim.says("s", paper="p", measure="other")
    assert (said.statement, said.paper, said.measure) == ("s", "p", "other")
    assert said.verdict == claim.verdict == HOLDS


def test_a_claim_becomes_plain_values():
    claim = judge(seeds(1.0, 1.1), "n", lambda t: t["y"].mean(), above=0)
    values = claim.to_dict()
    assert values["below"] is None
    assert values["region"] == "above 0"
    assert judge(seeds(1.0), "n", lambda t: 1.0, below=2).region == "below 2"
    assert judge(seeds(1.0), "n", lambda t: 1.0, above=1, below=2).region == "from 1 to 2"


def test_slopes_are_those_of_least_squares():
    x = numpy.array([1, 2, 4, 8, 16])
    y = numpy.array([3.0, 2.9, 1.0, 0.8, 0.7])
    table = pandas.DataFrame({"x": x, "y": y})
    expected = numpy.polyfit(numpy.log2(x), y, 1)[0]
    assert Rows(table).slope("x", "y") == pytest.approx(expected)
    power = numpy.polyfit(numpy.log2(x), numpy.log2(y), 1)[0]
    assert Rows(table).slope("x", "y", log_y=True) == pytest.approx(power)
    assert Rows(table).slope("x", "y", log_x=False) == pytest.approx(numpy.polyfit(x, y, 1)[0])
    assert math.isnan(Rows(table.assign(y=-y)).slope("x", "y", log_y=True))


def test_curves_are_means_over_what_is_not_named():
    table = pandas.DataFrame({"x": [1, 1, 2, 2], "y": [1.0, 3.0, 5.0, math.nan]})
    assert Rows(table).curve("x", "y") == ([1.0, 2.0], [2.0, 5.0])
    with pytest.raises(Missing, match="at least two values of x"):
        Rows(table.head(1)).curve("x", "y")
    with pytest.raises(Missing, match="column z"):
        Rows(table).curve("x", "z")


def test_an_inverted_u_rises_and_falls():
    table = pandas.DataFrame({"x": [1, 2, 4], "up": [1.0, 2.0, 3.0], "bent": [1.0, 3.0, 2.5]})
    assert Rows(table).rise_and_fall("x", "up") == 0
    assert Rows(table).rise_and_fall("x", "bent") == 0.5
    assert Rows(table).best("x", "bent") == 2


def test_the_best_number_of_members_grows_with_an_exponent():
    rows = [
        {"seed": s, "width": w, "members": m, "accuracy": -abs(math.log2(m) - 2 * math.log2(w))}
        for s in range(2)
        for w in (1, 2, 4)
        for m in (1, 2, 4, 8, 16)
    ]
    assert Rows(pandas.DataFrame(rows)).growth_of_best() == pytest.approx(2.0)


def test_rows_are_chosen_by_range_and_by_extremes():
    table = pandas.DataFrame({"m": [1, 2, 4, 4], "y": [0, 1, 2, 3]})
    assert list(Rows(table).between("m", 2)["y"]) == [1, 2, 3]
    assert list(Rows(table).between("m", high=2)["y"]) == [0, 1]
    assert list(Rows(table).first("m")["y"]) == [0]
    assert list(Rows(table).last("m")["y"]) == [2, 3]
    with pytest.raises(Missing, match="cells with m from 5 to 9"):
        Rows(table).between("m", 5, 9)


def test_a_trend_is_the_slope_of_some_rows():
    table = pandas.DataFrame({"k": list("aab"), "members": [1, 2, 4], "y": [1.0, 2.0, 9.0]})
    assert trend(lambda rows: rows.where(k="a"), "y")(Rows(table)) == 1.0


def test_select_finds_floats_and_sets():
    table = pandas.DataFrame({"p": [0.1 + 0.2, 0.5], "k": ["a", "b"]})
    assert list(Rows(table).where(p=0.3)["k"]) == ["a"]
    assert len(Rows(table).where(k=["a", "b"]).frame) == 2
    with pytest.raises(Missing, match="cells with k=c"):
        Rows(table).where(k="c")
    assert Rows(seeds(1.0, 3.0)).per_seed(lambda t: t["y"].max()) == 2.0
