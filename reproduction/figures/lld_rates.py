"""Last-layer dropout and the learning rate (fig:dropout_last).

Frozen masks N(0, 1) on the inputs of the last layer, γ=M, with the rate η(M) chosen in five ways,
on the mean over seeds; right, γ(M)/M = η(M)/η(1). Black and grey: one network and separate ones, at
the best rate for one network. Ensembles with modulations at all layers have the preset's rate.
"""

import functools
import math
from functools import partial

from embens.embedding.families import embed, last_layer_dropout
from reproduction import baselines as fair
from reproduction.claims import Claim, Frame, Missing, Rows, inverted_u
from reproduction.grid.cells import Cell, Row, sweep, train
from reproduction.drawing import Figure, Panel, curves, panels
from reproduction.grid.settings import PRESETS

BASIC = 0.01
EPOCH = 10  # of the early criterion
CHOICES = {
    "constant .01": "#1f77b4",
    "best test, M=1": "#2ca02c",
    "best test": "#d62728",
    "best train": "#17becf",
    "best loss at epoch 10": "#9467bd",
}

_ALL = {round(10 ** (k / 3), 6) for k in range(-9, 4)}
RATES = {"quick": _ALL, "cpu": sorted(_ALL)[1:-1:2], "paper": _ALL}
RATES = {k: sorted({*some, BASIC, PRESETS[k].lr}) for k, some in RATES.items()}
_FEW = (1, 2, 5, 10, 20)
MEMBERS = {"quick": (*_FEW, 49), "cpu": (1, 3, 10, 30), "paper": (*_FEW, 30, 49)}
SEEDS = {"quick": 4, "cpu": 3, "paper": 3}

SWEEP = [
    sweep(family="lld", members=MEMBERS, lr=RATES),
    sweep(family="all", members=MEMBERS, lr={k: PRESETS[k].lr for k in PRESETS}),  # all layers
    fair.sweep(1.0),
]


def measure(cell: Cell) -> Row:
    """Train one ensemble at one rate."""
    ensemble = cell.make(last_layer_dropout if cell.family == "lld" else embed)
    training = train(cell, ensemble, lr=cell.lr)
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
        chosen = [mine[(mine["lr"] - rate).abs() < 1e-9] for rate in (BASIC, single)]
        merits = (mine["accuracy"], mine["member_train_accuracy"], -mine["early_loss"])
        chosen += [top(mine, merit) for merit in merits]
        found += [row.assign(choice=name) for name, row in zip(CHOICES, chosen, strict=True)]
    return pandas.concat(found, ignore_index=True)


def _chosen(rows: Rows, name: str = "best test") -> Rows:
    """Return the rows, one for each M, at the rates chosen in some way."""
    return Rows(choose(rows)).where(choice=name)


def _correction(rows: Rows, name: str) -> float:
    """Largest |log(γ(M)/M)| / log 3."""
    chosen = _chosen(rows, name)
    alone = chosen.where(members=1).mean("lr")
    some = chosen.between("members", 2, 49)["lr"]
    return max(abs(math.log(rate / alone)) for rate in some) / math.log(3)


def _gain(rows: Rows) -> float:
    return max(rows.curve("members", "accuracy")[1]) - rows.where(members=1).mean("accuracy")


def _less_than_best(rows: Rows, name: str) -> float:
    """Difference of accuracies, mean over M."""
    mine = _chosen(rows, name)
    best = _chosen(rows).where(members=set(mine["members"]))
    return best.mean("accuracy") - mine.mean("accuracy")


_claim = partial(Claim, jumps=True)  # all of them choose a rate
CLAIMS = [
    *(
        _claim(partial(_correction, name=name), below=1.0).says(
            f"|log(γ(M)/M)| < log 3 for M < 50, with {name}", "moderate corrections"
        )
        for name in ("best test", "best train", "best loss at epoch 10")
    ),
    _claim(inverted_u(_chosen), above=0.0).says(
        "ensemble accuracy at the best rate rises with M and falls again", "an optimal number"
    ),
    _claim(lambda t: _chosen(t).best("members"), above=4.0, below=25.0).says(
        "the best number of members is near 10", "M≈10", "best M at the best rate"
    ),
    _claim(lambda t: _gain(t.where(family="all")) - _gain(_chosen(t)), above=0.0).says(
        "the gain is smaller than with modulations at all layers",
        "2 % against 5 %",
        "Difference of gains over M=1",
    ),
    _claim(partial(_less_than_best, name="constant .01"), above=0.005).says(
        "a tuned rate is clearly (0.5 %) better than 0.01", "significant increase of accuracy"
    ),
    _claim(partial(_less_than_best, name="best test, M=1"), below=0.01).says(
        "the rate tuned for a single model is almost (to 1 %) as good as the best", "almost optimal"
    ),
]


def plot(table: Frame) -> Figure:
    """Return the measures for each way to choose the rate, and the gradient scale."""
    rows = choose(Rows(table)).assign(seed=0)
    alone = rows[rows["members"] == 1].set_index("choice")["lr"]
    rows = rows.assign(scale=rows["lr"] / rows["choice"].map(alone))
    draw = partial(curves, rows, "members", by="choice", colours=CHOICES, ends="diverges beyond")
    titles = {
        "accuracy": "is there a best M at the best rate?",
        "member_accuracy": "what M costs a member",
        "member_train_accuracy": "do members still fit the train data?",
    }
    found, everywhere = panels(fair.beside(draw, table), titles), table[table["family"] == "all"]
    all_layers = curves(everywhere, "members", "accuracy", label="all layers", colours="#ff7f0e")
    found[0].curves.extend(all_layers)
    see = "does the best γ stay near M?"
    return Figure([*found, Panel(see, "members M", "γ(M)/M", draw("scale"), 2, 10)])
