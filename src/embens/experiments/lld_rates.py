"""Last-layer dropout over a grid of rates (fig:dropout_last).

Frozen normal masks on the inputs of the last layer, γ = M. Five ways to choose the rate η(M), and
the gradient scale γ(M) = M η(M) / η(1) that each of them amounts to. Ensembles with modulations at
all layers, at the preset's rate, are there to compare the gain with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch

from embens.embedding.families import batch_ensemble, last_layer_dropout
from embens.experiments.claims import Claim, Missing, Table, judge, select
from embens.experiments.figure import Curve, Figure, Panel
from embens.experiments.setting import Setting, data_set, reference
from embens.experiments.training import Row, evaluate, train

LABEL = "fig:dropout_last"
TITLE = "Last-layer dropout and the learning rate"
ABOUT = (
    "Frozen masks N(0, 1) on the inputs of the last layer, γ=M, with the rate η(M) chosen in five "
    "ways, on the mean over seeds; right, γ(M)/M = η(M)/η(1)."
)
BASIC = 0.01
EPOCH = 10  # of the early criterion
CHOICES = {
    "constant .01": "#1f77b4",
    "best test, M=1": "#2ca02c",
    "best test": "#d62728",
    "best train": "#17becf",
    "best loss at epoch 10": "#9467bd",
}


@dataclass(frozen=True)
class Cell:
    """One ensemble; ``family`` is ``"lld"``, or ``"all"`` for modulations at all layers."""

    setting: Setting
    family: str
    members: int
    lr: float
    seed: int


RATES = tuple(round(10 ** (k / 3), 6) for k in range(-9, 4))
MEMBERS = {
    "quick": (1, 2, 5, 10, 20, 49),
    "cpu": (1, 3, 10, 30),
    "paper": (1, 2, 5, 10, 20, 30, 49),
}
SEEDS = {"quick": 4, "cpu": 3, "paper": 3}


def cells(setting: Setting, *, seeds: int | None = None) -> list[Cell]:
    """Return the sweep over rates, members and seeds."""
    rates = RATES if setting.preset != "cpu" else RATES[1:-1:2]
    rates = sorted({*rates, BASIC, setting.lr})
    return [
        Cell(setting, family, members, rate, seed)
        for seed in range(seeds or SEEDS[setting.preset])
        for family, grid in (("lld", rates), ("all", [setting.lr]))
        for members in MEMBERS[setting.preset]
        for rate in grid
    ]


def measure(cell: Cell) -> Row:
    """Train one ensemble at one rate."""
    generator = torch.Generator().manual_seed(cell.seed)
    network = reference(cell.setting, generator=generator)
    make = last_layer_dropout if cell.family == "lld" else batch_ensemble
    ensemble = make(network, cell.members, generator=generator)
    data = data_set(cell.setting)
    training = train(ensemble, cell.setting, data, seed=cell.seed, lr=cell.lr)
    early = min(EPOCH, cell.setting.epochs)
    loss = training.trace[early - 1]["loss"] if len(training.trace) >= early else math.inf
    return {
        **evaluate(ensemble, data),
        "early_loss": min(loss, 1e9),
        "diverged": float(training.diverged),
    }


def _means(table: Table) -> Table:
    """Return means over seeds by members and rate, without rates at which a run diverged."""
    rows = select(table, family="lld")
    means = rows.groupby(["members", "lr"]).mean(numeric_only=True).reset_index()
    means = means[means["diverged"] == 0]
    if 1 not in set(means["members"]):
        raise Missing("cells with M=1 that do not diverge")
    return means


def choose(table: Table) -> dict[str, dict[int, tuple[float, float]]]:
    """Return, for each way to choose, the rate and the ensemble accuracy at each M."""
    means = _means(table)

    def at(rows: Table, rate: float) -> tuple[float, float] | None:
        found = rows[(rows["lr"] - rate).abs() < 1e-9]
        return (rate, float(found["accuracy"].iloc[0])) if len(found) else None

    def top(rows: Table, column: str, sign: int = 1) -> tuple[float, float]:
        # Ties (all members fit all data) go to the lower loss.
        order = (sign * rows[column] - 1e-9 * rows["train_loss"]).to_numpy().argmax()
        return float(rows["lr"].iloc[order]), float(rows["accuracy"].iloc[order])

    single = top(means[means["members"] == 1], "accuracy")[0]
    found: dict[str, dict[int, tuple[float, float]]] = {name: {} for name in CHOICES}
    for members, rows in means.groupby("members"):
        for name, point in zip(
            CHOICES,
            (
                at(rows, BASIC),
                at(rows, single),
                top(rows, "accuracy"),
                top(rows, "member_train_accuracy"),
                top(rows, "early_loss", -1),
            ),
            strict=True,
        ):
            if point is not None:
                found[name][int(members)] = point
    return found


def _correction(table: Table, name: str) -> float:
    """Return the largest |log(γ(M)/M)| over 1 < M < 50, in units of log 3."""
    points = choose(table)[name]
    some = [r for m, (r, _) in points.items() if 1 < m < 50]
    if not some or 1 not in points:
        raise Missing("M=1 and others below 50")
    return max(abs(math.log(rate / points[1][0])) for rate in some) / math.log(3)


def _gain(points: dict[int, float]) -> float:
    if 1 not in points or len(points) < 2:
        raise Missing("M=1 and another M")
    return max(points.values()) - points[1]


def _chosen(table: Table, name: str) -> dict[int, float]:
    return {m: accuracy for m, (_, accuracy) in choose(table)[name].items()}


def _all_layers(table: Table) -> dict[int, float]:
    means = select(table, family="all").groupby("members")["accuracy"].mean()
    return {int(m): float(a) for m, a in means.items()}


def _inverted_u(table: Table) -> float:
    points = _chosen(table, "best test")
    values = [points[m] for m in sorted(points)]
    return min(max(values) - values[0], max(values) - values[-1])


def _best_members(table: Table) -> float:
    points = _chosen(table, "best test")
    return max(sorted(points), key=lambda m: points[m])


def _difference(table: Table, one: str, other: str) -> float:
    first, second = _chosen(table, one), _chosen(table, other)
    common = sorted(set(first) & set(second))
    if not common:
        raise Missing(f"members with both {one} and {other}")
    return sum(first[m] - second[m] for m in common) / len(common)


def claims(table: Table) -> list[Claim]:
    """Return the paper's observations on this figure."""
    test = partial(judge, table)
    moderate = [
        test(
            partial(_correction, name=name),
            name=f"γ≈M ({name})",
            statement=f"|log(γ(M)/M)| < log 3 for M < 50, with {name}",
            paper="moderate corrections, |log(γ(M)/M)| < log 3",
            measure="largest |log(γ(M)/M)| / log 3",
            below=1.0,
        )
        for name in ("best test", "best train", "best loss at epoch 10")
    ]
    return [
        *moderate,
        test(
            _inverted_u,
            name="inverted U",
            statement="ensemble accuracy at the best rate rises with M and falls again",
            paper="an optimal number of models",
            measure="smaller of rise to the best M and fall to the largest",
            above=0.0,
        ),
        test(
            _best_members,
            name="best M",
            statement="the best number of members is near 10",
            paper="M≈10",
            measure="best M at the best rate",
            above=4.0,
            below=25.0,
        ),
        test(
            lambda t: _gain(_all_layers(t)) - _gain(_chosen(t, "best test")),
            name="smaller gain than all layers",
            statement="the gain is smaller than with modulations at all layers",
            paper="2 % against 5 %",
            measure="difference of gains over M=1",
            above=0.0,
        ),
        test(
            partial(_difference, one="best test", other="constant .01"),
            name="tuning helps",
            statement="a tuned rate is clearly (0.5 %) better than 0.01",
            paper="significant increase of accuracy",
            measure="difference of accuracies, mean over M",
            above=0.005,
        ),
        test(
            partial(_difference, one="best test", other="best test, M=1"),
            name="one rate for all",
            statement="the rate tuned for a single model is almost (to 1 %) as good as the best",
            paper="almost optimal performance",
            measure="difference of accuracies, mean over M",
            below=0.01,
        ),
    ]


def plot(table: Table) -> Figure:
    """Return the measures for each way to choose the rate, and the gradient scale."""
    chosen, means = choose(table), _means(table)

    def measured(column: str) -> list[Curve]:
        found = []
        for name, colour in CHOICES.items():
            points = []
            for members, (rate, _) in sorted(chosen[name].items()):
                rows = means[(means["members"] == members) & ((means["lr"] - rate).abs() < 1e-9)]
                points.append((members, float(rows[column].iloc[0])))
            x, y = zip(*points, strict=True) if points else ((), ())
            found.append(Curve(name, list(x), list(y), [], colour))
        return found

    panels = [
        Panel(title, "members M", label, measured(column), x_log=True)
        for title, label, column in (
            ("ensemble, test", "accuracy", "accuracy"),
            ("members, test", "mean accuracy", "member_accuracy"),
            ("members, train", "mean accuracy", "member_train_accuracy"),
        )
    ]
    points = sorted(_all_layers(table).items()) if "all" in set(table["family"]) else []
    if points:
        x, y = zip(*points, strict=True)
        panels[0].curves.append(Curve("all layers", list(x), list(y), [], "#7f7f7f", "dash"))
    scales = [
        Curve(
            name,
            sorted(points),
            [points[m][0] / points[1][0] for m in sorted(points)],
            [],
            CHOICES[name],
        )
        for name, points in chosen.items()
        if 1 in points
    ]
    panels.append(Panel("gradient scale", "members M", "γ(M)/M", scales, x_log=True, y_log=True))
    return Figure(TITLE, panels)
