"""Figures hold means and standard errors over seeds, and become pictures."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pandas
import pytest

from reproduction.claims import to_plain
from reproduction.drawing import Curve, Figure, Mark, Panel, _set_scales, curves, draw, shades


def test_a_point_is_a_mean_over_seeds_with_its_standard_error():
    # Two rows of a seed are no two independent numbers.
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


@pytest.mark.parametrize("style", ["line", "dash", "points", "bars"])
def test_every_style_is_drawn(style, tmp_path):
    curve = Curve("c", [1.0, 2.0, 4.0], [0.1, 0.2, 0.4], [0.01] * 3, "#1f77b4", style)
    panels = [Panel("a", "members M", "y", [curve], x_log=2, y_log=10)] * 2
    draw(Figure(panels), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000
    draw(Figure([Panel("empty", "x", "y", [])]), tmp_path / "empty.png")


def test_named_points_of_a_line_have_numbers_and_a_key_below_the_panel(tmp_path, canvases):
    line = Curve("front", [1.0, 2.0], [3.0, 4.0], style="dash", names=["a", "b"])
    points = Curve("others", [1.0], [5.0], style="points", names=["c"])
    draw(Figure([Panel("panel", "x", "y", [line, points])]), tmp_path / "figure.png")
    (axes,) = canvases[0].axes
    assert axes.get_xlabel() == "x\n1 a, 2 b"
    assert [text.get_text() for text in axes.texts] == ["1", "2"]


def test_shades_are_colours_in_the_order_of_values():
    colours = shades([0.5, 0.0, 1.0, 0.5])
    assert list(colours) == [0.0, 0.5, 1.0]
    assert all(len(c) == 7 and c.startswith("#") for c in colours.values())


@pytest.fixture
def canvases(monkeypatch):
    """All figures of matplotlib that are drawn."""
    from matplotlib.figure import Figure as Canvas

    drawn = []
    original = Canvas.savefig

    def savefig(self, *arguments, **options):
        drawn.append(self)
        return original(self, *arguments, **options)

    monkeypatch.setattr(Canvas, "savefig", savefig)
    return drawn


def boxes(canvas):
    """Return the legend's box, and those of all panels with their labels and titles."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    agg = FigureCanvasAgg(canvas)
    agg.draw()
    renderer = agg.get_renderer()
    (legend,) = canvas.legends
    panels = [axes.get_tightbbox(renderer) for axes in canvas.axes]
    return legend.get_window_extent(renderer), panels


def panel_of(*labels, title="t"):
    drawn = []
    for number, label in enumerate(labels):
        drawn.append(Curve(label, [1.0, 2.0], [1.0, 2.0 + number]))
    return Panel(title, "x", "y", drawn)


def test_a_figure_has_one_legend_that_overlaps_nothing(tmp_path, canvases):
    long = [f"a rather long label with the number {number}" for number in range(12)]
    figure = Figure([panel_of("a", "b"), panel_of("a", *long), panel_of(), panel_of("c")])
    draw(replace(figure, title="a title " * 20), tmp_path / "figure.png")
    (canvas,) = canvases
    (legend,) = canvas.legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b", *long, "c"]
    assert all(axes.get_legend() is None for axes in canvas.axes)
    legend_box, panel_boxes = boxes(canvas)
    assert not any(legend_box.overlaps(box) for box in panel_boxes)
    page = canvas.bbox
    for box in (legend_box, *panel_boxes):
        assert page.x0 <= box.x0
        assert page.y0 <= box.y0
        assert box.x1 <= page.x1
        assert box.y1 <= page.y1


def test_panels_do_not_overlap_with_long_titles(tmp_path, canvases):
    title = "a title that states a result with its numbers, 0.123 and 4.56, in full"
    figure = Figure([panel_of("a", "b", title=f"{title} {number}") for number in range(5)])
    draw(figure, tmp_path / "figure.png")
    _, panel_boxes = boxes(canvases[0])
    for number, box in enumerate(panel_boxes):
        assert not any(box.overlaps(later) for later in panel_boxes[number + 1 :])


def test_text_is_legible_at_the_width_of_a_readme(tmp_path, canvases):
    draw(Figure([panel_of("a")] * 6, columns=6), tmp_path / "figure.png")
    (canvas,) = canvases
    pixels_per_point = 830 / canvas.get_figwidth() / 72  # a README is about 830 pixels wide
    for axes in canvas.axes:
        for text in (axes.title, axes.xaxis.label, *axes.get_xticklabels()):
            assert text.get_fontsize() * pixels_per_point > 9


def test_curves_differ_in_their_markers_too(tmp_path, canvases):
    draw(Figure([panel_of("a", "b", "c"), panel_of("c")]), tmp_path / "figure.png")
    first, second = canvases[0].axes
    markers = [line.get_marker() for line in first.lines if line.get_marker() not in ("", "None")]
    assert len(set(markers)) == 3
    assert second.lines[0].get_marker() == markers[2]


def test_marks_are_lines_and_have_legend_entries(tmp_path, canvases):
    curve = Curve("c", [1.0, 10.0, 100.0], [1.0, 0.1, 0.01])
    marks = [Mark("paper: p=0.6", x=6.0), Mark("guessing", y=0.5), Mark("paper: −1", exponent=-1.0)]
    panel = Panel("t", "x", "y", [curve], 10, 10, marks)
    draw(Figure([panel]), tmp_path / "figure.png")
    (legend,) = canvases[0].legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == ["c", "paper: p=0.6", "guessing", "paper: −1"]
    vertical, horizontal, power = canvases[0].axes[0].lines[-3:]
    assert list(vertical.get_xdata()) == [6.0, 6.0]
    assert list(horizontal.get_ydata()) == [0.5, 0.5]
    # The curve is the power law itself.
    assert list(power.get_ydata()) == pytest.approx([1.0, 0.01])


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


def test_a_curve_that_stops_says_why(tmp_path, canvases):
    table = pandas.DataFrame({"k": list("aaab"), "x": [1, 2, 4, 1], "seed": 0, "y": 1.0})
    whole, short = curves(table, "x", "y", by="k", ends="not timed")
    assert (whole.ends, short.ends) == ("", "not timed")
    draw(Figure([Panel("t", "x", "y", [whole, short])]), tmp_path / "figure.png")
    (legend,) = canvases[0].legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b", "not timed"]


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
