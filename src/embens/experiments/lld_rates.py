"""Last-layer dropout and the learning rate (fig:dropout_last).

Frozen masks N(0, 1) on the inputs of the last layer, γ=M, with the rate η(M) chosen in five ways,
on the mean over seeds; right, γ(M)/M = η(M)/η(1). Black and grey: one network and separate ones, at
the best rate for one network.

A way to choose the rate η(M) amounts to a gradient scale γ(M) = M η(M) / η(1). Ensembles with
modulations at all layers, at the preset's rate, are there to compare the gain with.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from functools import partial

from embens.embedding.families import embed, last_layer_dropout
from embens.experiments import fair
from embens.experiments.claims import Claim, Frame, Judge, Missing, Rows
from embens.experiments.contract import CellBase, Row, product
from embens.experiments.figure import Curve, Figure, Panel, panels
from embens.experiments.setting import Setting
from embens.experiments.training import train

BASIC = 0.01
EPOCH = 10  # of the early criterion
CHOICES = {
    "constant .01": "#1f77b4",
    "best test, M=1": "#2ca02c",
    "best test": "#d62728",
    "best train": "#17becf",
    "best loss at epoch 10": "#9467bd",
}

RATES = tuple(round(10 ** (k / 3), 6) for k in range(-9, 4))
MEMBERS = {
    "quick": (1, 2, 5, 10, 20, 49),
    "cpu": (1, 3, 10, 30),
    "paper": (1, 2, 5, 10, 20, 30, 49),
}
SEEDS = {"quick": 4, "cpu": 3, "paper": 3}


@dataclass(frozen=True)
class Cell(CellBase):
    """One ensemble; ``family`` is ``"lld"``, or ``"all"`` for modulations at all layers."""

    family: str
    members: int
    lr: float


def cells(setting: Setting) -> list[CellBase]:
    """Return the sweep over rates and members, and fair lines."""
    rates = RATES if setting.preset != "cpu" else RATES[1:-1:2]
    rates, members = sorted({*rates, BASIC, setting.lr}), MEMBERS[setting.preset]
    return [
        *product(Cell, setting, family=["lld"], members=members, lr=rates),
        *product(Cell, setting, family=["all"], members=members, lr=[setting.lr]),
        *fair.cells(setting),
    ]


def measure(cell: Cell) -> Row:
    """Train one ensemble at one rate."""
    ensemble = cell.make(last_layer_dropout if cell.family == "lld" else embed)
    training = train(ensemble, cell.setting, seed=cell.seed, lr=cell.lr)
    early = min(EPOCH, cell.setting.epochs)
    loss = training.trace[early - 1]["loss"] if len(training.trace) >= early else math.inf
    return {**training.evaluate(), "early_loss": min(loss, 1e9)}


@functools.lru_cache(maxsize=256)
def choose(rows: Rows) -> Frame:
    """Return the means over seeds at the rate that is chosen, for each choice and each M.

    Rates at which a run diverged are left out; ties go to the lower loss.
    """
    import pandas

    means = rows.where(family="lld").frame.groupby(["members", "lr"]).mean(numeric_only=True)
    means = means[means["diverged"] == 0].reset_index()
    if 1 not in set(means["members"]):
        raise Missing("cells with M=1 that do not diverge")

    def top(some: Frame, merit: Frame) -> Frame:
        return some.loc[[(merit - 1e-9 * some["train_loss"]).idxmax()]]

    alone = means[means["members"] == 1]
    single = float(top(alone, alone["accuracy"])["lr"].iloc[0])
    found = []
    for _, mine in means.groupby("members"):
        chosen = (
            mine[(mine["lr"] - BASIC).abs() < 1e-9],
            mine[(mine["lr"] - single).abs() < 1e-9],
            top(mine, mine["accuracy"]),
            top(mine, mine["member_train_accuracy"]),
            top(mine, -mine["early_loss"]),
        )
        found += [row.assign(choice=name) for name, row in zip(CHOICES, chosen, strict=True)]
    return pandas.concat(found).set_index("members").sort_index()


def _chosen(rows: Rows, name: str, column: str = "accuracy") -> Frame:
    """Return a column at the rates chosen in some way, by members."""
    return Rows(choose(rows)).where(choice=name)[column]


def _all_layers(rows: Rows) -> Frame:
    return rows.where(family="all").frame.groupby("members")["accuracy"].mean()


def _correction(rows: Rows, name: str) -> float:
    """Largest |log(γ(M)/M)| / log 3."""
    rates = _chosen(rows, name, "lr")
    some = rates[(rates.index > 1) & (rates.index < 50)]
    if not len(some) or 1 not in rates.index:
        raise Missing("M=1 and others below 50")
    return max(abs(math.log(rate / rates[1])) for rate in some) / math.log(3)


def _gain(values: Frame) -> float:
    if 1 not in values.index or len(values) < 2:
        raise Missing("M=1 and another M")
    return float(values.max() - values[1])


def _less_than_best(rows: Rows, name: str) -> float:
    """Difference of accuracies, mean over M."""
    found = (_chosen(rows, "best test") - _chosen(rows, name)).dropna()
    if not len(found):
        raise Missing(f"members with both best test and {name}")
    return float(found.mean())


def claims(table: Frame) -> list[Claim]:
    """Return the paper's observations on this figure."""
    test = partial(Judge(table), jumps=True)  # all of them choose a rate

    def inverted_u(rows: Rows) -> float:
        """Smaller of rise to the best M and fall to the largest."""
        values = _chosen(rows, "best test")
        return float(values.max() - max(values.iloc[0], values.iloc[-1]))

    def less_gain(rows: Rows) -> float:
        """Difference of gains over M=1."""
        return _gain(_all_layers(rows)) - _gain(_chosen(rows, "best test"))

    moderate = [
        test(partial(_correction, name=name), below=1.0).says(
            f"|log(γ(M)/M)| < log 3 for M < 50, with {name}",
            "moderate corrections, |log(γ(M)/M)| < log 3",
        )
        for name in ("best test", "best train", "best loss at epoch 10")
    ]
    return [
        *moderate,
        test(inverted_u, above=0.0).says(
            "ensemble accuracy at the best rate rises with M and falls again",
            "an optimal number of models",
        ),
        test(lambda t: float(_chosen(t, "best test").idxmax()), above=4.0, below=25.0).says(
            "the best number of members is near 10", "M≈10", "best M at the best rate"
        ),
        test(less_gain, above=0.0).says(
            "the gain is smaller than with modulations at all layers", "2 % against 5 %"
        ),
        test(partial(_less_than_best, name="constant .01"), above=0.005).says(
            "a tuned rate is clearly (0.5 %) better than 0.01", "significant increase of accuracy"
        ),
        test(partial(_less_than_best, name="best test, M=1"), below=0.01).says(
            "the rate tuned for a single model is almost (to 1 %) as good as the best",
            "almost optimal performance",
        ),
    ]


def plot(table: Frame) -> Figure:
    """Return the measures for each way to choose the rate, and the gradient scale."""
    rows, most = choose(Rows(table)), table["members"].max()
    chosen = {name: rows[rows["choice"] == name] for name in CHOICES}

    def curve(name: str, values: Frame, colour: str) -> Curve:
        x, y = [*map(float, values.index)], [*map(float, values)]
        ends = "diverges beyond" if x and x[-1] < most else ""
        return Curve(name, x, y, [], colour, ends=ends)

    def draw(column: str) -> list[Curve]:
        own = [curve(k, chosen[k][column], colour) for k, colour in CHOICES.items()]
        return [*own, *fair.lines(table, column)]

    titles = {
        "accuracy": "is there a best M at the best rate?",
        "member_accuracy": "what M costs a member",
        "member_train_accuracy": "do members still fit the train data?",
    }
    found = panels(draw, titles)
    if "all" in set(table["family"]):
        found[0].curves.append(curve("all layers", _all_layers(Rows(table)), "#ff7f0e"))
    scales = [
        curve(name, mine["lr"] / mine["lr"][1], CHOICES[name])
        for name, mine in chosen.items()
        if 1 in mine.index
    ]
    scale = Panel("does the best γ stay near M?", "members M", "γ(M)/M", scales, 2, 10)
    return Figure([*found, scale])
