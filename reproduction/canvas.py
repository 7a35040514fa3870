"""Figures drawn by matplotlib, with one legend below the panels.

Sizes are chosen for the width of a README, about 830 pixels. Long texts are wrapped, so that the
layout engine finds room for all of them.
"""

import io
import math
import re
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from reproduction.drawing import Curve, Figure, Mark, Panel
from reproduction.storage import write_atomically

# Curves with more points get marks and error bars at some of them only.
_DENSE = 20
_MARKERS = "os^Dv<>pPX*h"
_MARK_STYLES = (":", "-.", (0, (6, 3)), (0, (3, 1, 1, 1, 1, 1)))
"""Line styles of references: dots, dots and dashes, long dashes, two dots and a dash."""
# Sizes in inches and points: a picture of three panels is legible at the width of a README.
_PANEL_SIZE = (3.5, 3.0)
_MOST_COLUMNS = 3
_FONT_SIZE = 10
_TITLE_LETTERS = 36  # per line
_LABEL_LETTERS = 30  # per line, of the label of an ordinate
_PICTURE_LETTERS = 40  # per column and line of the picture's title
_RESOLUTION = 150


def draw(figure: Figure, path: str | Path) -> None:
    """Draw a figure to a file, with one legend below its panels.

    Args:
        figure: The figure.
        path: The file; its suffix determines the format.
    """
    path = Path(path)
    content = io.BytesIO()
    make_canvas(figure).savefig(content, dpi=_RESOLUTION, format=path.suffix[1:] or "png")
    write_atomically(path, content.getvalue())


def make_canvas(figure: Figure) -> Any:
    """Return a figure of matplotlib."""
    from matplotlib.figure import Figure as Canvas
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = _count_columns(figure)
    rows = max(1, -(-len(figure.panels) // columns))
    markers = _choose_markers(figure)
    mark_styles = _choose_mark_styles(figure)
    handles: dict[str, Any] = {}
    legend_rows = _count_legend_rows(figure, columns)
    size = (_PANEL_SIZE[0] * columns, _PANEL_SIZE[1] * rows + 0.22 * legend_rows + 0.4)
    layout = ConstrainedLayoutEngine(w_pad=0.08)  # in inches, between the labels of two panels
    canvas = Canvas(figsize=size, layout=layout)
    canvas.suptitle(_wrap(figure.title, _PICTURE_LETTERS * columns), fontsize=_FONT_SIZE + 2)
    for index, panel in enumerate(figure.panels):
        axes = canvas.add_subplot(rows, columns, index + 1)
        for label, handle in _draw_panel(axes, panel, markers, mark_styles).items():
            handles.setdefault(label, handle)
    if handles:
        canvas.legend(
            handles.values(),
            handles.keys(),
            loc="outside lower center",
            ncols=_count_legend_columns(handles, columns),
            fontsize=_FONT_SIZE - 1,
            handlelength=2.6,
            columnspacing=1.2,
            frameon=False,
        )
    return canvas


def _count_columns(figure: Figure) -> int:
    """Return the number of panels per row."""
    if len(figure.panels) == 4:
        return 2  # two rows without a gap
    return max(1, min(figure.columns, len(figure.panels), _MOST_COLUMNS))


def _wrap(text: str, letters: int) -> str:
    """Return a text in lines of limited length, with minus signs and raised exponents."""
    text = re.sub(r"(?<!\w)-(?=\d)", "−", text)
    # A negative number that is rounded to zero has no sign.
    text = re.sub(r"−(?=0\.?0*(?![\d.]))", "", text)
    # No line ends between a number and its unit or its relation.
    text = re.sub(
        r" (?=[×%≥]|at ×|\(×)|(?<=[∝≥]) |(?<=\d at) (?=×)|(?<=width) (?=[\d×])", "\u00a0", text
    )
    text = textwrap.fill(text, letters)
    return re.sub(r"\^(−?\d+\.?\d*)", r"$^{\1}$", text)


def _legend_labels(figure: Figure) -> list[str]:
    labels: dict[str, None] = {}
    for panel in figure.panels:
        for entry in (*panel.curves, *panel.marks):
            labels.setdefault(entry.label)
    return list(labels)


def _count_legend_columns(labels: Iterable[str], columns: int) -> int:
    """Return the number of legend entries side by side, such that rows have equal lengths."""
    labels = list(labels)
    longest = max(len(label) for label in labels)
    entry_width = 0.55 + 0.075 * longest  # in inches, at the size of the legend's text
    fitting = max(1, int(_PANEL_SIZE[0] * columns / entry_width))
    rows = -(-len(labels) // fitting)
    return -(-len(labels) // rows)


def _count_legend_rows(figure: Figure, columns: int) -> int:
    labels = _legend_labels(figure)
    if not labels:
        return 0
    return -(-len(labels) // _count_legend_columns(labels, columns))


def _choose_markers(figure: Figure) -> dict[str, str]:
    """Return a marker for each label."""
    return {
        label: _MARKERS[index % len(_MARKERS)] for index, label in enumerate(_legend_labels(figure))
    }


def _choose_mark_styles(figure: Figure) -> dict[str, Any]:
    """Return a line style for each label of a reference."""
    labels = dict.fromkeys(mark.label for panel in figure.panels for mark in panel.marks)
    return {label: _MARK_STYLES[index % len(_MARK_STYLES)] for index, label in enumerate(labels)}


def _draw_panel(
    axes: Any, panel: Panel, markers: dict[str, str], mark_styles: dict[str, Any]
) -> dict[str, Any]:
    """Draw a panel; return legend handles by label."""
    handles = {}
    hatch = ""
    for curve in panel.curves:
        if curve.style == "bars":
            handles[curve.label] = _draw_bars(axes, curve, hatch)
            hatch += "//"
        else:
            handles[curve.label] = _draw_curve(axes, curve, markers[curve.label])
    _set_scales(axes, panel)
    for mark in panel.marks:
        handles[mark.label] = _draw_mark(axes, panel, mark, mark_styles[mark.label])
    for curve in panel.curves:
        if curve.ends:
            (cross,) = axes.plot(
                curve.x[-1:], curve.y[-1:], marker="x", ms=9, linestyle="", color=curve.colour
            )
            handles.setdefault(curve.ends, cross)
    axes.set_title(_wrap(panel.title, _TITLE_LETTERS), fontsize=_FONT_SIZE)
    axes.set_xlabel(_x_label(panel), fontsize=_FONT_SIZE)
    axes.set_ylabel(_wrap(panel.y_label, _LABEL_LETTERS), fontsize=_FONT_SIZE)
    axes.tick_params(labelsize=_FONT_SIZE - 1)
    axes.grid(alpha=0.3)
    return handles


def _x_label(panel: Panel) -> str:
    """Return the label of the abscissa, with the names of numbered points below it."""
    lines = [panel.x_label]
    for curve in panel.curves:
        if curve.names and curve.style != "points":
            names = [f"{number} {name}" for number, name in enumerate(curve.names, 1)]
            lines.append(_wrap(", ".join(names), _TITLE_LETTERS))
    return "\n".join(lines)


def _draw_mark(axes: Any, panel: Panel, mark: Mark, line_style: Any) -> Any:
    """Draw a reference; return its legend handle."""
    style = {"color": "#444444", "linestyle": line_style, "lw": 1.6, "zorder": 1}
    if mark.x is not None:
        return axes.axvline(mark.x, **style)
    if mark.y is not None:
        return axes.axhline(mark.y, **style)
    assert mark.exponent is not None
    points = []
    for curve in panel.curves:
        points += [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if x > 0 and y > 0]
    log_xs = [math.log(x) for x, _ in points]
    centre_x = sum(log_xs) / len(points)
    centre_y = sum(math.log(y) for _, y in points) / len(points)
    ends = (min(log_xs), max(log_xs))
    ys = [math.exp(centre_y + mark.exponent * (x - centre_x)) for x in ends]
    (line,) = axes.plot([math.exp(x) for x in ends], ys, **style)
    return line


def _draw_bars(axes: Any, curve: Curve, hatch: str) -> Any:
    """Draw a histogram; return its legend handle. Hatches differ for readers without colours."""
    gaps = [after - before for before, after in zip(curve.x, curve.x[1:], strict=False)]
    width = min(gaps, default=0.8)
    return axes.bar(
        curve.x, curve.y, width, color=curve.colour, alpha=0.5, hatch=hatch, edgecolor="#444444"
    )


def _draw_curve(axes: Any, curve: Curve, marker: str) -> Any:
    """Draw a curve; return its legend handle."""
    every = 1
    if curve.style != "points":
        every = 1 + len(curve.x) // _DENSE
        if curve.names:
            _number_points(axes, curve)
    return axes.errorbar(
        curve.x,
        curve.y,
        curve.error if any(curve.error) else None,
        color=curve.colour,
        linestyle={"line": "-", "dash": "--", "points": ""}[curve.style],
        marker=marker,
        ms=4,
        capsize=2,
        lw=1.4,
        elinewidth=0.8,
        errorevery=every,
        markevery=every,
    )


def _number_points(axes: Any, curve: Curve) -> None:
    """Number the points of a curve; the label of the abscissa has their names."""
    for number, point in enumerate(zip(curve.x, curve.y, strict=True), 1):
        axes.annotate(
            str(number), point, (4, 3), textcoords="offset points", fontsize=_FONT_SIZE - 1
        )


def _set_scales(axes: Any, panel: Panel) -> None:
    xs = [x for curve in panel.curves for x in curve.x]
    ys = [y for curve in panel.curves for y in curve.y]
    _set_scale(axes.xaxis, axes.set_xscale, panel.x_log, xs)
    _set_scale(axes.yaxis, axes.set_yscale, panel.y_log, ys)
    distinct = sorted(set(xs))
    if panel.x_log and min(distinct, default=0) > 0 and len(distinct) <= 9:
        from matplotlib.ticker import NullLocator

        axes.xaxis.set_ticks(_spread_ticks(distinct))
        axes.xaxis.set_minor_locator(NullLocator())


def _spread_ticks(values: list[float]) -> list[float]:
    """Return the ends of ascending positive values, and those between that have room for a text.

    Texts need about a fifteenth of a logarithmic axis.
    """
    room = math.log(values[-1] / values[0]) / 15
    ticks = values[:1]
    for value in values[1:-1]:
        if math.log(value / ticks[-1]) > room and math.log(values[-1] / value) > room:
            ticks.append(value)
    if len(values) > 1:
        ticks.append(values[-1])
    return ticks


def _set_scale(axis: Any, set_scale: Callable[..., None], base: int, values: list[float]) -> None:
    """Set a linear or logarithmic axis with ticks at plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    positive = [value for value in values if value > 0]
    if base and positive:
        set_scale("log", base=base)
        axis.set_minor_formatter(NullFormatter())
        if base == 10 and max(values) < 200 * min(positive):
            axis.set_major_locator(LogLocator(10, (1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: _tick_text(value)))


def _tick_text(value: float) -> str:
    """Return a number without an exponent, and with k or M for thousands and millions."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:g}k"
    return f"{value:.6f}".rstrip("0").rstrip(".").replace("-", "−")
