"""Figures as data: panels of curves, which matplotlib draws to a file and a browser to a page.

``plot(table)`` of an experiment returns a :class:`Figure`; nothing is computed after that, save
means and standard errors over seeds, in :func:`curves`. A panel's title says what to see in it, its
axes what is drawn; a colour and a style mean one thing in a figure.
"""

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reproduction.claims import Frame
from embens.files import write_atomically

_FIRST = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd")
PALETTE = (*_FIRST, "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf")
LABELS = {
    "accuracy": "ensemble accuracy, test",
    "member_accuracy": "mean member accuracy, test",
    "member_train_accuracy": "mean member accuracy, train",
    "correlation": "correlation of errors, test",
    "nll": "log loss, test",
}
"""What columns are called beside an axis; others by their names."""
_DENSE = 20  # points of a curve from which on not each has a mark and an error bar
_SMALL = {"ha": "right", "va": "top", "fontsize": 7}  # below and left of its place


@dataclass(frozen=True)
class Curve:
    """Points with error bars."""

    label: str  # curves of the same label in several panels belong together
    x: list[float]
    y: list[float]
    error: list[float] = field(default_factory=list)  # standard errors; empty: none are drawn
    colour: str = PALETTE[0]
    style: str = "line"  # or "dash", "points", "bars"
    names: list[str] = field(default_factory=list)  # of points; a picture has those of lines
    ends: str = ""  # why it ends before others do


@dataclass(frozen=True)
class Panel:
    """A pair of axes; ``x_log`` and ``y_log`` are bases of logarithms, 0 for linear axes."""

    title: str  # what to see
    x_label: str
    y_label: str
    curves: list[Curve]
    x_log: int = 0
    y_log: int = 0


@dataclass(frozen=True)
class Figure:
    """Panels side by side, as the paper has them, and what they show."""

    panels: list[Panel]
    columns: int = 4
    title: str = ""


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
    """Return a curve of means over seeds, with standard errors, for each value of ``by``.

    That is ``{}`` in ``label``; where one curve has all rows it is the name of ``y``. ``colours``
    is one for all, or one for each value in the order of curves (others are left out). ``ends``
    says why a curve ends before others.
    """
    if y not in table or not len(table):
        return []
    whole = {LABELS.get(y, y.replace("_", " ")): table}
    groups: dict[Any, Frame] = whole if by is None else dict(list(table.groupby(by)))
    chosen = colours if isinstance(colours, dict) else dict.fromkeys(groups, colours)
    found = []
    for value, colour in ((value, c) for value, c in chosen.items() if value in groups):
        each = groups[value].groupby([x, "seed"])[y].mean().reset_index()  # a seed is one number
        points = each.groupby(x)[y].agg(["mean", "sem"]).dropna(subset=["mean"]).fillna(0.0)
        if len(points):
            name = label.format(f"{value:g}" if isinstance(value, float) else value)
            values = points.reset_index().astype(float).T.values.tolist()
            early = ends if values[0][-1] < table[x].max() else ""
            found.append(Curve(name, *values, colour=colour, style=style, ends=early))
    return found


def panels(
    draw: Callable[..., list[Curve]],
    titles: dict[str, str],
    x_label: str = "members M",
    *,
    x_log: int = 2,
    y_log: int = 0,
) -> list[Panel]:
    """Return a panel for each of these columns, with a title and the curves of ``draw(y=…)``."""
    return [
        Panel(title, x_label, LABELS.get(y, y.replace("_", " ")), draw(y=y), x_log, y_log)
        for y, title in titles.items()
    ]


def shades(values: Iterable[Any], colours: str = "viridis") -> dict[Any, str]:
    """Return a colour of a map for each of these values, in their order."""
    import matplotlib
    from matplotlib.colors import to_hex

    points = sorted(set(values))
    chosen = matplotlib.colormaps[colours]
    scale = max(1, len(points) - 1)
    return {v: to_hex(chosen(0.92 * number / scale)) for number, v in enumerate(points)}


def draw(figure: Figure, path: str | Path) -> None:
    """Draw a figure to a file, in the format that its name ends with; a reader sees it whole."""
    from matplotlib.figure import Figure as Canvas

    count = len(figure.panels)
    columns = max(1, min(figure.columns, count))
    rows = max(1, -(-count // columns))
    canvas = Canvas(figsize=(4.2 * columns, 4.2 * rows), constrained_layout=True)
    canvas.suptitle(figure.title, fontsize=12)
    for number, panel in enumerate(figure.panels):
        axis = canvas.add_subplot(rows, columns, number + 1)
        handles = {curve.label: _draw_curve(axis, curve) for curve in panel.curves}
        axis.set_title(panel.title, fontsize=10)
        axis.set_xlabel(panel.x_label)
        axis.set_ylabel(panel.y_label)
        _set_scales(axis, panel)
        axis.grid(alpha=0.3)
        for curve in {curve.ends: curve for curve in panel.curves if curve.ends}.values():
            place, style = (curve.x[-1], curve.y[-1]), {"fontsize": 7, "color": curve.colour}
            axis.annotate(curve.ends, place, (5, -8), textcoords="offset points", **style)
        if handles:
            fit = int(440 / (34 + 4.3 * max(map(len, handles))))  # what is as wide as a panel
            axis.legend(
                handles.values(), handles.keys(), loc="upper center", bbox_to_anchor=(0.5, -0.16),
                ncols=min(fit, 4), fontsize=7, handlelength=2.8, columnspacing=1.0,
            )  # fmt: skip
    content, path = io.BytesIO(), Path(path)
    canvas.savefig(content, dpi=110, format=path.suffix[1:] or "png")
    write_atomically(path, content.getvalue())


def _draw_curve(axis: Any, curve: Curve) -> Any:
    if curve.style == "bars":
        width = min((b - a for a, b in zip(curve.x, curve.x[1:], strict=False)), default=0.8)
        return axis.bar(curve.x, curve.y, width, color=curve.colour, alpha=0.5)
    line = {"line": "-", "dash": "--", "points": ""}[curve.style]
    error = curve.error if any(curve.error) else None
    every = 1 if curve.style == "points" else 1 + len(curve.x) // _DENSE
    if curve.names and line:
        named = [f"{number} {name}" for number, name in enumerate(curve.names, 1)]
        axis.text(0.97, 0.97, "\n".join(named), transform=axis.transAxes, **_SMALL)
        for number, place in enumerate(zip(curve.x, curve.y, strict=True), 1):
            axis.annotate(str(number), place, (-3, -3), textcoords="offset points", **_SMALL)
    if curve.ends:
        axis.plot(curve.x[-1:], curve.y[-1:], marker="x", ms=8, color=curve.colour)
    return axis.errorbar(
        curve.x, curve.y, error, color=curve.colour, linestyle=line, marker="o", ms=3.5,
        capsize=2, lw=1.4, elinewidth=0.8, errorevery=every, markevery=every,
    )  # fmt: skip


def _set_scales(axis: Any, panel: Panel) -> None:
    """Set linear or logarithmic axes, with ticks at plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    numbers = FuncFormatter(lambda value, _: f"{value:.6f}".rstrip("0").rstrip("."))
    shown = [(axis.xaxis, panel.x_log, "x"), (axis.yaxis, panel.y_log, "y")]
    for line, base, name in shown:
        values = [v for curve in panel.curves for v in getattr(curve, name)]
        if base and any(v > 0 for v in values):
            getattr(axis, f"set_{name}scale")("log", base=base)
            line.set_minor_formatter(NullFormatter())
            if base == 10 and max(values) < 200 * min(v for v in values if v > 0):
                line.set_major_locator(LogLocator(10, (1.0, 2.0, 5.0)))
            if name == "x" and len(set(values)) <= 9:
                line.set_ticks(sorted(set(values)))
                line.set_minor_locator(LogLocator(base, ()))
        line.set_major_formatter(numbers)
