r"""Coupling and feature learning (ours: feature learning).

Modulations N(p, 1−p²), four members, outputs α(f−f₀) with a scale α that makes training lazy
(large) or rich (small), measured at the same train losses. The collective part is the correlation
above that of separate networks, as a part of what is left to 1.

The larger the scale α, the less weights have to move to fit the data. The coupling of members at
initialisation depends on p and the width, and not on α. A run is measured whenever the members'
train loss has fallen to one of a few values. With the correlation :math:`\rho_s` of separate
networks, trained alike, the collective part is :math:`c = (\rho - \rho_s) / (1 - \rho_s)`.
"""

import functools
import math
import statistics
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embens import laws, metrics
from embens.embedding.families import embed, independent
from embens.ensemble import EmbeddedEnsemble
from reproduction.claims import Claim, Frame, Missing, Rows
from reproduction.grid.cells import Cell, Row, run, score, sweep
from reproduction.drawing import Figure, Panel, curves, shades
from reproduction.grid.settings import data_set
from embens.finite import ntk

SHIFTS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98)
WIDTHS = {"quick": (2.0, 4.0, 8.0), "cpu": (0.5, 1.0, 2.0), "paper": (0.25, 0.5, 1.0)}
SCALES = (0.5, 2.0, 8.0)
LOSSES = (0.5, 0.1)
KEYS = ["width", "scale", "loss"]
QUICK = {"train": 500}  # all digits would leave too few errors to correlate
PATIENCE = 7  # times the preset's epochs are the most

SWEEP = [
    sweep(family="embedded", p=SHIFTS, width=WIDTHS, scale=SCALES, members=4),
    sweep(family="separate", p=0.0, width=WIDTHS, scale=SCALES, members=4),  # p means nothing
]


def measure(cell: Cell) -> list[Row]:
    """Train one ensemble; return a row for each loss that it reaches, or one for its end."""
    setting, data = cell.setting, data_set(cell.setting)
    network, generator = cell.draw()
    law = laws.Shifted(cell.p)
    family = partial(embed, pre=law, post=law) if cell.family == "embedded" else independent
    ensemble = family(network, cell.members, generator=generator)
    (inputs, target), unseen = data.train, data.test.inputs
    first, first_unseen = run(ensemble, inputs), run(ensemble, unseen)
    features, coupling = features_of(ensemble, unseen), measured_coupling(ensemble, inputs[:12])
    rate = setting.lr / cell.scale * WIDTHS[setting.preset][0] / cell.width
    groups = ensemble.parameter_groups(lr=rate, weight_decay=0.0, gamma=ensemble.natural_gamma)
    optimizer = torch.optim.SGD(groups, momentum=0.9)

    def look(loss: float, epoch: int) -> Row:
        outputs = cell.scale * (run(ensemble, unseen) - first_unseen)
        return {
            **score(outputs, data.test.targets),
            "disagreement": float(metrics.disagreement(outputs)),
            "train_loss": loss,
            "epochs": epoch,
            "coupling": coupling,
            "change": 1 - alignment(features, features_of(ensemble, unseen)),
        }

    rows: list[Row] = []
    loss, last = math.nan, PATIENCE * setting.epochs
    for epoch in range(1, last + 1):
        for some in torch.randperm(len(target), generator=generator).split(setting.batch_size):
            optimizer.zero_grad()
            outputs = cell.scale * (ensemble(inputs[some]) - first[:, some])
            ensemble.objective(outputs, target[some]).backward()
            optimizer.step()
        outputs = cell.scale * (run(ensemble, inputs) - first)
        loss = float(metrics.member_nll(outputs, target).mean())
        reached = [level for level in LOSSES[len(rows) :] if loss <= level]
        rows += [{"loss": level, **look(loss, epoch)} for level in reached]
        if len(rows) == len(LOSSES):
            break
    return rows or [{"loss": math.nan, **look(loss, last)}]


@torch.no_grad()
def features_of(ensemble: EmbeddedEnsemble, inputs: Tensor) -> Tensor:
    """Return what the last layers of members get, ``(member, batch, unit)``, for 500 inputs."""
    networks = (ensemble.member(a) for a in range(ensemble.members))
    bodies = (nn.Sequential(*list(network.children())[:-1]) for network in networks)
    return torch.stack([body(inputs[:500]).flatten(1) for body in bodies])


def alignment(one: Tensor, other: Tensor) -> float:
    r"""Return the cosine of kernels :math:`H H^\top` of centred features, mean over members."""
    one, other = (features - features.mean(1, keepdim=True) for features in (one, other))
    kernels = (one @ one.mT).flatten(1), (other @ other.mT).flatten(1)
    return float(F.cosine_similarity(kernels[0], kernels[1]).mean())


def measured_coupling(ensemble: EmbeddedEnsemble, inputs: Tensor) -> float:
    """Return the tangent kernel of shared weights between members, relative to that within."""
    kernel = ntk(ensemble, inputs, outputs="trace").shared.diagonal(dim1=-2, dim2=-1).mean(-1)
    members = len(kernel)
    own = kernel.diagonal().sum()
    return float((kernel.sum() - own) / (members - 1) / own)


def with_collective_part(rows: Rows) -> Frame:
    """Return embedded ensembles with their collective part ``c``, where losses were reached."""
    apart = rows.where(family="separate").frame.groupby(KEYS)["correlation"].mean()
    mine = rows.where(family="embedded").between("loss", 0.0).frame
    mine = mine.join(apart.rename("apart"), on=KEYS)
    return mine.assign(c=(mine["correlation"] - mine["apart"]) / (1 - mine["apart"]))


@functools.lru_cache(maxsize=256)
def collective(rows: Rows) -> Rows:
    """Return means over seeds of embedded ensembles and their collective part."""
    means = with_collective_part(rows).groupby([*KEYS, "p"]).mean(numeric_only=True)
    return Rows(means.reset_index())


def _slope(rows: Rows, y: str, x: str) -> float:
    """Return the slope of ``y`` per doubling of ``x`` at p ≥ 0.9, all else equal."""
    others = [name for name in ("p", *KEYS) if name != x]
    groups = collective(rows).between("p", 0.9).frame.groupby(others)
    slopes = [Rows(some).slope(x, y) for _, some in groups if len(some) > 1]
    if not slopes:
        raise Missing(f"several values of {x}")
    return statistics.fmean(slopes)


def halfway(rows: Rows) -> Frame:
    """Return the p half-way from the correlation at p=0 to 1, by width, scale and loss."""
    points = collective(rows).frame.groupby(KEYS)[["p", "correlation"]]
    return points.apply(lambda some: Rows(some).halfway("p", "correlation"))


def _unknown(rows: Rows) -> float:
    """Range of the half-way p over scales and train losses, mean over widths."""
    points = halfway(rows).groupby("width")
    if (points.count() < 2).any():
        raise Missing("several scales or losses of each width")
    return float((points.max() - points.min()).mean())


def _lazy(rows: Rows) -> float:
    """Half-way p at the largest scale and width."""
    points = halfway(rows).reset_index(name="halfway")
    return Rows(points).last("width").last("scale").mean("halfway")


_PART = {"c": "collective part", "change": "change"}
_SLOPES = (
    ("change", "scale", "features change less the larger the scale of outputs"),
    ("c", "scale", "at one coupling and train loss, who learns features is more alike"),
    ("c", "loss", "members grow more alike while they are trained"),
    ("c", "width", "at the same scale, members of wider networks are less alike"),
)
CLAIMS = [
    *(
        Claim(partial(_slope, y=y, x=x), below=0.0).says(
            statement, measure=f"slope of {_PART[y]} per doubling of {x}, p ≥ 0.9"
        )
        for y, x, statement in _SLOPES
    ),
    Claim(_unknown, below=0.03, jumps=True).says(
        "the law and the width decide where the transition is (to 0.03 in p)", "the law decides"
    ),
    Claim(_lazy, above=0.95).says(
        "lazy members of the widest networks are apart up to p=0.95 (the limit: about 0.99)",
        "dynamics are those of the limit",
    ),
]


def plot(table: Frame) -> Figure:
    """Return collective part and change of features against p, a column for each width."""
    last = Rows(with_collective_part(Rows(table))).first("loss").frame
    draw = partial(curves, x="p", by="scale", label="α={}", colours=shades(table["scale"]))
    panels = [
        Panel(f"{see}, width ×{width:g}", "shift p", label, draw(some, y=column))
        for column, see, label in (
            ("c", "rich members are more alike?", "collective part c"),
            ("change", "the dial: lazy features stay", "change of features"),
        )
        for width, some in last.groupby("width")
    ]
    return Figure(panels, columns=max(1, last["width"].nunique()))
