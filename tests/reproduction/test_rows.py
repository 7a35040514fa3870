"""Operations on rows of a table."""

from __future__ import annotations

import math

import numpy
import pandas
import pytest

from reproduction.rows import MissingCellsError, Rows


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


def test_curves_are_means_over_all_other_columns():
    table = pandas.DataFrame({"x": [1, 1, 2, 2], "y": [1.0, 3.0, 5.0, math.nan]})
    assert Rows(table).curve("x", "y") == ([1.0, 2.0], [2.0, 5.0])
    with pytest.raises(MissingCellsError, match="at least 2 values of x"):
        Rows(table.head(1)).curve("x", "y")
    with pytest.raises(MissingCellsError, match="column z"):
        Rows(table).curve("x", "z")


def test_an_inverted_u_rises_and_falls():
    table = pandas.DataFrame({"x": [1, 2, 4], "up": [1.0, 2.0, 3.0], "bent": [1.0, 3.0, 2.5]})
    assert Rows(table).rise_and_fall("x", "up") == 0
    assert Rows(table).rise_and_fall("x", "bent") == 0.5
    assert Rows(table).best("x", "bent") == 2


def test_rows_that_end_early_are_missing_cells():
    rows = Rows(pandas.DataFrame({"members": [1, 4, 16]}))
    assert rows.spanning("members", 3, 14) is rows
    for low, high in ((0.5, 14), (3, 20)):
        with pytest.raises(MissingCellsError, match="members from"):
            rows.spanning("members", low, high)


def test_half_way_is_from_the_value_at_zero_to_one():
    table = pandas.DataFrame({"p": [0.0, 0.8, 0.9], "y": [0.2, 0.4, 0.8]})
    assert Rows(table).growth("p", "y") == ([0.0, 0.8, 0.9, 1.0], pytest.approx([0, 0.25, 0.75, 1]))
    assert Rows(table).halfway("p", "y") == pytest.approx(0.85)
    assert Rows(table.head(2)).halfway("p", "y") == pytest.approx(0.8 + 0.2 / 3)
    with pytest.raises(MissingCellsError, match="cells with p=0"):
        Rows(table.tail(2)).halfway("p", "y")


def test_rows_are_chosen_by_range_and_by_extremes():
    table = pandas.DataFrame({"m": [1, 2, 4, 4], "y": [0, 1, 2, 3]})
    assert list(Rows(table).between("m", 2)["y"]) == [1, 2, 3]
    assert list(Rows(table).between("m", high=2)["y"]) == [0, 1]
    assert list(Rows(table).first("m")["y"]) == [0]
    assert list(Rows(table).last("m")["y"]) == [2, 3]
    with pytest.raises(MissingCellsError, match="cells with m from 5 to 9"):
        Rows(table).between("m", 5, 9)


def test_select_finds_floats_and_sets():
    table = pandas.DataFrame({"p": [0.1 + 0.2, 0.5], "k": ["a", "b"]})
    assert list(Rows(table).where(p=0.3)["k"]) == ["a"]
    assert len(Rows(table).where(k=["a", "b"]).frame) == 2
    with pytest.raises(MissingCellsError, match="cells with k=c"):
        Rows(table).where(k="c")
