"""Standard against NTK parametrization (the paper's Section C).

The same functions at initialisation, other gradients: in the NTK parametrization a weight's
gradient is smaller by its scale, and the rate that trains it is larger. Each parametrization has
the best of a few rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

from embens.experiments.claims import Claim, Frame, Missing, Rows, judge
from embens.experiments.contract import CellBase, Row, batch_ensemble
from embens.experiments.figure import Figure, Panel, curves
from embens.experiments.setting import Setting
from embens.experiments.training import train

LABEL = "section C"
TITLE = "Standard and NTK parametrization"
ABOUT = (
    "The baseline (modulations N(0, 1), γ=M) in both parametrizations, each at the best of its "
    "rates by final test accuracy: loss and accuracy of members against epochs."
)
COLOURS = {"standard": "#1f77b4", "ntk": "#d62728"}

FACTORS = {"standard": (0.5, 1.0, 2.0), "ntk": (1.0, 4.0, 16.0, 64.0)}
MEMBERS = {"quick": 8, "cpu": 4, "paper": 7}


@dataclass(frozen=True)
class Cell(CellBase):
    """One ensemble; ``"standard"`` is the preset's own parametrization."""

    parametrization: str
    factor: float  # of the preset's rate
    members: int


def cells(setting: Setting) -> list[Cell]:
    """Return both parametrizations and their rates."""
    return [
        Cell(name, factor, MEMBERS[setting.preset], setting=setting)
        for name, factors in FACTORS.items()
        for factor in factors
    ]


def measure(cell: Cell) -> list[Row]:
    """Train one ensemble; return a row for each epoch."""
    setting = cell.setting
    if cell.parametrization == "ntk":
        setting = replace(setting, parametrization="ntk", weight_std=math.sqrt(2))
    network, generator = replace(cell, setting=setting).draw()
    training = train(
        batch_ensemble(network, cell.members, generator=generator),
        setting,
        seed=cell.seed,
        lr=cell.factor * setting.lr,
        modulation_lr=setting.lr,  # the modulations are the same in both and keep their rate
        test_each_epoch=True,
    )
    final = training.evaluate()
    end = {f"final_{name}": final[name] for name in ("accuracy", "member_accuracy")}
    rows = training.trace or [{"epoch": 0, "loss": math.nan, "member_accuracy": math.nan}]
    return [{**row, **end, "diverged": final["diverged"]} for row in rows]


def at_best(rows: Rows, name: str) -> Rows:
    """Return the rows of a parametrization at the rate with the best final accuracy."""
    rows = rows.where(parametrization=name)
    means = rows.frame.groupby("factor")[["final_accuracy", "diverged"]].mean()
    means = means[means["diverged"] == 0]["final_accuracy"]
    if not len(means):
        raise Missing(f"a rate at which {name} does not diverge")
    return rows.where(factor=float(means.idxmax()))


def _final(rows: Rows, name: str) -> float:
    return at_best(rows, name).mean("final_accuracy")


def _time(rows: Rows, name: str) -> float:
    """Return the mean loss over the first half of the epochs, in logarithms: less is faster."""
    import numpy

    rows = at_best(rows, name)
    early = rows.between("epoch", high=rows["epoch"].max() / 2)
    return float(numpy.log(early.frame.groupby("epoch")["loss"].mean()).mean())


def claims(table: Frame) -> list[Claim]:
    """Return the paper's statement."""
    test = partial(judge, table)
    return [
        test(
            "similar accuracy",
            lambda t: _final(t, "ntk") - _final(t, "standard"),
            above=-0.015,
            below=0.015,
        ).says(
            "both end with a similar ensemble accuracy (to 1.5 %)",
            paper="found their accuracy to be similar",
            measure="accuracy of NTK less standard",
        ),
        test(
            "standard is faster", lambda t: _time(t, "ntk") - _time(t, "standard"), above=0.0
        ).says(
            "the standard parametrization converges faster",
            paper="convergence faster in the standard case",
            measure="log of the ratio of train losses over the first half, NTK to standard",
        ),
    ]


def plot(table: Frame) -> Figure:
    """Return loss and accuracy against epochs at the best rates, and accuracy against rates."""
    losses, accuracies = [], []
    for name, colour in COLOURS.items():
        if name in set(table["parametrization"]):
            rows = at_best(Rows(table), name).frame
            label = f"{name}, rate ×{rows['factor'].iloc[0]:g}"
            draw = partial(curves, rows, "epoch", label=label, colours=colour)
            losses += draw(y="loss")
            accuracies += draw(y="member_accuracy")
    rates = curves(
        *(table, "factor", "final_accuracy"), by="parametrization", colours=COLOURS, style="dash"
    )
    panels = [
        Panel("train", "epoch", "member loss", losses, y_log=10),
        Panel("test", "epoch", "member accuracy", accuracies),
        Panel("rates", "factor of the rate", "ensemble accuracy", rates, x_log=10),
    ]
    return Figure(TITLE, panels, columns=3)
