"""Standard against NTK parametrization (the paper's Section C).

The same functions at initialisation, other gradients: in the NTK parametrization a weight's
gradient is smaller by its scale, and the rate that trains it is larger. Each parametrization has
the best of a few rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch

from embens.embedding.families import batch_ensemble
from embens.experiments.claims import Claim, Missing, Table, judge, mean, select
from embens.experiments.figure import Curve, Figure, Panel, curves
from embens.experiments.setting import Setting, data_set, reference
from embens.experiments.training import Row, evaluate, train

LABEL = "section C"
TITLE = "Standard and NTK parametrization"
ABOUT = (
    "The baseline (modulations N(0, 1), γ=M) in both parametrizations, each at the best of its "
    "rates by final test accuracy: loss and accuracy of members against epochs."
)
COLOURS = {"standard": "#1f77b4", "ntk": "#d62728"}


@dataclass(frozen=True)
class Cell:
    """One ensemble; ``"standard"`` is the preset's own parametrization."""

    setting: Setting
    parametrization: str
    factor: float  # of the preset's rate
    members: int
    seed: int


FACTORS = {
    "standard": (0.5, 1.0, 2.0),
    "ntk": (1.0, 4.0, 16.0, 64.0),
}
MEMBERS = {"quick": 8, "cpu": 4, "paper": 7}
SEEDS = {"quick": 5, "cpu": 3, "paper": 3}


def cells(setting: Setting, *, seeds: int | None = None) -> list[Cell]:
    """Return both parametrizations, their rates, and seeds."""
    return [
        Cell(setting, name, factor, MEMBERS[setting.preset], seed)
        for seed in range(seeds or SEEDS[setting.preset])
        for name, factors in FACTORS.items()
        for factor in factors
    ]


def measure(cell: Cell) -> list[Row]:
    """Train one ensemble; return a row for each epoch."""
    setting = cell.setting
    if cell.parametrization == "ntk":
        setting = replace(setting, parametrization="ntk", weight_std=math.sqrt(2))
    generator = torch.Generator().manual_seed(cell.seed)
    network = reference(setting, generator=generator)
    ensemble = batch_ensemble(network, cell.members, generator=generator)
    data = data_set(setting)
    # The modulations are the same in both and keep their rate.
    training = train(
        ensemble,
        setting,
        data,
        seed=cell.seed,
        lr=cell.factor * setting.lr,
        modulation_lr=setting.lr,
        test_each_epoch=True,
    )
    final = evaluate(ensemble, data)
    end = {"final_accuracy": final["accuracy"], "final_member_accuracy": final["member_accuracy"]}
    rows = training.trace or [{"epoch": 0, "loss": math.nan, "member_accuracy": math.nan}]
    return [{**row, **end, "diverged": float(training.diverged)} for row in rows]


def best_factor(table: Table, name: str) -> float:
    """Return the factor of the rate with the best final accuracy, without divergence."""
    rows = select(table, parametrization=name)
    means = rows.groupby("factor")[["final_accuracy", "diverged"]].mean()
    means = means[means["diverged"] == 0]["final_accuracy"]
    if not len(means):
        raise Missing(f"a rate at which {name} does not diverge")
    return float(means.idxmax())


def at_best(table: Table, name: str) -> Table:
    """Return the rows of a parametrization at its best rate."""
    return select(table, parametrization=name, factor=best_factor(table, name))


def _final(table: Table) -> float:
    names = ("ntk", "standard")
    ntk, standard = (mean(at_best(table, name), "final_accuracy") for name in names)
    return ntk - standard


def _time(table: Table, name: str) -> float:
    """Return the mean loss over the first half of the epochs, in logarithms: less is faster."""
    import numpy

    rows = at_best(table, name)
    losses = rows[rows["epoch"] <= rows["epoch"].max() / 2].groupby("epoch")["loss"].mean()
    return float(numpy.log(losses).mean())


def claims(table: Table) -> list[Claim]:
    """Return the paper's statement."""
    test = partial(judge, table)
    return [
        test(
            _final,
            name="similar accuracy",
            statement="both end with a similar ensemble accuracy (to 1.5 %)",
            paper="found their accuracy to be similar",
            measure="accuracy of NTK less standard",
            above=-0.015,
            below=0.015,
        ),
        test(
            lambda t: _time(t, "ntk") - _time(t, "standard"),
            name="standard is faster",
            statement="the standard parametrization converges faster",
            paper="convergence faster in the standard case",
            measure="log of the ratio of train losses over the first half, NTK to standard",
            above=0.0,
        ),
    ]


def plot(table: Table) -> Figure:
    """Return loss and accuracy against epochs at the best rates, and accuracy against rates."""
    names = [name for name in COLOURS if name in set(table["parametrization"])]

    def of_epochs(column: str) -> list[Curve]:
        found = []
        for name in names:
            rows = at_best(table, name)
            label = f"{name}, rate ×{rows['factor'].iloc[0]:g}"
            for c in curves(rows, "epoch", column, colours=[COLOURS[name]]):
                found.append(Curve(label, c.x, c.y, c.error, c.colour))
        return found

    ends = table.drop_duplicates(["parametrization", "factor", "members", "seed"])
    rates = [
        Curve(name, c.x, c.y, c.error, c.colour, "dash")
        for name in names
        for c in curves(
            *(ends[ends["parametrization"] == name], "factor", "final_accuracy"),
            colours=[COLOURS[name]],
        )
    ]
    return Figure(
        TITLE,
        [
            Panel("train", "epoch", "member loss", of_epochs("loss"), y_log=True),
            Panel("test", "epoch", "member accuracy", of_epochs("member_accuracy")),
            Panel("rates", "factor of the rate", "ensemble accuracy", rates, x_log=True),
        ],
        columns=3,
    )
