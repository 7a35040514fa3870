"""All systems, on the same data with the same effort (ours: all systems).

Quality of every system against its cost relative to one network. The last fifth of the classes is
left out of training and serves as unknown inputs. Training costs include the choice of the learning
rate, which is made in the same way for every system (the column tuning). Bayesian deep ensembles
are not included, because they are made for squared errors of noisy targets.

Every system gets the same reference network, data and epochs, and the best of a few learning rates
by log loss on held-out samples. It is then trained on all samples. Test images are also disturbed
by noise, blur, and lower contrast.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embens import metrics
from reproduction.claims import Claim
from reproduction.contestants import (
    KINDS,
    NAMES,
    ONE,
    SEPARATE,
    WIDE,
    DivergenceError,
    build,
    predict_contestant,
    train_contestant,
)
from reproduction.datasets import DataSet
from reproduction.drawing import PALETTE, Curve, Figure, Panel
from reproduction.grid.cells import Cell, Row, sweep
from reproduction.grid.settings import count_parameters
from reproduction.problems import Problem, load_problem, timed
from reproduction.rows import Frame, Rows
from reproduction.training import disagreement, score

RATES = (1.0, 4.0, 16.0)
"""Learning rates that are tried, relative to the preset's."""
CHANGES = {"quick": {"train": 500}}  # all digits would be too easy
WIDTH = {"quick": 4.0, "cpu": 1.0, "paper": 1.0}
MEMBERS = {"quick": 4, "cpu": 4, "paper": 4}
COSTS = ("training", "inference", "parameters")
"""Columns of costs, relative to one network."""
DISTURBANCES = ("noise", "blur", "contrast")
STRENGTHS = (0.25, 0.5, 1.0)
TURNS = 5  # timed passes, of which the fastest counts

SWEEP = [sweep(system=NAMES, members=MEMBERS, width=WIDTH)]


def disturb(images: Tensor, kind: str, strength: float, generator: torch.Generator) -> Tensor:
    """Disturb standardised images.

    Args:
        images: Images ``(batch, channel, height, width)``.
        kind: ``"noise"``, ``"blur"`` or ``"contrast"``.
        strength: Strength from 0 to 1.
        generator: Random generator of the noise.

    Returns:
        The disturbed images.
    """
    if kind == "noise":
        noise = torch.randn(images.shape, generator=generator).to(images)
        return images + strength * noise
    if kind == "contrast":
        mean = images.mean((-2, -1), keepdim=True)
        return mean + (1 - 0.75 * strength) * (images - mean)
    sigma = 1.5 * strength
    points = torch.arange(-3.0, 4.0).to(images)
    line = torch.softmax(-(points**2) / (2 * sigma**2), 0)
    channels = images.shape[1]
    kernel = torch.outer(line, line).expand(channels, 1, 7, 7)
    padded = F.pad(images, (3, 3, 3, 3), mode="replicate")
    return F.conv2d(padded, kernel, groups=channels)


@dataclass(frozen=True)
class Trial:
    """A contestant after training at one learning rate.

    Attributes:
        contestant: The trained module; None if training diverged.
        seconds: Processor time of the training.
    """

    contestant: nn.Module | None
    seconds: float


def try_rate(cell: Cell, name: str, data: DataSet, factor: float) -> Trial:
    """Train a contestant at a multiple of the preset's learning rate."""
    lr = factor * cell.setting.lr

    def train_or_diverge() -> nn.Module | None:
        try:
            return train_contestant(cell, name, data, lr)
        except DivergenceError:
            return None

    contestant, seconds = timed(train_or_diverge)
    return Trial(contestant, seconds)


def held_out_loss(cell: Cell, data: DataSet, trial: Trial) -> float:
    """Return the validation log loss of a trial; infinite if it diverged."""
    if trial.contestant is None:
        return math.inf
    assert data.validation is not None
    outputs = predict_contestant(cell, cell["system"], trial.contestant, data.validation.inputs)
    return float(metrics.nll(outputs, data.validation.targets))


def measure(cell: Cell) -> Row:
    """Choose the rate of one system, train it, and score it; times are relative to one network."""
    name = cell["system"]
    problem = load_problem(cell.setting)
    data = problem.data
    generator = torch.Generator().manual_seed(cell.seed)
    held_out = with_validation(data, generator)
    trials = {factor: try_rate(cell, name, held_out, factor) for factor in RATES}
    losses = {factor: held_out_loss(cell, held_out, trials[factor]) for factor in RATES}
    factor = min(RATES, key=losses.__getitem__)
    trained = try_rate(cell, name, data, factor)
    single = try_rate(cell, ONE, data, factor)
    # A diverged contestant is scored with its initial weights.
    contestant = trained.contestant or build_initial(cell, name)
    network = single.contestant or build_initial(cell, ONE)
    return {
        **scores(cell, contestant, problem, generator),
        "parameters": count_parameters(contestant) / count_parameters(network),
        "training": trained.seconds / single.seconds,
        "tuning": sum(trial.seconds for trial in trials.values()) / single.seconds,
        "inference": inference_ratio(cell, contestant, network, data.test.inputs),
        "rate": factor * cell.setting.lr,
        "diverged": float(trained.contestant is None),
    }


def with_validation(data: DataSet, generator: torch.Generator) -> DataSet:
    """Return data with a validation part: the preset's, or a fifth of the training samples."""
    if data.validation is not None:
        return data
    return data.split(len(data.train.targets) // 5, generator=generator)


def build_initial(cell: Cell, name: str) -> nn.Module:
    """Return an untrained contestant; procedures start from one network."""
    if name in KINDS["procedures"]:
        return build(cell, ONE)
    return build(cell, name)


def scores(cell: Cell, contestant: nn.Module, problem: Problem, generator: torch.Generator) -> Row:
    """Return the scores of a contestant on known, unknown and disturbed test images."""
    predict = partial(predict_contestant, cell, cell["system"], contestant)
    inputs, target = problem.data.test
    outputs = predict(inputs)
    all_outputs = torch.cat([outputs, predict(problem.unknown)], 1)
    is_unknown = torch.arange(all_outputs.shape[1]) >= len(target)
    auroc = metrics.ood_auroc(all_outputs, is_unknown, score=metrics.predictive_entropy)
    disturbed_losses = []
    for kind in DISTURBANCES:
        for strength in STRENGTHS:
            disturbed = disturb(inputs, kind, strength, generator)
            disturbed_losses.append(float(metrics.nll(predict(disturbed), target)))
    return {
        **score(outputs, target),
        "calibration": float(metrics.expected_calibration_error(outputs, target)),
        "disagreement": disagreement(outputs),
        "auroc": float(auroc),
        "shifted_nll": sum(disturbed_losses) / len(disturbed_losses),
    }


def inference_ratio(cell: Cell, contestant: nn.Module, network: nn.Module, inputs: Tensor) -> float:
    """Return the time of a contestant's pass relative to one network, from the fastest passes."""
    predict = partial(predict_contestant, cell, cell["system"], contestant, inputs)
    predict_single = partial(predict_contestant, cell, ONE, network, inputs)
    fastest = min(timed(predict)[1] for _ in range(TURNS))
    fastest_single = min(timed(predict_single)[1] for _ in range(TURNS))
    return fastest / fastest_single


def difference_to(rows: Rows, column: str, other: str) -> float:
    """Return a column of the BatchEnsemble minus that of another system."""
    batch_ensemble = rows.where(system="BatchEnsemble p=0")
    return batch_ensemble.mean(column) - rows.where(system=other).mean(column)


LOG_LOSSES = "difference of log losses, each at its best rate"
CLAIMS = [
    Claim(
        statement="a BatchEnsemble in the independent regime beats its reference network",
        measure=LOG_LOSSES,
        statistic=partial(difference_to, column="nll", other=ONE),
        below=0.0,
        paper="embedded ensembles improve on a single model",
    ),
    Claim(
        statement="it also beats one network with as many parameters as separate networks have",
        measure=LOG_LOSSES,
        statistic=partial(difference_to, column="nll", other=WIDE),
        below=0.0,
    ),
    Claim(
        statement="it is as good as separate networks, to 0.01 nats",
        measure=LOG_LOSSES,
        statistic=partial(difference_to, column="nll", other=SEPARATE),
        below=0.01,
        paper="it behaves as independent models do",
    ),
    Claim(
        statement="it detects unknown classes better than one network does",
        measure="difference of areas under the ROC curve",
        statistic=partial(difference_to, column="auroc", other=ONE),
        above=0.0,
    ),
    Claim(
        statement="it has a lower log loss on disturbed images than one network",
        measure="difference of log losses, mean over kinds and strengths",
        statistic=partial(difference_to, column="shifted_nll", other=ONE),
        below=0.0,
    ),
]


def plot(table: Frame) -> Figure:
    """Return quality against costs, with the Pareto fronts."""
    table = table.assign(training=table["training"] + table["tuning"])
    groups = table.groupby("system")
    means, errors = groups.mean(numeric_only=True), groups.sem(numeric_only=True)
    all_panels = []
    for column, images in (("nll", ""), ("shifted_nll", ", disturbed images")):
        for cost in COSTS:
            points = []
            for (kind, names), colour in zip(KINDS.items(), PALETTE, strict=False):
                shown = [name for name in names if name in means.index]
                curve = Curve(
                    kind,
                    list(means[cost][shown]),
                    list(means[column][shown]),
                    list(errors[column][shown]),
                    colour,
                    style="points",
                    names=shown,
                )
                points.append(curve)
            panel = Panel(
                f"loss{images} against {cost}, lowest: {means[column].idxmin()}",
                f"{cost}, relative to one network",
                f"log loss{images}",
                [*points, pareto_front(points)],
                y_log=10,
            )
            all_panels.append(panel)
    return Figure(all_panels, columns=3)


def pareto_front(curves: list[Curve]) -> Curve:
    """Return the points that no other point beats in both cost and loss."""
    points = []
    for curve in curves:
        points += zip(curve.x, curve.y, curve.names, strict=True)
    front = []
    for point in sorted(points):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return Curve(
        "Pareto front",
        [cost for cost, _, _ in front],
        [loss for _, loss, _ in front],
        colour="#333333",
        style="dash",
        names=[name for _, _, name in front],
    )
