"""All systems, on the same data at the same effort (ours: all systems).

Quality of every system against its cost relative to one network. Left out of training: the last
fifth of the classes, which are the unknown inputs. Training costs include the choice of the rate,
which is made for every system alike (the column tuning). Not here: bayesian, whose networks are for
squared errors of noisy targets, in the NTK parametrization.

Every system gets the same reference network, data and epochs, and a rate of its own: the best of
the same few by log loss on held-out rows, with which it is then trained on all rows. Test images
are also disturbed: by noise, blur, and less contrast.
"""

import functools
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embens import laws, metrics
from reproduction.datasets import DataSet, Part
from embens.embedding import families
from embens.ensemble import EmbeddedEnsemble
from reproduction.grid import cells as contract
from reproduction.claims import Claim, Frame, Rows
from reproduction.grid.cells import Cell, Row, Training, batch_ensemble, run, score, train
from reproduction.drawing import PALETTE, Curve, Figure, Panel
from reproduction.grid.settings import Setting, count_parameters, data_set, reference
from embens.training.snapshots import snapshots
from embens.training.trainer import Divergence

ONE, WIDE, SEPARATE = "one network", "one wide network", "separate networks"
FRESH = "MC dropout, fresh"
PATHS = {"snapshots": "cosine", "fast geometric": "triangular", "SWAG": "swag"}
"""Systems that are one run of one network; the last two begin with half the epochs as usual."""
RATES = (1.0, 4.0, 16.0)  # times the preset's
QUICK = {"train": 500}  # all digits would be too easy
WIDTH = {"quick": 4.0, "cpu": 1.0, "paper": 1.0}
MEMBERS = {"quick": 4, "cpu": 4, "paper": 4}
COSTS = ("training", "inference", "parameters")  # in those of one network
STRENGTHS = (0.25, 0.5, 1.0)
TURNS = 5  # the fastest pass counts


def systems(members: int = 4) -> dict[str, dict[str, Callable[..., EmbeddedEnsemble]]]:
    """Return how systems are made, by what they are, which is their colour in the picture."""
    signs, repel = laws.Signs(0.0), laws.Correlated(-0.5 / max(1, members - 1))
    embed, masks = families.embed, partial(families.embed, pre=None, trainable=False)
    return {
        "references": dict.fromkeys((ONE, WIDE, SEPARATE), families.independent),
        "BatchEnsembles": {
            "BatchEnsemble p=0": batch_ensemble,
            "BatchEnsemble p=0.5": partial(batch_ensemble, p=0.5),
            "BatchEnsemble ±1": partial(embed, pre=signs, post=signs),
            "repelling u": partial(embed, pre=signs, post=repel),
        },
        "masks": {
            "last-layer dropout": families.last_layer_dropout,
            "MC dropout, fixed": families.mc_dropout,
            FRESH: partial(families.mc_dropout, fresh=True),
            "Masksembles": families.masksembles,
            "disjoint masks": partial(masks, post=laws.Disjoint()),
        },
        "heads": {
            "own last layers": partial(embed, pre=None, post=None, own="last"),
            "MIMO": families.mimo,
            "MixMo": partial(families.mimo, mix="linear"),
        },
        "stochastic and low rank": {
            "rank-1": families.rank1,
            "low rank, multiplied": families.low_rank,
            "low rank, added": partial(families.low_rank, kind="additive"),
        },
        "procedures": dict.fromkeys(PATHS, families.independent),
    }


SYSTEMS = [system for kind in systems().values() for system in kind]

SWEEP = [contract.sweep(system=SYSTEMS, members=MEMBERS, width=WIDTH)]


def make(cell: Cell) -> EmbeddedEnsemble:
    """Return an untrained ensemble of a system; one network is an ensemble of one."""
    network, generator = cell.draw()
    if cell.system == WIDE:
        network = _widened(cell, cell.members * count_parameters(network), generator)
    if cell.setting.network == "mlp":
        network = nn.Sequential(nn.Flatten(), network)
    known = {name: make for kind in systems(cell.members).values() for name, make in kind.items()}
    members = 1 if cell.system in (ONE, WIDE, FRESH) else cell.members
    return known[cell.system](network, members, generator=generator)


def _widened(cell: Cell, parameters: int, generator: torch.Generator) -> nn.Module:
    """Return a reference network with about so many parameters."""
    width = cell.width
    network = reference(cell.setting, width, generator=generator)
    for _ in range(6):  # parameters grow with a power of width between 1 and 2
        width *= math.sqrt(parameters / count_parameters(network))
        network = reference(cell.setting, width, generator=generator)
    return network


@functools.lru_cache(maxsize=2)
def problem(setting: Setting) -> tuple[DataSet, Tensor]:
    """Return the data without the classes that are left out, and test images of those."""
    found = data_set(replace(setting, network="cnn"))
    first_out = found.classes - max(1, found.classes // 5)

    def known(part: Part) -> Part:
        return part.take((part.targets < first_out).nonzero().squeeze(1))

    unknown = found.test.inputs[found.test.targets >= first_out]
    return replace(found, train=known(found.train), test=known(found.test)), unknown


def disturb(images: Tensor, kind: str, strength: float, generator: torch.Generator) -> Tensor:
    """Return standardised images with noise, blur or less contrast; strengths are from 0 to 1."""
    if kind == "noise":
        return images + strength * torch.randn(images.shape, generator=generator).to(images)
    if kind == "contrast":
        mean = images.mean((-2, -1), keepdim=True)
        return mean + (1 - 0.75 * strength) * (images - mean)
    sigma = 1.5 * strength
    points = torch.arange(-3.0, 4.0).to(images)
    line = torch.softmax(-(points**2) / (2 * sigma**2), 0)
    channels = images.shape[1]
    kernel = torch.outer(line, line).expand(channels, 1, 7, 7)
    return F.conv2d(F.pad(images, (3, 3, 3, 3), mode="replicate"), kernel, groups=channels)


def measure(cell: Cell) -> Row:
    """Choose the rate of one system, train it, and judge it; times are in those of one network."""
    data, unknown = problem(cell.setting)
    generator = torch.Generator().manual_seed(cell.seed)
    held = data.split(len(data.train.targets) // 5, generator=generator)
    tried = {rate: _timed(partial(fit_system, cell, held, rate)) for rate in RATES}
    best = min(RATES, key=lambda rate: _held_out_loss(cell, held, tried[rate][0]))
    trained, seconds = _timed(partial(fit_system, cell, data, best))
    single = cell.but(system=ONE)
    one, alone = _timed(partial(fit_system, single, data, best))
    inputs, target = data.test
    outputs = predict_system(trained, inputs, cell)
    passing, passing_alone = (
        min(_timed(partial(predict_system, each, inputs, of))[1] for _ in range(TURNS))
        for each, of in ((trained, cell), (one, single))
    )
    everything = torch.cat([outputs, predict_system(trained, unknown, cell)], 1)
    is_unknown = torch.arange(everything.shape[1]) >= len(target)
    shifted = [
        predict_system(trained, disturb(inputs, kind, strength, generator), cell)
        for kind in ("noise", "blur", "contrast")
        for strength in STRENGTHS
    ]
    return {
        **score(outputs, target),
        "calibration": float(metrics.expected_calibration_error(outputs, target)),
        "disagreement": float(metrics.disagreement(outputs)) if len(outputs) > 1 else 0.0,
        "auroc": float(metrics.ood_auroc(everything, is_unknown, score=metrics.predictive_entropy)),
        "shifted_nll": sum(float(metrics.nll(o, target)) for o in shifted) / len(shifted),
        "parameters": count_parameters(trained.ensemble) / count_parameters(one.ensemble),
        "training": seconds / alone,
        "tuning": sum(taken for _, taken in tried.values()) / alone,
        "inference": passing / passing_alone,
        "rate": best * cell.setting.lr,
        "diverged": float(trained.diverged),
    }


def _held_out_loss(cell: Cell, held: DataSet, tried: Training) -> float:
    assert held.validation is not None
    outputs = predict_system(tried, held.validation.inputs, cell)
    return math.inf if tried.diverged else float(metrics.nll(outputs, held.validation.targets))


def fit_system(cell: Cell, data: DataSet, rate: float) -> Training:
    """Train a system on the train part; some are one network and what it was on its way."""
    lr, schedule = rate * cell.setting.lr, PATHS.get(cell.system)
    begun = make(cell.but(system=ONE) if schedule else cell)
    if schedule is None:
        return train(cell, begun, data=data, lr=lr, gamma=begun.natural_gamma)
    setting = cell.setting
    if schedule != "cosine":
        setting = replace(setting, epochs=max(1, setting.epochs // 2))
        trained = train(replace(cell, setting=setting), begun, data=data, lr=lr)
        if trained.diverged:
            return trained
    try:
        ensemble = snapshots(
            *(begun.member(0), tuple(data.train), cell.members),
            epochs=max(cell.members, setting.epochs),
            schedule=schedule,
            batch_size=setting.batch_size,
            lr=lr,
            weight_decay=setting.weight_decay,
            seed=cell.seed,
            progress=False,
        )
    except Divergence:
        return Training(begun, data, diverged=True, trace=[])
    return Training(ensemble, data, diverged=False, trace=[])


def predict_system(trained: Training, inputs: Tensor, cell: Cell) -> Tensor:
    """Return the outputs of all members; of as many draws, where masks are fresh."""
    fresh = cell.members if cell.system.endswith("fresh") else None
    with torch.random.fork_rng():
        torch.manual_seed(cell.seed)
        return run(trained.ensemble, inputs, draws=fresh)


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return a result and the processor time that it took, which other work disturbs least."""
    started, on_the_wall = time.process_time(), time.perf_counter()
    result = work()
    # Where the processor's clock has not moved, that on the wall has.
    return result, time.process_time() - started or time.perf_counter() - on_the_wall


def _less(rows: Rows, column: str, other: str) -> float:
    """Difference of log losses, each at its best rate."""
    mine = rows.where(system="BatchEnsemble p=0")
    return mine.mean(column) - rows.where(system=other).mean(column)


CLAIMS = [
    Claim(partial(_less, column="nll", other=ONE), below=0.0).says(
        "a BatchEnsemble in the independent regime beats the network it is made of",
        "embedded ensembles improve on a single model",
    ),
    Claim(partial(_less, column="nll", other=WIDE), below=0.0).says(
        "it also beats one network with as many parameters as separate networks have"
    ),
    Claim(partial(_less, column="nll", other=SEPARATE), below=0.01).says(
        "it is as good as separate networks, to 0.01 nats", "it behaves as independent models do"
    ),
    Claim(partial(_less, column="auroc", other=ONE), above=0.0).says(
        "it tells classes that it never saw better than one network does",
        measure="difference of areas under the ROC curve",
    ),
    Claim(partial(_less, column="shifted_nll", other=ONE), below=0.0).says(
        "it loses less on disturbed images than one network does",
        measure="difference of log losses, mean over kinds and strengths",
    ),
]


def plot(table: Frame) -> Figure:
    """Return quality against the cost of training and of inference, with the Pareto fronts."""
    table = table.assign(training=table["training"] + table["tuning"])
    groups = table.groupby("system")
    means, errors = groups.mean(numeric_only=True), groups.sem(numeric_only=True)
    panels = []
    for column, images in (("nll", ""), ("shifted_nll", ", disturbed images")):
        for cost in COSTS:
            points = []
            for (kind, members), colour in zip(systems().items(), PALETTE, strict=False):
                shown = [system for system in members if system in means.index]
                x, y, error = means[cost][shown], means[column][shown], errors[column][shown]
                values = (list(x), list(y), list(error))
                points.append(Curve(kind, *values, colour, style="points", names=shown))
            title, label = f"best for its {cost}{images}", f"log loss{images}"
            drawn = [*points, front(points)]
            panels.append(Panel(title, f"{cost}, times one network", label, drawn, y_log=10))
    return Figure(panels, columns=3)


def front(points: list[Curve]) -> Curve:
    """Return the systems that no other beats in both cost and loss."""
    kept, each = [], [zip(c.x, c.y, c.names, strict=True) for c in points]
    for point in sorted(itertools.chain(*each)):
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    x, y, names = map(list, zip(*kept, strict=True))
    return Curve("Pareto front", x, y, colour="#333333", style="dash", names=names)
