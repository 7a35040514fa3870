"""Figures hold means and standard errors over seeds, and become pictures."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pandas
import pytest

from reproduction.claims import to_plain
from reproduction.drawing import Curve, Figure, Panel, _set_scales, curves, draw, shades


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


def test_one_curve_of_all_rows_has_the_name_of_what_it_shows():
    table = pandas.DataFrame({"members": [1, 2], "seed": [0, 0], "own_rate": [0.1, 0.2]})
    assert [curve.label for curve in curves(table, "members", "own_rate")] == ["own rate"]


def test_a_figure_is_plain_json():
    figure = Figure([Panel("a", "x", "y", [Curve("c", [1.0], [math.nan])])])
    values = json.loads(json.dumps(to_plain(asdict(figure)), allow_nan=False))
    assert values["panels"][0]["curves"][0]["y"] == [None]


@pytest.mark.parametrize("style", ["line", "dash", "points", "bars"])
def test_every_style_is_drawn(style, tmp_path):
    curve = Curve("c", [1.0, 2.0, 4.0], [0.1, 0.2, 0.4], [0.01] * 3, "#1f77b4", style)
    panels = [Panel("a", "members M", "y", [curve], x_log=2, y_log=10)] * 2
    draw(Figure(panels), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000
    draw(Figure([Panel("empty", "x", "y", [])]), tmp_path / "empty.png")


def test_named_points_of_a_line_have_numbers_and_a_key(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr("matplotlib.axes.Axes.text", lambda *args, **_: written.append(args[3]))
    monkeypatch.setattr("matplotlib.axes.Axes.annotate", lambda *args, **_: written.append(args[1]))
    line = Curve("front", [1.0, 2.0], [3.0, 4.0], style="dash", names=["a", "b"])
    points = Curve("others", [1.0], [5.0], style="points", names=["c"])
    draw(Figure([Panel("panel", "x", "y", [line, points])]), tmp_path / "figure.png")
    assert written == ["1 a\n2 b", "1", "2"]


def test_shades_are_colours_in_the_order_of_values():
    found = shades([0.5, 0.0, 1.0, 0.5])
    assert list(found) == [0.0, 0.5, 1.0]
    assert all(len(c) == 7 and c.startswith("#") for c in found.values())


def test_panels_have_legends_of_their_own(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    found, original = [], Axes.legend

    def legend(self, handles, labels, **options):
        found.append(list(labels))
        return original(self, handles, labels, **options)

    def panel(*labels):
        return Panel("t", "x", "y", [Curve(label, [1.0, 2.0], [1.0, 2.0]) for label in labels])

    monkeypatch.setattr(Axes, "legend", legend)
    draw(Figure([panel("a", "b"), panel("a", "c"), panel()]), tmp_path / "figure.png")
    assert found == [["a", "b"], ["a", "c"]]


def test_axes_have_plain_numbers(tmp_path):
    from matplotlib.figure import Figure as Canvas

    axis = Canvas().add_subplot()
    curve = Curve("c", [1.0, 1000.0, 1e6, 1e7], [1e-5, 0.001, 0.1, 1.0])
    axis.plot(curve.x, curve.y)
    _set_scales(axis, Panel("t", "x", "y", [curve], x_log=10, y_log=10))
    axis.figure.canvas.draw()
    assert [t.get_text() for t in axis.get_xticklabels()] == ["1", "1000", "1000000", "10000000"]
    shown = {t.get_text() for t in axis.get_yticklabels()}
    assert {"0.00001", "0.001", "0.1"} <= shown


def test_a_curve_that_stops_says_why(tmp_path, monkeypatch):
    table = pandas.DataFrame({"k": list("aaab"), "x": [1, 2, 4, 1], "seed": 0, "y": 1.0})
    whole, short = curves(table, "x", "y", by="k", ends="not timed")
    assert (whole.ends, short.ends) == ("", "not timed")
    written = []
    monkeypatch.setattr("matplotlib.axes.Axes.annotate", lambda *args, **_: written.append(args[1]))
    draw(Figure([Panel("t", "x", "y", [whole, short])]), tmp_path / "figure.png")
    assert written == ["not timed"]


def test_long_curves_have_a_few_marks_and_error_bars(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    every, original = [], Axes.errorbar

    def errorbar(*arguments, **options):
        every.append((options["errorevery"], options["markevery"]))
        return original(*arguments, **options)

    monkeypatch.setattr(Axes, "errorbar", errorbar)
    for count in (5, 60):
        x = [float(k) for k in range(count)]
        curve = Curve("c", x, x, [0.5] * count)
        draw(Figure([Panel("a", "x", "y", [curve])]), tmp_path / "figure.svg")
    assert every == [(1, 1), (4, 4)]
    assert b"<svg" in (tmp_path / "figure.svg").read_bytes()
