"""Figures hold means and standard errors over seeds."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pandas
import pytest

from reproduction.claims import to_plain
from reproduction.drawing import Curve, Figure, Mark, Panel, complete, curves, guessing, shades


def test_a_point_is_a_mean_over_seeds_with_its_standard_error():
    # Rows of one seed are not independent.
    table = pandas.DataFrame(
        {
            "x": [1, 1, 1, 1, 2, 2],
            "seed": [0, 0, 1, 1, 0, 1],
            "y": [1.0, 3.0, 4.0, 6.0, 7.0, 7.0],
        }
    )
    (curve,) = curves(table, "x", "y")

    assert curve.x == [1.0, 2.0]
    assert curve.y == [3.5, 7.0]
    assert curve.error == pytest.approx([math.sqrt(4.5) / math.sqrt(2), 0.0])


def test_each_defined_value_has_a_curve():
    table = pandas.DataFrame(
        {
            "p": [0.0, 0.0, 0.5, 0.5],
            "x": [1, 2, 1, 2],
            "seed": 0,
            "y": [1.0, 2.0, math.nan, math.nan],
        }
    )
    (curve,) = curves(table, "x", "y", by="p", label="p={}", colours={0.0: "#123456"})

    assert (curve.label, curve.colour, curve.error) == ("p=0", "#123456", [0.0, 0.0])
    assert curves(table, "x", "missing") == []


def test_one_curve_of_all_rows_is_named_by_its_column():
    table = pandas.DataFrame({"members": [1, 2], "seed": [0, 0], "own_rate": [0.1, 0.2]})
    assert [curve.label for curve in curves(table, "members", "own_rate")] == ["own rate"]


def test_a_figure_is_plain_json():
    figure = Figure([Panel("a", "x", "y", [Curve("c", [1.0], [math.nan])])])
    values = json.loads(json.dumps(to_plain(asdict(figure)), allow_nan=False))
    assert values["panels"][0]["curves"][0]["y"] == [None]


def test_shades_are_colours_in_the_order_of_values():
    colours = shades([0.5, 0.0, 1.0, 0.5])
    assert list(colours) == [0.0, 0.5, 1.0]
    assert all(len(c) == 7 and c.startswith("#") for c in colours.values())


def test_guessing_is_a_reference_of_tables_that_know_it():
    table = pandas.DataFrame({"x": [1]})
    assert guessing(table) == []
    table.attrs["guessing"] = math.log(20)
    assert guessing(table) == [Mark("guessing", y=math.log(20))]


def test_figures_of_unfinished_runs_have_no_empty_panels_and_say_where_curves_end():
    whole, short = Curve("a", [1.0, 2.0, 4.0], [0.0] * 3), Curve("b", [1.0, 2.0], [0.0] * 2)
    points = Curve("c", [1.0], [0.0], style="points")
    diverged = Curve("d", [1.0], [0.0], ends="diverged")
    networks = Curve("separate networks", [1.0, 8.0], [0.0] * 2, style="dash")
    drawn = [whole, short, points, diverged, networks]
    empty = Panel("empty", "members M", "y", [])
    figure = Figure([empty, Panel("t", "members M", "y", drawn), Panel("t", "epoch", "y", drawn)])
    against_members, against_epochs = complete(figure).panels

    assert [curve.ends for curve in against_members.curves] == [
        "",
        "no larger M was run",
        "",
        "diverged",
        "",
    ]
    assert against_epochs.curves == drawn
