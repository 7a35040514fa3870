"""Figures become pictures in which every text is legible."""

from __future__ import annotations

from dataclasses import replace

import pandas
import pytest

from reproduction.canvas import _set_scales, _spread_ticks, _wrap, draw
from reproduction.drawing import Curve, Figure, Mark, Panel, curves
from tests.reproduction.battery import check_layout


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
    check_layout(canvas)


def test_panels_do_not_overlap_with_long_titles(tmp_path, canvases):
    title = "a title that states a result with its numbers, 0.123 and 4.56, in full"
    figure = Figure([panel_of("a", "b", title=f"{title} {number}") for number in range(5)])
    draw(figure, tmp_path / "figure.png")
    check_layout(canvases[0])


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
    assert [t.get_text() for t in axis.get_xticklabels()] == ["1", "1000", "1M", "10M"]
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


def test_numbers_have_minus_signs_exponents_and_their_units():
    assert _wrap("slope -0.5, 1-2, x^-0.25 and u^L", 60) == "slope −0.5, 1-2, x$^{−0.25}$ and u^L"
    assert _wrap("a change of 12 %", 14) == "a change of\n12\u00a0%"
    assert _wrap("correlation (M ≥ 4)", 16) == "correlation\n(M\u00a0≥\u00a04)"
    wrapped = _wrap("best M: 8 at ×0.5, 16 at ×2", 20)
    assert wrapped == "best M: 8\u00a0at\u00a0×0.5,\n16\u00a0at\u00a0×2"


def test_a_number_that_is_rounded_to_zero_has_no_sign():
    assert _wrap("members -0.0 %, -0.05 %, -0", 60) == "members 0.0\u00a0%, −0.05\u00a0%, 0"


def test_ticks_of_a_logarithmic_axis_do_not_overlap():
    assert _spread_ticks([1.0, 2.0, 4.0, 5.0, 8.0, 10.0, 20.0, 49.0]) == [1, 2, 4, 8, 20, 49]
    assert _spread_ticks([1.0, 2.0, 4.0]) == [1, 2, 4]
    assert _spread_ticks([3.0]) == [3]


def test_references_differ_in_their_line_styles(tmp_path, canvases):
    curve = Curve("c", [1.0, 10.0], [1.0, 2.0])
    first = Panel("t", "x", "y", [curve], marks=[Mark("a", x=2.0), Mark("b", y=2.0)])
    second = Panel("t", "x", "y", [curve], marks=[Mark("b", y=1.5)])
    draw(Figure([first, second]), tmp_path / "figure.png")
    left, right = canvases[0].axes
    a, b = (line.get_linestyle() for line in left.lines[-2:])

    assert a != b
    assert right.lines[-1].get_linestyle() == b


def test_four_panels_fill_two_rows(tmp_path, canvases):
    draw(Figure([panel_of("a")] * 4), tmp_path / "figure.png")
    assert {axes.get_gridspec().ncols for axes in canvases[0].axes} == {2}


def test_rows_of_the_legend_have_equal_lengths(tmp_path, canvases):
    labels = [f"a label of twenty letters {number}" for number in range(6)]
    draw(Figure([panel_of(*labels)] * 3), tmp_path / "figure.png")
    (legend,) = canvases[0].legends
    assert legend._ncols == 3


def test_histograms_differ_in_their_hatches(tmp_path, canvases):
    bars = [Curve(label, [1.0, 2.0], [0.5, 0.5], style="bars") for label in "ab"]
    draw(Figure([Panel("t", "x", "y", bars)]), tmp_path / "figure.png")
    (axes,) = canvases[0].axes
    assert len({patch.get_hatch() for patch in axes.patches}) == 2
