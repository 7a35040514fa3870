"""Width of the reference network (fig:many_widths).

Modulations N(0, 1), γ=M, against M; a curve for each relative width. Dashed: separate networks at
the best learning rate for one network. The last panel compares all of them at equal numbers of
parameters.
"""

import math
from dataclasses import replace
from functools import partial

from embens import embed
from reproduction import baselines
from reproduction.baselines import baseline_rows, ensemble_rows
from reproduction.claims import Claim, growth_of_best
from reproduction.drawing import LABELS, Curve, Figure, Mark, Panel, curves, panels, shades, state
from reproduction.figures.transition import AROUND_BEST, MEMBERS
from reproduction.grid.cells import Cell, Row, sweep
from reproduction.rows import Frame, MissingCellsError, Rows
from reproduction.training import train

WIDTHS = {
    "quick": (0.5, 1.0, 2.0, 4.0),
    "cpu": (0.5, 1.0, 2.0),
    "paper": (0.25, 0.5, 1.0, 2.0, 4.0),
}

MOST_MEMBERS = {"quick": (), "cpu": (32,), "paper": ()}
"""Further numbers of members at the largest width."""

POOLED = True
SWEEP = [
    sweep(width=WIDTHS, members=MEMBERS),
    sweep(width=2.0, members=MOST_MEMBERS),
    baselines.sweep(WIDTHS),
]


def measure(cell: Cell) -> Row:
    """Train one ensemble and score it."""
    return train(cell, cell.build_ensemble(embed)).evaluate()


def with_many_members(rows: Rows) -> Rows:
    """Return the embedded ensembles, if the sweep covers the paper's best M."""
    return ensemble_rows(rows).spanning("members", *AROUND_BEST)


def fall_at_smallest_width(rows: Rows) -> float:
    """Return the accuracy at the best M minus that at the largest M."""
    narrow = ensemble_rows(rows).first("width").spanning("members", *AROUND_BEST)
    _, accuracies = narrow.curve("members", "accuracy")
    return max(accuracies) - accuracies[-1]


def advantage_at_equal_size(rows: Rows) -> float:
    """Return the difference of accuracies at equal numbers of parameters, mean over widths.

    Separate networks are interpolated in the logarithm of the number of parameters along their
    upper envelope. Embedded ensembles smaller than all of them are left out.
    """
    import numpy

    separate = baseline_rows(rows).frame
    if not len(separate):
        raise MissingCellsError("cells of the baselines")
    groups = separate.groupby(["width", "members"])
    means = groups[["parameters", "accuracy"]].mean().sort_values("parameters", kind="stable")
    best_so_far = means["accuracy"].cummax().shift(fill_value=-math.inf)
    envelope = means[means["accuracy"] > best_so_far]
    envelope_sizes = numpy.log(envelope["parameters"])
    gains = []
    for _, rows_of_width in ensemble_rows(rows).by("width"):
        best = rows_of_width.where(members=int(rows_of_width.best("members")))
        size = math.log(best.mean("parameters"))
        if size >= envelope_sizes.iloc[0] - 1e-9:
            separate_accuracy = numpy.interp(size, envelope_sizes, envelope["accuracy"])
            gains.append(best.mean("accuracy") - separate_accuracy)
    if not gains:
        raise MissingCellsError("separate networks with as many parameters")
    return sum(gains) / len(gains)


def best_members(rows: Rows) -> str:
    """Return the best M of each width as a text."""
    texts = []
    for width, rows_of_width in rows.by("width"):
        texts.append(f"{rows_of_width.best('members'):g} at ×{width:g}")
    return "best M: " + ", ".join(texts)


def change_of(rows: Rows) -> float:
    """Return the change of member accuracy from the smallest to the largest M, in percent."""
    _, accuracies = rows.curve("members", "member_accuracy")
    return 100 * (accuracies[-1] - accuracies[0])


CLAIMS = [
    Claim(
        statement="the best number of members grows with the width",
        measure="exponent of the best M in the width, mean over seeds",
        statistic=growth_of_best(with_many_members),
        above=0.0,
        paper="it increases with the width",
    ),
    Claim(
        statement="at the smallest width the largest M is worse than the best",
        measure="accuracy at the best M minus that at the largest M",
        statistic=fall_at_smallest_width,
        above=0.0,
        paper="an optimum at finite width",
        jumps=True,
    ),
    Claim(
        statement="with equal numbers of parameters the best embedded ensemble is at least as good "
        "as separate networks at their best rate (to 0.5 %)",
        measure="difference of accuracies at equal numbers of parameters, mean over widths",
        statistic=advantage_at_equal_size,
        above=-0.005,
        paper="slightly outperforms at any fixed number of parameters",
        jumps=True,
    ),
    *baselines.claims(lambda rows: ensemble_rows(rows).last("width")),
]


def titles_against_members(rows: Rows) -> dict[str, str]:
    """Return the titles of the panels against M, with the results of the embedded ensembles."""
    return {
        "accuracy": state(lambda: f"(a) {best_members(rows)}", "(a) ensemble accuracy"),
        "member_accuracy": state(
            lambda: (
                f"(b) members {change_of(rows.first('width')):+.1f} % at the smallest "
                f"width, {change_of(rows.last('width')):+.1f} % at the largest"
            ),
            "(b) member accuracy",
        ),
        "correlation": state(
            lambda: (
                f"(c) correlation {rows.first('width').mean('correlation'):.2f} at the "
                f"smallest width, {rows.last('width').mean('correlation'):.2f} at the largest"
            ),
            "(c) correlation",
        ),
    }


def plot(table: Frame) -> Figure:
    """Return the paper's four panels."""
    embedded = ensemble_rows(Rows(table)).frame
    separate = baseline_rows(Rows(table)).frame
    colours = shades(table["width"], "plasma")

    def draw_both(x: str, y: str, style: str = "line", ends: str = "") -> list[Curve]:
        draw = partial(curves, x=x, y=y, by="width", colours=colours)
        all_curves = draw(embedded, label="width ×{}", style=style)
        for curve in draw(separate, label="width ×{}, separate", style="dash"):
            all_curves.append(replace(curve, ends=ends))
        return all_curves

    ends = f"{baselines.NETWORKS} were trained"
    titles = titles_against_members(ensemble_rows(Rows(table)))
    marks = {"accuracy": [Mark("paper: best M=7 at width ×1", x=7.0)]}
    against_members = panels(partial(draw_both, "members", ends=ends), titles, marks=marks)
    advantage = state(
        lambda: (
            f"(d) {100 * advantage_at_equal_size(Rows(table)):+.1f} % against separate "
            "networks of equal size"
        ),
        "(d) accuracy against size",
    )
    against_size = Panel(
        advantage,
        "parameters",
        LABELS["accuracy"],
        draw_both("parameters", "accuracy", "points"),
        x_log=10,
    )
    return Figure([*against_members, against_size])
