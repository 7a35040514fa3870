"""Figures as data: panels of curves, drawn by matplotlib or in a browser.

``plot(table)`` of an experiment returns a :class:`Figure`. A panel's title says what to look at,
its axes say what is drawn. A colour and a style have one meaning within a figure.
"""

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reproduction.rows import Frame
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
}
"""Axis labels of columns; other columns are labelled by their names."""

# Curves with more points get marks and error bars at some of them only.
_DENSE = 20
_SMALL_TEXT = {"ha": "right", "va": "top", "fontsize": 7}


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
class Panel:
    """A pair of axes.

    Attributes:
        title: What to look at.
        x_label: Label of the abscissa.
        y_label: Label of the ordinate.
        curves: The curves.
        x_log: Base of a logarithmic abscissa; 0 for a linear one.
        y_log: Base of a logarithmic ordinate; 0 for a linear one.
    """

    title: str
    x_label: str
    y_label: str
    curves: list[Curve]
    x_log: int = 0
    y_log: int = 0


@dataclass(frozen=True)
class Figure:
    """Panels in rows.

    Attributes:
        panels: The panels.
        columns: Panels per row.
        title: Title of the figure.
    """

    panels: list[Panel]
    columns: int = 4
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
) -> list[Panel]:
    """Return a panel for each column.

    Args:
        draw_column: Function with the argument ``y``, a column, that returns curves.
        titles: Titles of the panels by column.
        x_label: Label of the abscissa.
        x_log: Base of a logarithmic abscissa; 0 for a linear one.
        y_log: Base of a logarithmic ordinate; 0 for a linear one.

    Returns:
        The panels.
    """
    return [
        Panel(title, x_label, label_of(column), draw_column(y=column), x_log, y_log)
        for column, title in titles.items()
    ]


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
    """Draw a figure to a file.

    Args:
        figure: The figure.
        path: The file; its suffix determines the format.
    """
    from matplotlib.figure import Figure as Canvas

    path = Path(path)
    columns = max(1, min(figure.columns, len(figure.panels)))
    rows = max(1, -(-len(figure.panels) // columns))
    canvas = Canvas(figsize=(4.2 * columns, 4.2 * rows), constrained_layout=True)
    canvas.suptitle(figure.title, fontsize=12)
    for index, panel in enumerate(figure.panels):
        _draw_panel(canvas.add_subplot(rows, columns, index + 1), panel)
    content = io.BytesIO()
    canvas.savefig(content, dpi=110, format=path.suffix[1:] or "png")
    write_atomically(path, content.getvalue())


def _draw_panel(axes: Any, panel: Panel) -> None:
    handles = {curve.label: _draw_curve(axes, curve) for curve in panel.curves}
    axes.set_title(panel.title, fontsize=10)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    _set_scales(axes, panel)
    axes.grid(alpha=0.3)
    # One annotation per reason, at the last curve that has it.
    last_curves = {curve.ends: curve for curve in panel.curves if curve.ends}
    for reason, curve in last_curves.items():
        axes.annotate(
            reason,
            (curve.x[-1], curve.y[-1]),
            (5, -8),
            textcoords="offset points",
            fontsize=7,
            color=curve.colour,
        )
    if handles:
        longest = max(len(label) for label in handles)
        columns_that_fit = int(440 / (34 + 4.3 * longest))
        axes.legend(
            handles.values(),
            handles.keys(),
            loc="upper center",
            bbox_to_anchor=(0.5, -0.16),
            ncols=min(columns_that_fit, 4),
            fontsize=7,
            handlelength=2.8,
            columnspacing=1.0,
        )


def _draw_curve(axes: Any, curve: Curve) -> Any:
    """Draw a curve; return its legend handle."""
    if curve.style == "bars":
        gaps = [after - before for before, after in zip(curve.x, curve.x[1:], strict=False)]
        width = min(gaps, default=0.8)
        return axes.bar(curve.x, curve.y, width, color=curve.colour, alpha=0.5)
    every = 1
    if curve.style != "points":
        every = 1 + len(curve.x) // _DENSE
        if curve.names:
            _name_points(axes, curve)
    if curve.ends:
        axes.plot(curve.x[-1:], curve.y[-1:], marker="x", ms=8, color=curve.colour)
    return axes.errorbar(
        curve.x,
        curve.y,
        curve.error if any(curve.error) else None,
        color=curve.colour,
        linestyle={"line": "-", "dash": "--", "points": ""}[curve.style],
        marker="o",
        ms=3.5,
        capsize=2,
        lw=1.4,
        elinewidth=0.8,
        errorevery=every,
        markevery=every,
    )


def _name_points(axes: Any, curve: Curve) -> None:
    """Number the points of a curve and list their names."""
    names = [f"{number} {name}" for number, name in enumerate(curve.names, 1)]
    axes.text(0.97, 0.97, "\n".join(names), transform=axes.transAxes, **_SMALL_TEXT)
    for number, point in enumerate(zip(curve.x, curve.y, strict=True), 1):
        axes.annotate(str(number), point, (-3, -3), textcoords="offset points", **_SMALL_TEXT)


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
