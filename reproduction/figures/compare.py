"""One network, separate networks and members at equal compute (ours: compare).

The compute of training is 1, 2, 4 or 8 times that of one network. One network spends it on more
epochs or more width, separate networks on their number, two or four networks on epochs, and members
on their number and on epochs. The learning rate of each family was chosen once by validation log
loss. The last fifth of the classes is left out of training and serves as unknown inputs.
Temperatures are chosen on validation samples.

With ``batch="same"`` a pass of M members costs M networks, so that they are trained for 1/M of the
epochs. With ``batch="split"`` every sample goes to one member, and a pass costs one network.
Members of last-layer dropout share all layers but the last. The networks have batch norm, except
for digits; everything else is as in the preset. ``python -m reproduction compare-rates`` chooses
the learning rates.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from embens import EmbeddedEnsemble, embed, independent, last_layer_dropout, laws, low_rank, metrics
from embens.uncertainty import best_temperature
from reproduction.baselines import with_validation
from reproduction.claims import Claim
from reproduction.competitors import (
    FOUR_NETWORKS,
    LAST_LAYER,
    LOW_RANK,
    NORMAL,
    ONE,
    SEPARATE,
    SIGNS,
    SPLIT,
    SYSTEMS,
    TWO_NETWORKS,
    WIDE,
    colours_of_systems,
)
from reproduction.drawing import Curve, Figure, Mark, curves, panels, state
from reproduction.grid.cells import Cell, Row, sweep, training_cost
from reproduction.grid.settings import build_reference, count_parameters, recorded_rates
from reproduction.problems import Problem, load_problem, timed
from reproduction.rows import Frame, MissingCellsError, Rows, fit_slope
from reproduction.summary import draw_summary
from reproduction.training import Training, outputs_of, score, train

ALWAYS = [name for name in SYSTEMS if name not in (WIDE, SEPARATE)]
BUDGETS = {"quick": (1, 2, 4), "cpu": (1, 2, 4, 8), "paper": (1, 2, 4, 8)}
# With the compute of one network, a wider network and separate networks are one network.
LARGER_BUDGETS = {preset: budgets[1:] for preset, budgets in BUDGETS.items()}
LARGEST_BUDGETS = {preset: budgets[2:] for preset, budgets in BUDGETS.items()}
CHANGES = {
    "quick": {"train": 500, "epochs": 10, "lr": 0.048},
    "cpu": {
        "network": "norm-cnn",
        "channels": (32, 64, 128, 256),
        "epochs": 15,
        "rates": recorded_rates("compare", "cpu"),
    },
    "gpu": {"network": "norm-cnn", "rates": recorded_rates("compare", "gpu")},
    "paper": {"network": "norm-cnn", "rates": recorded_rates("compare", "paper")},
}
TURNS = 3  # timed passes, of which the fastest counts
TIMED = 1000  # images of a timed pass

POOLED = True
SWEEP = [
    sweep(system=ALWAYS, budget=BUDGETS),
    sweep(system=[WIDE, SEPARATE], budget=LARGER_BUDGETS),
    sweep("few-networks", system=TWO_NETWORKS, budget=LARGER_BUDGETS),
    sweep("few-networks", system=FOUR_NETWORKS, budget=LARGEST_BUDGETS),
]


def members_of(cell: Cell) -> int:
    """Return the number of members of a cell's system."""
    return SYSTEMS[cell["system"]].members or cell["budget"]


def epochs_of(cell: Cell) -> int:
    """Return the number of epochs that the budget of a cell pays for."""
    epochs = cell.setting.epochs
    if cell["system"] in (WIDE, SEPARATE):
        return epochs
    passes = members_of(cell)
    if SYSTEMS[cell["system"]].shares_pass:
        passes = 1
    return max(1, round(epochs * cell["budget"] / passes))


def estimate_cost(cell: Cell) -> float:
    """Return the rough cost of a cell, which is proportional to its budget."""
    return training_cost(cell.with_values(members=cell["budget"]))


def build(cell: Cell, images: Tensor) -> EmbeddedEnsemble:
    """Return the untrained ensemble of a cell; one network is an ensemble of one member."""
    generator = torch.Generator().manual_seed(cell.seed)
    width = 1.0
    if cell["system"] == WIDE:
        width = affordable_width(cell, images)
    network = reference_of(cell, width, generator)
    name, members = cell["system"], members_of(cell)
    if name in (ONE, WIDE, SEPARATE):
        return independent(network, members, generator=generator)
    if name == LOW_RANK:
        return low_rank(network, members, generator=generator)
    if name == LAST_LAYER:
        return last_layer_dropout(network, members, generator=generator)
    law = laws.Normal() if name == NORMAL else laws.Rademacher()
    return embed(network, members, pre=law, post=law, generator=generator)


def reference_of(cell: Cell, width: float, generator: torch.Generator | None = None) -> nn.Module:
    """Return the reference network for images."""
    network = build_reference(cell.setting, width, generator=generator)
    if cell.setting.network == "mlp":
        network = nn.Sequential(nn.Flatten(), network)
    return network


def affordable_width(cell: Cell, images: Tensor) -> float:
    """Return the relative width at which a pass costs the budget of a cell."""
    available = cell["budget"] * operations(reference_of(cell, 1.0), images)
    width = 1.0
    # The cost grows with a power of the width between 1 and 2.
    for _ in range(8):
        width *= math.sqrt(available / operations(reference_of(cell, width), images))
    return width


def operations(network: nn.Module, images: Tensor) -> int:
    """Return the floating-point operations of one image."""
    network.eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(images[:1])
    return counter.get_total_flops()


def measure(cell: Cell) -> Row:
    """Train one system and score it."""
    problem = load_problem(cell.setting)
    problem = replace(problem, data=with_validation(problem.data, cell.seed))
    rate = cell.setting.rate_of(cell["system"])
    training, seconds = timed(partial(train_system, cell, problem, rate))
    return {
        **scores(training, problem),
        "lr": rate,
        "members": members_of(cell),
        "epochs": epochs_of(cell),
        "parameters": count_parameters(training.ensemble),
        "training_seconds": seconds,
        "inference_seconds": inference_seconds(training.ensemble, problem.data.test.inputs),
        "diverged": float(training.diverged),
    }


def train_system(cell: Cell, problem: Problem, rate: float) -> Training:
    """Train the system of a cell at one learning rate."""
    ensemble = build(cell, problem.data.train.inputs)
    setting = replace(cell.setting, epochs=epochs_of(cell))
    return train(
        replace(cell, setting=setting),
        ensemble,
        data=problem.data,
        lr=rate,
        gamma=ensemble.natural_gamma,
        split=SYSTEMS[cell["system"]].split,
    )


def validation_loss(training: Training) -> float:
    """Return the validation log loss; infinite after divergence."""
    if training.diverged:
        return math.inf
    part = training.data.validation
    assert part is not None
    return float(metrics.nll(outputs_of(training.ensemble, part.inputs), part.targets))


def scores(training: Training, problem: Problem) -> Row:
    """Return scores on test images, with and without temperature scaling."""
    ensemble = training.ensemble
    part = training.data.validation
    assert part is not None
    held_out = outputs_of(ensemble, part.inputs)
    temperature = best_temperature(held_out, part.targets)
    inputs, target = problem.data.test
    outputs = outputs_of(ensemble, inputs)
    scaled = outputs / temperature
    all_outputs = torch.cat([outputs, outputs_of(ensemble, problem.unknown)], 1)
    is_unknown = torch.arange(all_outputs.shape[1], device=outputs.device) >= len(target)
    auroc = metrics.ood_auroc(all_outputs, is_unknown, score=metrics.predictive_entropy)
    return {
        **score(outputs, target),
        "scaled_nll": float(metrics.nll(scaled, target)),
        "calibration": float(metrics.expected_calibration_error(outputs, target)),
        "scaled_calibration": float(metrics.expected_calibration_error(scaled, target)),
        "auroc": float(auroc),
        "temperature": temperature,
        "guessing": math.log(len(problem.data.train.targets.unique())),
    }


def inference_seconds(ensemble: EmbeddedEnsemble, inputs: Tensor) -> float:
    """Return the processor time of the fastest of some passes, for at most 1,000 test images."""
    images = inputs[:TIMED]
    return min(timed(partial(outputs_of, ensemble, images))[1] for _ in range(TURNS))


def differences(rows: Rows, column: str, system: str, other: str) -> dict[int, float]:
    """Return the mean of a column, a system minus another, by the budgets that both have."""
    budgets = set(rows.where(system=system)["budget"]) & set(rows.where(system=other)["budget"])
    by_budget = {}
    for budget in sorted(budgets):
        equal = rows.where(budget=budget)
        means = [equal.where(system=name).mean(column) for name in (system, other)]
        by_budget[budget] = means[0] - means[1]
    return by_budget


def advantage(rows: Rows, column: str, system: str, other: str) -> float:
    """Return the mean difference of a column over the common budgets ≥ 2."""
    by_budget = differences(rows.between("budget", low=2), column, system, other)
    if not by_budget:
        raise MissingCellsError(f"a budget of both {system} and {other}")
    return statistics.fmean(by_budget.values())


def gain_of_longer_training(rows: Rows) -> float:
    """Return the scaled log loss of two networks minus that of more, over budgets ≥ 4."""
    return advantage(rows.between("budget", low=4), "scaled_nll", TWO_NETWORKS, SEPARATE)


def too_many_members(rows: Rows) -> float:
    """Return the log loss of M=8 minus that of M=2 with the smallest budget."""
    smallest = rows.first("budget")
    return smallest.where(system=SIGNS[2]).mean("nll") - smallest.where(system=SIGNS[0]).mean("nll")


def trend_of_advantage(rows: Rows) -> float:
    """Return the change per doubling of compute of the scaled log loss, two members minus one."""
    by_budget = differences(rows, "scaled_nll", TWO, ONE)
    return fit_slope([math.log2(budget) for budget in by_budget], list(by_budget.values()))


OVER_BUDGETS = "difference at equal compute, mean over budgets ≥ 2"
TWO = SIGNS[0]
CLAIMS = [
    Claim(
        statement="two members have a lower log loss than one network trained as long",
        measure=f"log loss: {OVER_BUDGETS}",
        statistic=partial(advantage, column="nll", system=TWO, other=ONE),
        below=0.0,
    ),
    Claim(
        statement="they also have a lower log loss after temperature scaling",
        measure=f"log loss after scaling: {OVER_BUDGETS}",
        statistic=partial(advantage, column="scaled_nll", system=TWO, other=ONE),
        below=0.0,
    ),
    Claim(
        statement="they are better calibrated without held-out samples",
        measure=f"calibration error: {OVER_BUDGETS}",
        statistic=partial(advantage, column="calibration", system=TWO, other=ONE),
        below=0.0,
    ),
    Claim(
        statement="they are as accurate as one network trained as long (to 0.5 %)",
        measure=f"accuracy: {OVER_BUDGETS}",
        statistic=partial(advantage, column="accuracy", system=TWO, other=ONE),
        above=-0.005,
    ),
    Claim(
        statement="four members are as good as separate networks, to 0.01 nats after scaling",
        measure=f"log loss after scaling: {OVER_BUDGETS}",
        statistic=partial(advantage, column="scaled_nll", system=SIGNS[1], other=SEPARATE),
        below=0.01,
        paper="as if trained independently",
    ),
    Claim(
        statement="two members are as good as two networks, to 0.01 nats after scaling",
        measure=f"log loss after scaling: {OVER_BUDGETS}",
        statistic=partial(advantage, column="scaled_nll", system=TWO, other=TWO_NETWORKS),
        below=0.01,
        paper="as if trained independently",
    ),
    Claim(
        statement="two networks trained longer are better than more networks",
        measure="log loss after scaling: difference at equal compute, mean over budgets ≥ 4",
        statistic=gain_of_longer_training,
        below=0.0,
    ),
    Claim(
        statement="four members drawn from signs have a lower log loss than from N(0, 1)",
        measure=f"log loss: {OVER_BUDGETS}",
        statistic=partial(advantage, column="nll", system=SIGNS[1], other=NORMAL),
        below=0.0,
    ),
    Claim(
        statement="two members are better than one wider network",
        measure=f"log loss after scaling: {OVER_BUDGETS}",
        statistic=partial(advantage, column="scaled_nll", system=TWO, other=WIDE),
        below=0.0,
    ),
    Claim(
        statement="two members detect unknown classes better than one network trained as long",
        measure=f"area under the ROC curve: {OVER_BUDGETS}",
        statistic=partial(advantage, column="auroc", system=TWO, other=ONE),
        above=0.0,
    ),
    Claim(
        statement="two members gain on one network as the compute grows",
        measure="difference of log losses after scaling, change per doubling of compute",
        statistic=trend_of_advantage,
        below=0.0,
    ),
    Claim(
        statement="eight members are too many for the compute of one network",
        measure="log loss, M=8 minus M=2, at the smallest budget",
        statistic=too_many_members,
        above=0.0,
    ),
]


def best_text(rows: Rows, column: str, text: str, choose: Callable[..., str]) -> str:
    """Return a title with the best system of a column at the largest budget of all references."""
    budgets = rows.where(system=SEPARATE)["budget"].unique()
    largest = rows.where(budget=list(budgets)).last("budget")
    means = largest.frame.groupby("system")[column].mean().to_dict()
    best = choose(means, key=means.__getitem__)
    budget = int(largest["budget"].iloc[0])
    return f"{text}, best at {budget} ×: {best}"


def plot(table: Frame) -> Figure:
    """Return quality against the budget; times of several sessions cannot be compared."""
    colours = colours_of_systems()

    def draw(y: str) -> list[Curve]:
        rows = table[~table["system"].isin(SPLIT)]
        split = table[table["system"].isin(SPLIT)]
        by_system = partial(curves, x="budget", y=y, by="system", colours=colours)
        return [*by_system(rows), *by_system(split, style="dash")]

    better = {"accuracy": max, "member_accuracy": max, "auroc": max}
    texts = {
        "accuracy": "accuracy",
        "nll": "log loss",
        "scaled_nll": "log loss after scaling",
        "calibration": "calibration error",
        "auroc": "unknown classes",
        "member_accuracy": "member accuracy",
    }
    titles = {}
    for column, text in texts.items():
        choose = better.get(column, min)
        titles[column] = state(partial(best_text, Rows(table), column, text, choose), text)
    marks = {"nll": [Mark("guessing", y=float(table["guessing"].mean()))]}
    all_panels = panels(draw, titles, "compute of training, in networks", marks=marks)
    return Figure(all_panels, columns=3)


summary = draw_summary
