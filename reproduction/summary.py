"""The small picture of the README: accuracy and log loss of the main systems of ``compare``."""

from dataclasses import replace
from functools import partial

from reproduction.competitors import (
    FOUR_NETWORKS,
    ONE,
    SEPARATE,
    SIGNS,
    SPLIT,
    TWO_NETWORKS,
    WIDE,
    colours_of_systems,
)
from reproduction.drawing import ORANGE, Curve, Figure, curves, panels, state
from reproduction.rows import Frame, Rows

TWO = SIGNS[0]
COLUMNS = {
    "accuracy": ("accuracy", "{:.1%}"),
    "nll": ("log loss", "{:.2f}"),
    "scaled_nll": ("log loss after scaling", "{:.2f}"),
}
"""Columns of the summary: label and format of a value."""
SUMMARISED = (ONE, WIDE, SEPARATE, TWO_NETWORKS, *SIGNS[:2], SPLIT[0])
"""Systems of the summary."""
MEMBERS = {TWO: "two members", SIGNS[1]: "four members", SPLIT[0]: "two members, split batches"}
"""Ensembles inside one network, with their names in the legend."""
SAME_NETWORKS = {TWO_NETWORKS: 2, FOUR_NETWORKS: 4}
"""Budgets at which M networks are the separate networks."""


def draw_summary(table: Frame) -> Figure:
    """Return the small picture of the README."""
    table = with_same_networks(table)
    colours = colours_of_systems()
    shown = {name: colours[name] for name in SUMMARISED} | {SPLIT[0]: ORANGE}
    draw = partial(curves, table, "budget", by="system", colours=shown)
    titles = {}
    for column, (label, _) in COLUMNS.items():
        titles[column] = state(partial(strongest_text, Rows(table), column), label)
    all_panels = []
    for panel, (label, _) in zip(
        panels(draw, titles, "compute of training, in networks"), COLUMNS.values(), strict=True
    ):
        named = [named_curve(curve) for curve in panel.curves]
        all_panels.append(replace(panel, y_label=label, curves=named))
    guessing = float(table["guessing"].mean())
    all_panels[1] = replace(
        all_panels[1], y_label=f"{all_panels[1].y_label} (guessing: {guessing:.2f})"
    )
    return Figure(
        all_panels, title="Equal compute: members, separate networks, or one network trained longer"
    )


def named_curve(curve: Curve) -> Curve:
    """Return a curve with its name in the legend; those of networks are dashed."""
    if curve.label in MEMBERS:
        return replace(curve, label=MEMBERS[curve.label])
    return replace(curve, style="dash")


def with_same_networks(table: Frame) -> Frame:
    """Add separate networks as "two networks" at a budget of two, where they are the same."""
    import pandas

    copies = [table]
    for system, budget in SAME_NETWORKS.items():
        measured = table[(table["system"] == system) & (table["budget"] == budget)]
        same = (table["system"] == SEPARATE) & (table["budget"] == budget)
        is_measured = table["seed"].isin(measured["seed"])
        copies.append(table[same & ~is_measured].assign(system=system))
    return pandas.concat(copies, ignore_index=True)


def strongest_text(rows: Rows, column: str) -> str:
    """Return a title with two members and their strongest competitors at the largest budget."""
    label, number = COLUMNS[column]
    budget = int(rows.where(system=TWO)["budget"].max())
    equal = rows.where(budget=budget)
    measured = set(equal["system"])
    texts = []
    for system, name in ((TWO, "two members"), (TWO_NETWORKS, TWO_NETWORKS), (ONE, ONE)):
        if system in measured:
            value = equal.where(system=system).mean(column)
            texts.append(f"{name} {number.format(value)}")
    return f"{label} at {budget} ×: {', '.join(texts)}"
