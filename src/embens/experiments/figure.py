"""Figures as data: panels of curves, which matplotlib draws to a file and a browser to a page.

``plot(table)`` of an experiment returns a :class:`Figure`; nothing is computed after that, save
means and standard errors over seeds, in :func:`curves`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from embens.experiments.claims import Table

PALETTE = (
    *("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd"),
    *("#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf"),
)


@dataclass(frozen=True)
class Curve:
    """Points with error bars.

    Attributes:
        label: for the legend; curves of the same label in several panels belong together.
        x: abscissae.
        y: ordinates.
        error: standard errors; empty: none are drawn.
        colour: as ``#rrggbb``.
        style: ``"line"``, ``"dash"``, ``"points"`` or ``"bars"``.
        text: a word for each point, shown when one points at it; may be empty.
    """

    label: str
    x: list[float]
    y: list[float]
    error: list[float] = field(default_factory=list)
    colour: str = PALETTE[0]
    style: str = "line"
    text: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Panel:
    """A pair of axes."""

    title: str
    x_label: str
    y_label: str
    curves: list[Curve]
    x_log: bool = False
    y_log: bool = False


@dataclass(frozen=True)
class Figure:
    """Panels side by side, as the paper has them, and what they show."""

    title: str
    panels: list[Panel]
    columns: int = 4

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; what is not finite becomes None."""
        return _plain(asdict(self))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def curves(
    table: Table,
    x: str,
    y: str,
    *,
    by: str | None = None,
    label: str = "{}",
    colours: Sequence[str] | dict[Any, str] | None = None,
    style: str = "line",
) -> list[Curve]:
    """Return a curve of means over seeds, with standard errors, for each value of ``by``."""
    if y not in table or not len(table):
        return []
    groups = [(None, table)] if by is None else list(table.groupby(by))
    found = []
    for number, (value, rows) in enumerate(groups):
        each = rows.groupby([x, "seed"])[y].mean().reset_index()  # cells of a seed go together
        points = each.groupby(x)[y].agg(["mean", "std", "count"]).dropna(subset=["mean"])
        if not len(points):
            continue
        error = (points["std"] / points["count"] ** 0.5).fillna(0.0)
        if isinstance(colours, dict):
            colour = colours.get(value, PALETTE[number % len(PALETTE)])
        else:
            chosen = PALETTE if colours is None else colours
            colour = chosen[number % len(chosen)]
        found.append(
            Curve(
                label.format(f"{value:g}" if isinstance(value, float) else value),
                [float(v) for v in points.index],
                [float(v) for v in points["mean"]],
                [float(v) for v in error],
                colour,
                style,
            )
        )
    return found


def shades(values: Sequence[Any], colours: str = "viridis") -> dict[Any, str]:
    """Return a colour of a map for each of these values, in their order."""
    import matplotlib

    points = sorted(set(values))
    chosen = matplotlib.colormaps[colours]
    scale = max(1, len(points) - 1)
    return {
        value: "#{:02x}{:02x}{:02x}".format(
            *(round(255 * c) for c in chosen(0.92 * number / scale)[:3])
        )
        for number, value in enumerate(points)
    }


def draw(figure: Figure, path: str | Path) -> None:
    """Draw a figure to a file, in the format that its name ends with."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    count = len(figure.panels)
    columns = max(1, min(figure.columns, count))
    rows = max(1, -(-count // columns))
    canvas = Canvas(figsize=(3.9 * columns, 3.5 * rows), constrained_layout=True)
    FigureCanvasAgg(canvas)
    canvas.suptitle(figure.title, fontsize=11)
    seen: dict[str, Any] = {}
    for number, panel in enumerate(figure.panels):
        axis = canvas.add_subplot(rows, columns, number + 1)
        for curve in panel.curves:
            handle = _draw_curve(axis, curve)
            seen.setdefault(curve.label, handle)
        axis.set_title(panel.title, fontsize=10)
        axis.set_xlabel(panel.x_label)
        axis.set_ylabel(panel.y_label)
        _set_scales(axis, panel)
        axis.grid(alpha=0.3)
    shown = {label: handle for label, handle in seen.items() if label}
    if shown:
        canvas.legend(
            shown.values(), shown.keys(), loc="outside lower center", ncols=min(len(shown), 8),
            fontsize=8,
        )  # fmt: skip
    canvas.savefig(path, dpi=110)


def _draw_curve(axis: Any, curve: Curve) -> Any:
    if curve.style == "bars":
        width = min((b - a for a, b in zip(curve.x, curve.x[1:], strict=False)), default=0.8)
        return axis.bar(curve.x, curve.y, width, color=curve.colour, alpha=0.5)
    line = {"line": "-", "dash": "--", "points": ""}[curve.style]
    marker = "" if len(curve.x) > 40 and curve.style != "points" else "o"
    error = curve.error or None
    return axis.errorbar(
        curve.x, curve.y, error, color=curve.colour, linestyle=line, marker=marker, ms=3.5,
        capsize=2, lw=1.4, elinewidth=0.8,
    )  # fmt: skip


def _set_scales(axis: Any, panel: Panel) -> None:
    if panel.x_log:
        axis.set_xscale("log", base=2 if "M" in panel.x_label else 10)
        ticks = sorted({x for curve in panel.curves for x in curve.x})
        if len(ticks) <= 9:
            axis.set_xticks(ticks, labels=[f"{t:g}" for t in ticks])
            axis.minorticks_off()
    if panel.y_log and any(y > 0 for curve in panel.curves for y in curve.y):
        axis.set_yscale("log")
