"""Figures as data: panels of curves, which matplotlib draws to a file and a browser to a page.

``plot(table)`` of an experiment returns a :class:`Figure`; nothing is computed after that, save
means and standard errors over seeds, in :func:`curves`.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from embens.experiments.claims import Frame, plain
from embens.files import write_atomically

PALETTE = (
    *("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd"),
    *("#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf"),
)
MEASURES = {
    "accuracy": ("ensemble, test", "accuracy"),
    "member_accuracy": ("members, test", "mean accuracy"),
    "member_train_accuracy": ("members, train", "mean accuracy"),
    "correlation": ("correlation, test", "correlation"),
}
"""Columns that most experiments show against M: title and label of their panels."""
LABELS = {
    "accuracy": "ensemble accuracy",
    "member_accuracy": "mean member accuracy",
    "correlation": "correlation",
}
"""Labels of columns in panels whose title says something else."""
_DENSE = 40  # points of a curve from which on errors are a band
_SMALL = {"ha": "right", "va": "top", "fontsize": 7}  # below and left of its place
_CROWDED = 6  # labels of one panel from which on its legend would hide its curves


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


@dataclass(frozen=True)
class Panel:
    """A pair of axes; ``x_log`` and ``y_log`` are bases of logarithms, 0 for linear axes."""

    title: str
    x_label: str
    y_label: str
    curves: list[Curve]
    x_log: int = 0
    y_log: int = 0


@dataclass(frozen=True)
class Figure:
    """Panels side by side, as the paper has them, and what they show."""

    title: str
    panels: list[Panel]
    columns: int = 4

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; what is not finite becomes None."""
        return plain(asdict(self))


def curves(
    table: Frame,
    x: str,
    y: str,
    *,
    by: str | None = None,
    label: str = "{}",
    colours: str | dict[Any, str] | Sequence[str] = PALETTE,
    style: str = "line",
) -> list[Curve]:
    """Return a curve of means over seeds, with standard errors, for each value of ``by``.

    In ``label`` ``{}`` stands for that value. ``colours`` is one for all, one for each value in the
    order of curves (others are left out), or some to choose from in turn.
    """
    if y not in table or not len(table):
        return []
    groups = {None: table} if by is None else dict(list(table.groupby(by)))
    if isinstance(colours, dict):
        chosen = {value: colours[value] for value in colours if value in groups}
    else:
        several = [colours] if isinstance(colours, str) else colours
        chosen = dict(zip(groups, itertools.cycle(several), strict=False))
    found = []
    for value, colour in chosen.items():
        each = groups[value].groupby([x, "seed"])[y].mean().reset_index()  # a seed is one number
        points = each.groupby(x)[y].agg(["mean", "sem"]).dropna(subset=["mean"])
        if len(points):
            name = label.format(f"{value:g}" if isinstance(value, float) else value)
            x_y_error = (points.index, points["mean"], points["sem"].fillna(0.0))
            values = [[float(v) for v in column] for column in x_y_error]
            found.append(Curve(name, *values, colour=colour, style=style))
    return found


def against_members(
    draw: Callable[[str], list[Curve]], columns: Iterable[str] = MEASURES, **axes: int
) -> list[Panel]:
    """Return a panel against M for each of these measures, with the curves of ``draw(column)``."""
    return [
        Panel(title, "members M", label, draw(column), x_log=2, **axes)
        for column in columns
        for title, label in [MEASURES[column]]
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
    canvas = Canvas(figsize=(3.9 * columns, 3.5 * rows), constrained_layout=True)
    canvas.suptitle(figure.title, fontsize=11)
    common: dict[str, Any] = {}
    for number, panel in enumerate(figure.panels):
        axis = canvas.add_subplot(rows, columns, number + 1)
        others = {c.label for p in figure.panels if p is not panel for c in p.curves}
        own: dict[str, Any] = {}
        for curve in panel.curves:
            handle = _draw_curve(axis, curve)
            (common if curve.label in others or count == 1 else own).setdefault(curve.label, handle)
        if len(own) > _CROWDED:
            common |= own
        else:
            _add_legend(axis, own, loc="best", fontsize=7, framealpha=0.6, handlelength=3)
        axis.set_title(panel.title, fontsize=10)
        axis.set_xlabel(panel.x_label)
        axis.set_ylabel(panel.y_label)
        _set_scales(axis, panel)
        axis.grid(alpha=0.3)
    _add_legend(canvas, common, loc="outside lower center", ncols=min(len(common), 8), fontsize=8)
    content, path = io.BytesIO(), Path(path)
    canvas.savefig(content, dpi=110, format=path.suffix[1:] or "png")
    write_atomically(path, content.getvalue())


def _add_legend(place: Any, handles: dict[str, Any], **options: Any) -> None:
    shown = {label: handle for label, handle in handles.items() if label}
    if shown:
        place.legend(shown.values(), shown.keys(), **options)


def _draw_curve(axis: Any, curve: Curve) -> Any:
    if curve.style == "bars":
        width = min((b - a for a, b in zip(curve.x, curve.x[1:], strict=False)), default=0.8)
        return axis.bar(curve.x, curve.y, width, color=curve.colour, alpha=0.5)
    line = {"line": "-", "dash": "--", "points": ""}[curve.style]
    marker, error = "o", curve.error if any(curve.error) else None
    if len(curve.x) > _DENSE and curve.style != "points":  # bars at every point would hide the line
        if error:
            ends = [[y + s * e for y, e in zip(curve.y, error, strict=True)] for s in (-1, 1)]
            axis.fill_between(curve.x, *ends, color=curve.colour, alpha=0.2, linewidth=0)
        marker, error = "", None
    if curve.names and line:
        named = [f"{number} {name}" for number, name in enumerate(curve.names, 1)]
        axis.text(0.97, 0.97, "\n".join(named), transform=axis.transAxes, **_SMALL)
        for number, place in enumerate(zip(curve.x, curve.y, strict=True), 1):
            axis.annotate(str(number), place, (-3, -3), textcoords="offset points", **_SMALL)
    return axis.errorbar(
        curve.x, curve.y, error, color=curve.colour, linestyle=line, marker=marker, ms=3.5,
        capsize=2, lw=1.4, elinewidth=0.8,
    )  # fmt: skip


def _set_scales(axis: Any, panel: Panel) -> None:
    if panel.x_log:
        axis.set_xscale("log", base=panel.x_log)
        ticks = sorted({x for curve in panel.curves for x in curve.x})
        if len(ticks) <= 9:
            axis.set_xticks(ticks, labels=[f"{t:g}" for t in ticks])
            axis.minorticks_off()
    if panel.y_log and any(y > 0 for curve in panel.curves for y in curve.y):
        axis.set_yscale("log", base=panel.y_log)
