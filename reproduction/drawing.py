"""Figures as data: panels of curves.

:mod:`reproduction.canvas` draws them with matplotlib, :mod:`reproduction.report` in a browser.

``plot(table)`` of an experiment returns a :class:`Figure`. A panel's title states the result, its
axes say what is drawn. A colour and a style have one meaning within a figure, so that one legend
below the panels explains all of them. Markers differ as well, for readers who see no colours.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from reproduction.rows import Frame, MissingCellsError

BLUE, ORANGE, GREEN, RED, PURPLE = "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd"
BROWN, PINK, GREY, OLIVE, CYAN = "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf"
BLACK = "#000000"
PALETTE = (BLUE, ORANGE, GREEN, RED, PURPLE, BROWN, PINK, GREY, OLIVE, CYAN)
LABELS = {
    "accuracy": "ensemble accuracy, test",
    "member_accuracy": "mean member accuracy, test",
    "member_train_accuracy": "mean member accuracy, train",
    "correlation": "correlation of errors, test",
    "loss": "mean member loss, train",
    "nll": "log loss, test",
    "scaled_nll": "log loss after scaling",
    "calibration": "calibration error",
    "auroc": "area under the ROC curve",
    "inference_seconds": "seconds per 1,000 images",
    "drift": "relative change of the kernel",
    "prediction_error": "relative error of predictions",
    "kurtosis": "excess kurtosis",
}
"""Axis labels of columns; other columns are labelled by their names."""


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
    all_curves = []
    for value, colour in colours.items():
        if value not in groups:
            continue
        points = _means_over_seeds(groups[value], x, y)
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
        all_curves.append(curve)
    return all_curves


def _means_over_seeds(table: Frame, x: str, y: str) -> Frame:
    """Return mean and standard error of ``y`` by ``x``; an error is 0 for one seed."""
    # Average within a seed first: several rows of one seed are not independent.
    per_seed = table.groupby([x, "seed"])[y].mean().reset_index()
    return per_seed.groupby(x)[y].agg(["mean", "sem"]).dropna(subset=["mean"]).fillna(0.0)


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
    all_panels = []
    for column, title in titles.items():
        column_curves = draw_column(y=column)
        column_marks = marks_of_column.get(column, [])
        all_panels.append(
            Panel(title, x_label, label_of(column), column_curves, x_log, y_log, column_marks)
        )
    return all_panels


def complete(figure: Figure) -> Figure:
    """Return a figure without empty panels, in which every curve against M that ends early says so.

    Tables of unfinished runs lack cells.
    """
    return replace(figure, panels=[_with_ends(panel) for panel in figure.panels if panel.curves])


def _with_ends(panel: Panel) -> Panel:
    """Mark the lines that end before others; references have other styles."""
    lines = [curve for curve in panel.curves if curve.style == "line"]
    if not panel.x_label.endswith(" M") or not lines:
        return panel
    last = max(curve.x[-1] for curve in lines)
    all_curves = []
    for curve in panel.curves:
        if curve.style == "line" and curve.x[-1] < last:
            curve = replace(curve, ends=curve.ends or "no larger M was run")
        all_curves.append(curve)
    return replace(panel, curves=all_curves)


def guessing(table: Frame) -> list[Mark]:
    """Return the log loss of guessing as a reference, if the table knows it.

    Args:
        table: A table; :mod:`reproduction.grid.results` sets its attribute ``guessing``.
    """
    if "guessing" not in table.attrs:
        return []
    return [Mark("guessing", y=table.attrs["guessing"])]


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
    # The lightest fifth of a map is hard to see on white and in grey.
    return {value: to_hex(colours(0.8 * index / scale)) for index, value in enumerate(distinct)}
