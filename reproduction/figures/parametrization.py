"""Standard and NTK parametrization (section C).

The baseline (modulations N(0, 1), γ=M) in both parametrizations, each at the best of its rates by
final test accuracy: loss and accuracy of members against epochs.

The same functions at initialisation, other gradients: in the NTK parametrization a weight's
gradient is smaller by its scale, and the rate that trains it is larger.
"""

import math
from dataclasses import replace
from functools import partial
from statistics import fmean

from reproduction.claims import Claim, Frame, Missing, Rows, less
from reproduction.grid.cells import Cell, Row, batch_ensemble, sweep, train
from reproduction.drawing import LABELS, Figure, Panel, curves

MEMBER = "member_accuracy"
COLOURS = {"standard": "#1f77b4", "ntk": "#d62728"}
FACTORS = {"standard": (0.5, 1.0, 2.0), "ntk": (1.0, 4.0, 16.0, 64.0)}  # of the preset's rate
MEMBERS = {"quick": 8, "cpu": 4, "paper": 7}
SWEEP = [sweep(parametrization=n, factor=f, members=MEMBERS) for n, f in FACTORS.items()]


def measure(cell: Cell) -> list[Row]:
    """Train one ensemble; return a row for each epoch."""
    rate, weights = cell.setting.lr, {"parametrization": "ntk", "weight_std": math.sqrt(2)}
    if cell.parametrization == "ntk":
        cell = replace(cell, setting=replace(cell.setting, **weights))
    # The modulations are the same in both and keep their rate.
    rates = {"lr": cell.factor * rate, "modulation_lr": rate}
    training = train(cell, cell.make(batch_ensemble), **rates, test_each_epoch=True)
    final = training.evaluate()
    end = {f"final_{name}": final[name] for name in ("accuracy", MEMBER)}
    rows = training.trace or [{"epoch": 0, "loss": math.nan, MEMBER: math.nan}]
    return [{**row, **end, "diverged": final["diverged"]} for row in rows]


def at_best(rows: Rows, name: str) -> Rows:
    """Return the rows of a parametrization at the rate with the best final accuracy."""
    rows = rows.where(parametrization=name)
    means = rows.frame.groupby("factor")[["final_accuracy", "diverged"]].mean()
    means = means[means["diverged"] == 0]["final_accuracy"]
    if not len(means):
        raise Missing(f"a rate at which {name} does not diverge")
    return rows.where(factor=float(means.idxmax()))


def _slower(rows: Rows) -> float:
    """Log of the ratio of train losses over the first half, NTK to standard."""
    logs = {}
    for name in COLOURS:
        mine = at_best(rows, name)
        early = mine.between("epoch", high=mine["epoch"].max() / 2)
        logs[name] = fmean(map(math.log, early.curve("epoch", "loss", least=1)[1]))
    return logs["ntk"] - logs["standard"]


_ntk, _standard = (partial(at_best, name=name) for name in ("ntk", "standard"))
CLAIMS = [  # the best rate may be another one
    Claim(less("final_accuracy", _ntk, _standard), above=-0.015, below=0.015, jumps=True).says(
        "both end with a similar ensemble accuracy (to 1.5 %)",
        "found their accuracy to be similar",
        "Accuracy of NTK less standard",
    ),
    Claim(_slower, above=0.0, jumps=True).says(
        "the standard parametrization converges faster", "convergence faster in the standard case"
    ),
]


def plot(table: Frame) -> Figure:
    """Return loss and accuracy against epochs at the best rates, and accuracy against rates."""
    import pandas

    names = [name for name in COLOURS if name in set(table["parametrization"])]
    best = pandas.concat(at_best(Rows(table), name).frame for name in names)
    style = {"by": "parametrization", "colours": COLOURS}
    draw = partial(curves, best, "epoch", **style)
    rates = curves(table, "factor", "final_accuracy", label="{}, by rate", style="dash", **style)
    panels = [
        Panel("who learns faster?", "epoch", "mean member loss, train", draw("loss"), y_log=10),
        Panel("who is better in the end?", "epoch", LABELS[MEMBER], draw(MEMBER)),
        Panel("the best rates", "factor of the rate", LABELS["accuracy"], rates, x_log=10),
    ]
    return Figure(panels, columns=3)
