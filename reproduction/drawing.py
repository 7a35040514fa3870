"""Figures as data: panels of curves, drawn by matplotlib or in a browser.

``plot(table)`` of an experiment returns a :class:`Figure`. A panel's title states the result, its
axes say what is drawn. A colour and a style have one meaning within a figure, so that one legend
below the panels explains all of them. Markers differ as well, for readers who see no colours.
"""

import io
import math
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reproduction.rows import Frame, MissingCellsError
from reproduction.storage import write_atomically

BLUE, ORANGE, GREEN, RED, PURPLE = "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd"
BROWN, PINK, GREY, OLIVE, CYAN = "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf"
BLACK = "#000000"
PALETTE = (BLUE, ORANGE, GREEN, RED, PURPLE, BROWN, PINK, GREY, OLIVE, CYAN)
LABELS = {
    "accuracy": "ensemble accuracy, test",
    "member_accuracy": "mean member accuracy, test",
    "member_train_accuracy": "mean member accuracy, train",
    "correlation": "correlation of errors, test",
    "nll": "log loss, test",
    "scaled_nll": "log loss after scaling",
    "calibration": "calibration error",
    "auroc": "area under the ROC curve",
    "inference_seconds": "seconds per 1,000 images",
}
"""Axis labels of columns; other columns are labelled by their names."""

# Curves with more points get marks and error bars at some of them only.
_DENSE = 20
_MARKERS = "os^Dv<>pPX*h"
# Sizes in inches and points: a picture of three panels is legible at the width of a README.
_PANEL_SIZE = (3.5, 3.0)
_MOST_COLUMNS = 3
_FONT_SIZE = 10
_TITLE_LETTERS = 40  # per line
_PICTURE_LETTERS = 40  # per column and line of the picture's title
_RESOLUTION = 150


@dataclass(frozen=True)
class Curve:
    """Points with error bars.

    Attributes:
        label: Legend entry. Curves of the same label in several panels belong together.
        x: Abscissae.
        y: Ordinates.
        error: Standard errors; empty for none.
        colour: Hexadecimal colour.
        style: ``"line"``, ``"dash"``, ``"points"`` or ``"bars"``.
        names: Names of the points. Only those of lines are written into the picture.
        ends: Why the curve ends before others.
    """

    label: str
    x: list[float]
    y: list[float]
    error: list[float] = field(default_factory=list)
    colour: str = PALETTE[0]
    style: str = "line"
    names: list[str] = field(default_factory=list)
    ends: str = ""


@dataclass(frozen=True)
class Mark:
    """A reference that no cell of the figure measures: a number of the paper, or guessing.

    Attributes:
        label: Legend entry.
        x: Position of a vertical line.
        y: Position of a horizontal line.
        exponent: Exponent of a power law, drawn through the centre of a log-log panel.
    """

    label: str
    x: float | None = None
    y: float | None = None
    exponent: float | None = None


@dataclass(frozen=True)
class Panel:
    """A pair of axes.

    Attributes:
        title: The result, or what to look at.
        x_label: Label of the abscissa.
        y_label: Label of the ordinate.
        curves: The curves.
        x_log: Base of a logarithmic abscissa; 0 for a linear one.
        y_log: Base of a logarithmic ordinate; 0 for a linear one.
        marks: References.
    """

    title: str
    x_label: str
    y_label: str
    curves: list[Curve]
    x_log: int = 0
    y_log: int = 0
    marks: list[Mark] = field(default_factory=list)


@dataclass(frozen=True)
class Figure:
    """Panels in rows.

    Attributes:
        panels: The panels.
        columns: Panels per row.
        title: Title of the figure.
    """

    panels: list[Panel]
    columns: int = 3
    title: str = ""


def label_of(column: str) -> str:
    """Return the axis label of a column."""
    return LABELS.get(column, column.replace("_", " "))


def curves(
    table: Frame,
    x: str,
    y: str,
    *,
    by: str | None = None,
    label: str = "{}",
    colours: str | dict[Any, str] = PALETTE[0],
    style: str = "line",
    ends: str = "",
) -> list[Curve]:
    """Return curves of means over seeds with standard errors.

    Args:
        table: The table.
        x: Column of the abscissa.
        y: Column of the ordinate.
        by: Column with a curve for each of its values; None draws one curve of all rows.
        label: Legend entry; ``{}`` stands for the value of ``by``, or the label of ``y``.
        colours: One colour, or a colour for each value of ``by``. Values without a colour are left
            out. The order of the colours is that of the curves.
        style: Style of the curves.
        ends: Why a curve ends before others.

    Returns:
        The curves; empty if the table lacks the column.
    """
    if y not in table or not len(table):
        return []
    groups: dict[Any, Frame] = {label_of(y): table}
    if by is not None:
        groups = dict(list(table.groupby(by)))
    if isinstance(colours, str):
        colours = dict.fromkeys(groups, colours)
    drawn = []
    for value, colour in colours.items():
        if value not in groups:
            continue
        # Average within a seed first: several rows of one seed are not independent.
        per_seed = groups[value].groupby([x, "seed"])[y].mean().reset_index()
        points = per_seed.groupby(x)[y].agg(["mean", "sem"]).dropna(subset=["mean"]).fillna(0.0)
        if not len(points):
            continue
        xs = [float(number) for number in points.index]
        text = f"{value:g}" if isinstance(value, float) else value
        curve = Curve(
            label.format(text),
            xs,
            points["mean"].tolist(),
            points["sem"].tolist(),
            colour=colour,
            style=style,
            ends=ends if xs[-1] < table[x].max() else "",
        )
        drawn.append(curve)
    return drawn


def panels(
    draw_column: Callable[..., list[Curve]],
    titles: dict[str, str],
    x_label: str = "members M",
    *,
    x_log: int = 2,
    y_log: int = 0,
    marks: dict[str, list[Mark]] | None = None,
) -> list[Panel]:
    """Return a panel for each column.

    Args:
        draw_column: Function with the argument ``y``, a column, that returns curves.
        titles: Titles of the panels by column.
        x_label: Label of the abscissa.
        x_log: Base of a logarithmic abscissa; 0 for a linear one.
        y_log: Base of a logarithmic ordinate; 0 for a linear one.
        marks: References by column.

    Returns:
        The panels.
    """
    marks_of_column = marks or {}
    drawn = []
    for column, title in titles.items():
        column_curves = draw_column(y=column)
        column_marks = marks_of_column.get(column, [])
        drawn.append(
            Panel(title, x_label, label_of(column), column_curves, x_log, y_log, column_marks)
        )
    return drawn


def state(statement: Callable[[], str], otherwise: str) -> str:
    """Return a title that states a result, or another one if the table lacks its cells.

    Args:
        statement: Computes the title from the table.
        otherwise: Title without a result.
    """
    try:
        return statement()
    except (MissingCellsError, KeyError, ZeroDivisionError):
        return otherwise


def shades(values: Iterable[Any], colour_map: str = "viridis") -> dict[Any, str]:
    """Return a colour of a colour map for each distinct value, in ascending order."""
    import matplotlib
    from matplotlib.colors import to_hex

    distinct = sorted(set(values))
    colours = matplotlib.colormaps[colour_map]
    scale = max(1, len(distinct) - 1)
    # The lightest 8 % of a map are hard to see on white.
    return {value: to_hex(colours(0.92 * index / scale)) for index, value in enumerate(distinct)}


def draw(figure: Figure, path: str | Path) -> None:
    """Draw a figure to a file, with one legend below its panels.

    Args:
        figure: The figure.
        path: The file; its suffix determines the format.
    """
    from matplotlib.figure import Figure as Canvas

    path = Path(path)
    columns = max(1, min(figure.columns, len(figure.panels), _MOST_COLUMNS))
    rows = max(1, -(-len(figure.panels) // columns))
    markers = _choose_markers(figure)
    handles: dict[str, Any] = {}
    legend_rows = _count_legend_rows(figure, columns)
    size = (_PANEL_SIZE[0] * columns, _PANEL_SIZE[1] * rows + 0.22 * legend_rows + 0.4)
    canvas = Canvas(figsize=size, layout="constrained")
    canvas.suptitle(
        textwrap.fill(figure.title, _PICTURE_LETTERS * columns), fontsize=_FONT_SIZE + 2
    )
    for index, panel in enumerate(figure.panels):
        axes = canvas.add_subplot(rows, columns, index + 1)
        for label, handle in _draw_panel(axes, panel, markers).items():
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
    content = io.BytesIO()
    canvas.savefig(content, dpi=_RESOLUTION, format=path.suffix[1:] or "png")
    write_atomically(path, content.getvalue())


def _legend_labels(figure: Figure) -> list[str]:
    labels: dict[str, None] = {}
    for panel in figure.panels:
        for entry in (*panel.curves, *panel.marks):
            labels.setdefault(entry.label)
    return list(labels)


def _count_legend_columns(labels: Iterable[str], columns: int) -> int:
    """Return how many legend entries fit side by side."""
    labels = list(labels)
    longest = max(len(label) for label in labels)
    entry_width = 0.55 + 0.075 * longest  # in inches, at the size of the legend's text
    fitting = int(_PANEL_SIZE[0] * columns / entry_width)
    return max(1, min(fitting, len(labels)))


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


def _draw_panel(axes: Any, panel: Panel, markers: dict[str, str]) -> dict[str, Any]:
    """Draw a panel; return legend handles by label."""
    handles = {}
    for curve in panel.curves:
        handles[curve.label] = _draw_curve(axes, curve, markers[curve.label])
    _set_scales(axes, panel)
    for mark in panel.marks:
        handles[mark.label] = _draw_mark(axes, panel, mark)
    for curve in panel.curves:
        if curve.ends:
            (cross,) = axes.plot(
                curve.x[-1:], curve.y[-1:], marker="x", ms=9, linestyle="", color=curve.colour
            )
            handles.setdefault(curve.ends, cross)
    axes.set_title(textwrap.fill(panel.title, _TITLE_LETTERS), fontsize=_FONT_SIZE)
    axes.set_xlabel(_x_label(panel), fontsize=_FONT_SIZE)
    axes.set_ylabel(panel.y_label, fontsize=_FONT_SIZE)
    axes.tick_params(labelsize=_FONT_SIZE - 1)
    axes.grid(alpha=0.3)
    return handles


def _x_label(panel: Panel) -> str:
    """Return the label of the abscissa, with the names of numbered points below it."""
    lines = [panel.x_label]
    for curve in panel.curves:
        if curve.names and curve.style != "points":
            names = [f"{number} {name}" for number, name in enumerate(curve.names, 1)]
            lines.append(textwrap.fill(", ".join(names), _TITLE_LETTERS))
    return "\n".join(lines)


def _draw_mark(axes: Any, panel: Panel, mark: Mark) -> Any:
    """Draw a reference; return its legend handle."""
    style = {"color": "#444444", "linestyle": ":", "lw": 1.6, "zorder": 1}
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


def _draw_curve(axes: Any, curve: Curve, marker: str) -> Any:
    """Draw a curve; return its legend handle."""
    if curve.style == "bars":
        gaps = [after - before for before, after in zip(curve.x, curve.x[1:], strict=False)]
        width = min(gaps, default=0.8)
        return axes.bar(curve.x, curve.y, width, color=curve.colour, alpha=0.5)
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
    if panel.x_log and any(x > 0 for x in xs) and len(distinct) <= 9:
        from matplotlib.ticker import LogLocator

        axes.xaxis.set_ticks(distinct)
        axes.xaxis.set_minor_locator(LogLocator(panel.x_log, ()))


def _set_scale(axis: Any, set_scale: Callable[..., None], base: int, values: list[float]) -> None:
    """Set a linear or logarithmic axis with ticks at plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    positive = [value for value in values if value > 0]
    if base and positive:
        set_scale("log", base=base)
        axis.set_minor_formatter(NullFormatter())
        if base == 10 and max(values) < 200 * min(positive):
            axis.set_major_locator(LogLocator(10, (1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.6f}".rstrip("0").rstrip(".")))
