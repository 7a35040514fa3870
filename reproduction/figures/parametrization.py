"""Standard and NTK parametrization (section C).

The baseline (modulations N(0, 1), γ=M) in both parametrizations, each at the best of its learning
rates by final test accuracy: loss and accuracy of members against epochs.

Both parametrizations have the same functions at initialisation but different gradients: in the NTK
parametrization the gradient of a weight is smaller by its scale, so it needs a larger rate.
"""

import math
from dataclasses import replace
from functools import partial
from statistics import fmean

from reproduction.claims import Claim, difference
from reproduction.drawing import BLUE, LABELS, RED, Figure, Panel, curves, guessing, state
from reproduction.grid.cells import Cell, Row, sweep
from reproduction.grid.settings import MODULATIONS
from reproduction.rows import Frame, MissingCellsError, Rows
from reproduction.training import batch_ensemble, train

COLOURS = {"standard": BLUE, "ntk": RED}
FACTORS = {"standard": (0.5, 1.0, 2.0), "ntk": (1.0, 4.0, 16.0, 64.0)}
"""Learning rates relative to the preset's."""
MEMBERS = {"quick": 8, "cpu": 4, "paper": 7}
POOLED = True
SWEEP = [
    sweep(parametrization=name, factor=factors, members=MEMBERS)
    for name, factors in FACTORS.items()
]


def measure(cell: Cell) -> list[Row]:
    """Train one ensemble; return a row for each epoch."""
    preset_lr = cell.setting.rate_of(MODULATIONS)
    lr = cell["factor"] * preset_lr
    if cell["parametrization"] == "ntk":
        setting = replace(cell.setting, parametrization="ntk", weight_std=math.sqrt(2))
        cell = replace(cell, setting=setting)
    ensemble = cell.build_ensemble(batch_ensemble)
    # The modulations are the same in both parametrizations and keep their rate.
    training = train(cell, ensemble, lr=lr, modulation_lr=preset_lr, test_each_epoch=True)
    scores = training.evaluate()
    final = {
        "final_accuracy": scores["accuracy"],
        "final_member_accuracy": scores["member_accuracy"],
        "diverged": scores["diverged"],
    }
    if not training.trace:
        return [{"epoch": 0, "loss": math.nan, "member_accuracy": math.nan, **final}]
    return [{**row, **final} for row in training.trace]


def at_best_rate(rows: Rows, parametrization: str) -> Rows:
    """Return the rows of a parametrization at the rate with the best final accuracy."""
    rows = rows.where(parametrization=parametrization)
    means = rows.frame.groupby("factor")[["final_accuracy", "diverged"]].mean()
    accuracies = means[means["diverged"] == 0]["final_accuracy"]
    if not len(accuracies):
        raise MissingCellsError(f"a rate at which {parametrization} does not diverge")
    return rows.where(factor=float(accuracies.idxmax()))


def early_log_loss(rows: Rows, parametrization: str) -> float:
    """Return the mean logarithm of the training loss over the first half of the epochs."""
    best = at_best_rate(rows, parametrization)
    early = best.between("epoch", high=best["epoch"].max() / 2)
    _, losses = early.curve("epoch", "loss", minimum=1)
    return fmean(math.log(loss) for loss in losses)


def advantage_of_standard(rows: Rows) -> float:
    """Return the log of the ratio of early training losses, NTK to standard."""
    return early_log_loss(rows, "ntk") - early_log_loss(rows, "standard")


# The best rate can change from one set of seeds to another.
CLAIMS = [
    Claim(
        statement="both reach a similar ensemble accuracy (to 1.5 %)",
        measure="accuracy of NTK minus standard",
        statistic=difference(
            "final_accuracy",
            partial(at_best_rate, parametrization="ntk"),
            partial(at_best_rate, parametrization="standard"),
        ),
        above=-0.015,
        below=0.015,
        paper="found their accuracy to be similar",
        jumps=True,
    ),
    Claim(
        statement="the standard parametrization converges faster",
        measure="log of the ratio of training losses over the first half, NTK to standard",
        statistic=advantage_of_standard,
        above=0.0,
        paper="convergence faster in the standard case",
        jumps=True,
    ),
]


def final_text(rows: Rows) -> str:
    """Return a title with the final accuracies of the ensembles at their best rates."""
    accuracies = []
    for name in COLOURS:
        accuracy = at_best_rate(rows, name).mean("final_accuracy")
        accuracies.append(f"{name} {100 * accuracy:.1f} %")
    return f"ensembles in the end: {', '.join(accuracies)}"


def plot(table: Frame) -> Figure:
    """Return loss and accuracy against epochs at the best rates, and accuracy against rates."""
    import pandas

    names = [name for name in COLOURS if name in set(table["parametrization"])]
    best = pandas.concat(at_best_rate(Rows(table), name).frame for name in names)
    draw = partial(curves, best, "epoch", by="parametrization", colours=COLOURS)
    against_rates = curves(
        table,
        "factor",
        "final_accuracy",
        by="parametrization",
        label="{}, by rate",
        colours=COLOURS,
        style="dash",
    )
    rows = Rows(table)
    loss_title = state(
        lambda: f"early loss of NTK ÷ standard: {math.exp(advantage_of_standard(rows)):.2f}",
        "training loss",
    )
    loss_panel = Panel(
        loss_title,
        "epoch",
        "mean member loss, train",
        draw("loss"),
        y_log=10,
        marks=guessing(table),
    )
    accuracy_title = state(partial(final_text, rows), "member accuracy")
    accuracy_panel = Panel(
        accuracy_title, "epoch", LABELS["member_accuracy"], draw("member_accuracy")
    )
    best_rates = {name: at_best_rate(rows, name).mean("factor") for name in names}
    rate_text = ", ".join(f"{name} {factor:g} ×" for name, factor in best_rates.items())
    rate_panel = Panel(
        f"best rate: {rate_text}",
        "rate relative to the preset's",
        LABELS["accuracy"],
        against_rates,
        x_log=10,
    )
    return Figure([loss_panel, accuracy_panel, rate_panel], columns=3)
