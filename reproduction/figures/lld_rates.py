"""Last-layer dropout and the learning rate (fig:dropout_last).

Frozen masks N(0, 1) on the inputs of the last layer, γ=M, with the learning rate η(M) chosen in
five ways, on the mean over seeds; right, γ(M)/M = η(M)/η(1). Black and grey: one network and
separate networks, at the best rate for one network. Ensembles with modulations at all layers use
the preset's rate.
"""

import functools
import math
from functools import partial

from embens import embed, last_layer_dropout, laws
from reproduction import baselines
from reproduction.claims import Claim, rise_and_fall
from reproduction.drawing import (
    BLUE,
    CYAN,
    GREEN,
    ORANGE,
    PURPLE,
    RED,
    Figure,
    Mark,
    Panel,
    curves,
    panels,
    state,
)
from reproduction.grid.cells import Cell, Row, sweep, training_cost
from reproduction.grid.settings import LAST_LAYER, MODULATIONS, PRESETS
from reproduction.rows import Frame, MissingCellsError, Rows
from reproduction.training import train

BASIC_RATE = 0.01
EARLY_EPOCH = 10
CONSTANT, TUNED_FOR_ONE = "constant .01", "best test, M=1"
BEST_TEST, BEST_TRAIN, BEST_EARLY = "best test", "best train", "best loss at epoch 10"
CHOICES = {
    CONSTANT: BLUE,
    TUNED_FOR_ONE: GREEN,
    BEST_TEST: RED,
    BEST_TRAIN: CYAN,
    BEST_EARLY: PURPLE,
}
"""Ways to choose the learning rate, with their colours."""

ALL_RATES = [round(10 ** (k / 3), 6) for k in range(-9, 4)]
SWEPT_RATES = {"quick": ALL_RATES, "cpu": ALL_RATES[1:-1:2], "paper": ALL_RATES}
RATES = {
    preset: sorted({*rates, BASIC_RATE, PRESETS[preset].rate_of(LAST_LAYER)})
    for preset, rates in SWEPT_RATES.items()
}
PRESET_RATES = {preset: setting.rate_of(MODULATIONS) for preset, setting in PRESETS.items()}
MEMBERS = {
    "quick": (1, 2, 5, 10, 20, 49),
    "cpu": (1, 3, 10, 30),
    "paper": (1, 2, 5, 10, 20, 30, 49),
}
SEEDS = {"quick": 4, "cpu": 3, "paper": 3}

POOLED = True
SWEEP = [
    sweep(family="lld", members=MEMBERS, lr=RATES),
    sweep(family="all", members=MEMBERS, lr=PRESET_RATES),
    baselines.sweep(1.0),
]


def estimate_cost(cell: Cell) -> float:
    """Return the rough cost of a cell; members of last-layer dropout share all layers but one."""
    networks = cell["members"]
    if cell["family"] == "lld":
        networks = 1 + networks / 20
    return training_cost(cell.with_values(members=networks))


def measure(cell: Cell) -> Row:
    """Train one ensemble at one learning rate."""
    if cell["family"] == "lld":
        ensemble = cell.build_ensemble(last_layer_dropout, law=laws.Normal())
    else:
        ensemble = cell.build_ensemble(embed)
    training = train(cell, ensemble, lr=cell["lr"])
    early_epoch = min(EARLY_EPOCH, cell.setting.epochs)
    early_loss = math.inf
    if len(training.trace) >= early_epoch:
        early_loss = training.trace[early_epoch - 1]["loss"]
    # A finite value keeps means over seeds comparable.
    return {**training.evaluate(), "early_loss": min(early_loss, 1e9)}


@functools.lru_cache(maxsize=256)
def choose_rates(rows: Rows) -> Frame:
    """Return the means over seeds at the chosen rate, for each way to choose and each M.

    Rates at which a run diverged are left out. Ties go to the lower training loss.
    """
    import pandas

    means = rows.where(family="lld").frame.groupby(["members", "lr"]).mean(numeric_only=True)
    means = means[means["diverged"] == 0].reset_index()
    single = means[means["members"] == 1]
    if not len(single):
        raise MissingCellsError("cells with M=1 that do not diverge")
    tuned_rate = float(_best_row(single, single["accuracy"])["lr"].iloc[0])
    chosen = []
    for _, candidates in means.groupby("members"):
        choices = {
            CONSTANT: _row_at_rate(candidates, BASIC_RATE),
            TUNED_FOR_ONE: _row_at_rate(candidates, tuned_rate),
            BEST_TEST: _best_row(candidates, candidates["accuracy"]),
            BEST_TRAIN: _best_row(candidates, candidates["member_train_accuracy"]),
            BEST_EARLY: _best_row(candidates, -candidates["early_loss"]),
        }
        for choice, row in choices.items():
            chosen.append(row.assign(choice=choice))
    return pandas.concat(chosen, ignore_index=True)


def _best_row(candidates: Frame, merit: Frame) -> Frame:
    return candidates.loc[[(merit - 1e-9 * candidates["train_loss"]).idxmax()]]


def _row_at_rate(candidates: Frame, rate: float) -> Frame:
    return candidates[(candidates["lr"] - rate).abs() < 1e-9]


def chosen_rows(rows: Rows, choice: str = BEST_TEST) -> Rows:
    """Return one row for each M, at the rate chosen in one way."""
    return Rows(choose_rates(rows)).where(choice=choice)


def largest_correction(rows: Rows, choice: str) -> float:
    """Return the largest |log(γ(M)/M)| for 2 ≤ M < 50, in units of log 3."""
    chosen = chosen_rows(rows, choice)
    single_rate = chosen.where(members=1).mean("lr")
    rates = chosen.between("members", 2, 49)["lr"]
    return max(abs(math.log(rate / single_rate)) for rate in rates) / math.log(3)


def gain_over_single(rows: Rows) -> float:
    """Return the accuracy at the best M minus that at M=1."""
    _, accuracies = rows.curve("members", "accuracy")
    return max(accuracies) - rows.where(members=1).mean("accuracy")


def loss_against_best(rows: Rows, choice: str) -> float:
    """Return the accuracy at the best rate minus that at another choice, mean over M."""
    chosen = chosen_rows(rows, choice)
    best = chosen_rows(rows).where(members=set(chosen["members"]))
    return best.mean("accuracy") - chosen.mean("accuracy")


def correction_claim(choice: str) -> Claim:
    """Return the claim that the correction of γ=M is moderate for one choice of the rate."""
    return Claim(
        statement=f"|log(γ(M)/M)| < log 3 for M < 50, with {choice}",
        measure="largest |log(γ(M)/M)| / log 3",
        statistic=partial(largest_correction, choice=choice),
        below=1.0,
        paper="moderate corrections",
        jumps=True,
    )


# All statistics jump because they choose a rate.
CLAIMS = [
    correction_claim(BEST_TEST),
    correction_claim(BEST_TRAIN),
    correction_claim(BEST_EARLY),
    Claim(
        statement="ensemble accuracy at the best rate rises with M and falls again",
        measure="smaller of the rise to the best M and the fall to the largest M",
        statistic=rise_and_fall(chosen_rows),
        above=0.0,
        paper="an optimal number",
        jumps=True,
    ),
    Claim(
        statement="the best number of members is near 10",
        measure="best M at the best rate",
        statistic=lambda rows: chosen_rows(rows).best("members"),
        above=4.0,
        below=25.0,
        paper="M≈10",
        jumps=True,
    ),
    Claim(
        statement="the gain is smaller than with modulations at all layers",
        measure="difference of gains over M=1",
        statistic=lambda rows: (
            gain_over_single(rows.where(family="all")) - gain_over_single(chosen_rows(rows))
        ),
        above=0.0,
        paper="2 % against 5 %",
        jumps=True,
    ),
    Claim(
        statement="a tuned rate is clearly (0.5 %) better than 0.01",
        measure="difference of accuracies, mean over M",
        statistic=partial(loss_against_best, choice=CONSTANT),
        above=0.005,
        paper="significant increase of accuracy",
        jumps=True,
    ),
    Claim(
        statement="the rate tuned for a single model is almost (to 1 %) as good as the best",
        measure="difference of accuracies, mean over M",
        statistic=partial(loss_against_best, choice=TUNED_FOR_ONE),
        below=0.01,
        paper="almost optimal",
        jumps=True,
    ),
]


def plot(table: Frame) -> Figure:
    """Return the scores for each way to choose the rate, and the gradient scale."""
    chosen = choose_rates(Rows(table)).assign(seed=0)
    single_rates = chosen[chosen["members"] == 1].set_index("choice")["lr"]
    chosen = chosen.assign(scale=chosen["lr"] / chosen["choice"].map(single_rates))
    draw = partial(curves, chosen, "members", by="choice", colours=CHOICES, ends="diverges beyond")
    best = Rows(chosen).where(choice=BEST_TEST)
    titles = {
        "accuracy": state(
            lambda: f"at the best rate, M={best.best('members'):g} is best", "ensemble accuracy"
        ),
        "member_accuracy": state(
            lambda: (
                f"members {100 * best.slope('members', 'member_accuracy'):+.1f} % per doubling of M"
            ),
            "member accuracy",
        ),
        "member_train_accuracy": state(
            lambda: (
                f"train accuracy {100 * best.slope('members', 'member_train_accuracy'):+.1f} % "
                "per doubling of M"
            ),
            "member accuracy in training",
        ),
    }
    paper_best = {"accuracy": [Mark("paper: best M≈10", x=10.0)]}
    all_panels = panels(baselines.with_lines(draw, table), titles, marks=paper_best)
    all_layers = table[table["family"] == "all"]
    all_panels[0].curves.extend(
        curves(all_layers, "members", "accuracy", label="all layers", colours=ORANGE)
    )
    largest = state(
        lambda: f"γ/M differs from 1 by {3 ** largest_correction(Rows(table), BEST_TEST):.1f} ×",
        "best γ relative to M",
    )
    bounds = [Mark("paper: within a factor of 3", y=bound) for bound in (3.0, 1 / 3)]
    scale_panel = Panel(largest, "members M", "γ(M)/M", draw("scale"), 2, 10, bounds)
    return Figure([*all_panels, scale_panel])
