"""Figures hold means and standard errors over seeds, and become pictures."""

from __future__ import annotations

import json
import math

import pandas
import pytest

from embens.experiments.figure import Curve, Figure, Panel, curves, draw, shades


def test_a_point_is_a_mean_over_seeds_with_its_standard_error():
    # Two rows of a seed are no two independent numbers.
    table = pandas.DataFrame(
        {
            "x": [1, 1, 1, 1, 2, 2],
            "seed": [0, 0, 1, 1, 0, 1],
            "y": [1.0, 3.0, 4.0, 6.0, 7.0, 7.0],
        }
    )
    (found,) = curves(table, "x", "y")
    assert found.x == [1.0, 2.0]
    assert found.y == [3.5, 7.0]
    assert found.error == pytest.approx([math.sqrt(4.5) / math.sqrt(2), 0.0])


def test_there_is_a_curve_for_each_value_and_none_for_what_is_undefined():
    table = pandas.DataFrame(
        {
            "p": [0.0, 0.0, 0.5, 0.5],
            "x": [1, 2, 1, 2],
            "seed": 0,
            "y": [1.0, 2.0, math.nan, math.nan],
        }
    )
    (found,) = curves(table, "x", "y", by="p", label="p={}", colours={0.0: "#123456"})
    assert (found.label, found.colour, found.error) == ("p=0", "#123456", [0.0, 0.0])
    assert curves(table, "x", "missing") == []


def test_a_figure_is_plain_json():
    figure = Figure("t", [Panel("a", "x", "y", [Curve("c", [1.0], [math.nan])])])
    values = json.loads(json.dumps(figure.to_dict(), allow_nan=False))
    assert values["panels"][0]["curves"][0]["y"] == [None]


@pytest.mark.parametrize("style", ["line", "dash", "points", "bars"])
def test_every_style_is_drawn(style, tmp_path):
    curve = Curve("c", [1.0, 2.0, 4.0], [0.1, 0.2, 0.4], [0.01] * 3, "#1f77b4", style)
    panels = [Panel("a", "members M", "y", [curve], x_log=True, y_log=True)] * 2
    draw(Figure("t", panels), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000
    draw(Figure("t", [Panel("empty", "x", "y", [])]), tmp_path / "empty.png")


def test_shades_are_colours_in_the_order_of_values():
    found = shades([0.5, 0.0, 1.0, 0.5])
    assert list(found) == [0.0, 0.5, 1.0]
    assert all(len(c) == 7 and c.startswith("#") for c in found.values())
