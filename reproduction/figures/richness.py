r"""Coupling and feature learning (ours: feature learning).

Modulations N(p, 1−p²), four members, outputs α(f−f₀) with a scale α that makes training lazy
(large) or rich (small), compared at equal training losses. The collective part is the correlation
above that of separate networks, as a fraction of the rest up to 1.

The larger the scale α, the less the weights have to move to fit the data. The coupling of members
at initialisation depends on p and the width, and not on α. A run is measured whenever the members'
training loss has fallen to one of a few values. With the correlation :math:`\rho_s` of separate
networks trained in the same way, the collective part is :math:`c = (\rho - \rho_s) / (1 - \rho_s)`.
"""

import functools
import math
import statistics
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embens import EmbeddedEnsemble, embed, independent, laws, metrics
from embens.finite import ntk
from reproduction.claims import Claim
from reproduction.datasets import DataSet
from reproduction.drawing import Figure, Panel, curves, shades, state
from reproduction.grid.cells import Cell, Row, sweep
from reproduction.grid.settings import load_data, of_preset
from reproduction.rows import Frame, MissingCellsError, Rows
from reproduction.training import disagreement, outputs_of, score

SHIFTS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98)
WIDTHS = {"quick": (2.0, 4.0, 8.0), "cpu": (0.5, 1.0, 2.0), "paper": (0.25, 0.5, 1.0)}
SCALES = (0.5, 2.0, 8.0)
LOSSES = (0.5, 0.1)
"""Training losses at which a run is measured."""
KEYS = ["width", "scale", "loss"]
CHANGES = {"quick": {"train": 500}}  # all digits would leave too few errors to correlate
PATIENCE = 7  # the longest run, in multiples of the preset's epochs

SWEEP = [
    sweep(family="embedded", p=SHIFTS, width=WIDTHS, scale=SCALES, members=4),
    # Separate networks have no modulations; p only fills the column.
    sweep(family="separate", p=0.0, width=WIDTHS, scale=SCALES, members=4),
]


class ScaledEnsemble:
    """An ensemble with the outputs α(f − f₀), and its state at initialisation.

    Args:
        ensemble: The untrained ensemble f.
        scale: The scale α.
        data: The data.
    """

    def __init__(self, ensemble: EmbeddedEnsemble, scale: float, data: DataSet):
        self.ensemble = ensemble
        self.scale = scale
        self.data = data
        self.initial_train = outputs_of(ensemble, data.train.inputs)
        self.initial_test = outputs_of(ensemble, data.test.inputs)
        self.initial_features = features_of(ensemble, data.test.inputs)
        self.coupling = measured_coupling(ensemble, data.train.inputs[:12])

    def batch_loss(self, index: Tensor) -> Tensor:
        """Return the training loss of a batch."""
        outputs = self.ensemble(self.data.train.inputs[index]) - self.initial_train[:, index]
        return self.ensemble.objective(self.scale * outputs, self.data.train.targets[index])

    def train_loss(self) -> float:
        """Return the mean training loss of the members."""
        outputs = outputs_of(self.ensemble, self.data.train.inputs)
        outputs = self.scale * (outputs - self.initial_train)
        return float(metrics.member_nll(outputs, self.data.train.targets).mean())

    def evaluate(self) -> Row:
        """Return the scores on test data, the initial coupling, and the change of features."""
        outputs = outputs_of(self.ensemble, self.data.test.inputs)
        outputs = self.scale * (outputs - self.initial_test)
        features = features_of(self.ensemble, self.data.test.inputs)
        return {
            **score(outputs, self.data.test.targets),
            "disagreement": disagreement(outputs),
            "coupling": self.coupling,
            "change": 1 - alignment(self.initial_features, features),
        }


def measure(cell: Cell) -> list[Row]:
    """Train one ensemble; return a row for each loss that it reaches, or one for its end."""
    setting = cell.setting
    data = load_data(setting)
    network, generator = cell.build_reference()
    if cell["family"] == "embedded":
        law = laws.Shifted(cell["p"])
        ensemble = embed(network, cell["members"], pre=law, post=law, generator=generator)
    else:
        ensemble = independent(network, cell["members"], generator=generator)
    scaled = ScaledEnsemble(ensemble, cell["scale"], data)
    lr = setting.lr / cell["scale"] * of_preset(WIDTHS, setting.preset)[0] / cell.width
    groups = ensemble.parameter_groups(lr=lr, weight_decay=0.0, gamma=ensemble.natural_gamma)
    optimizer = torch.optim.SGD(groups, momentum=0.9)

    rows: list[Row] = []
    loss = math.nan
    last_epoch = PATIENCE * setting.epochs
    for epoch in range(1, last_epoch + 1):
        order = torch.randperm(len(data.train.targets), generator=generator)
        for index in order.split(setting.batch_size):
            optimizer.zero_grad()
            scaled.batch_loss(index).backward()
            optimizer.step()
        loss = scaled.train_loss()
        # Several losses can be reached within one epoch.
        for level in LOSSES[len(rows) :]:
            if loss <= level:
                progress = {"loss": level, "train_loss": loss, "epochs": epoch}
                rows.append({**progress, **scaled.evaluate()})
        if len(rows) == len(LOSSES):
            return rows
    if not rows:
        progress = {"loss": math.nan, "train_loss": loss, "epochs": last_epoch}
        rows.append({**progress, **scaled.evaluate()})
    return rows


@torch.no_grad()
def features_of(ensemble: EmbeddedEnsemble, inputs: Tensor) -> Tensor:
    """Return the inputs of the members' last layers.

    Args:
        ensemble: An ensemble of a sequential reference.
        inputs: Inputs; the first 500 are used.

    Returns:
        Features ``(member, batch, unit)``.
    """
    features = []
    for member in range(ensemble.members):
        layers = list(ensemble.member(member).children())
        body = nn.Sequential(*layers[:-1])
        features.append(body(inputs[:500]).flatten(1))
    return torch.stack(features)


def alignment(features: Tensor, other: Tensor) -> float:
    r"""Return the cosine of the kernels :math:`H H^\top` of centred features, mean over members.

    Args:
        features: Features ``(member, batch, unit)``.
        other: Features ``(member, batch, unit)``.

    Returns:
        The alignment; it does not depend on scale and rotation of the features.
    """
    return float(F.cosine_similarity(_kernel(features), _kernel(other)).mean())


def _kernel(features: Tensor) -> Tensor:
    centred = features - features.mean(1, keepdim=True)
    return (centred @ centred.mT).flatten(1)


def measured_coupling(ensemble: EmbeddedEnsemble, inputs: Tensor) -> float:
    """Return the tangent kernel of the shared weights between members, relative to that within."""
    kernel = ntk(ensemble, inputs, outputs="trace").shared
    by_member = kernel.diagonal(dim1=-2, dim2=-1).mean(-1)
    within = by_member.diagonal().sum()
    between = by_member.sum() - within
    return float(between / (ensemble.members - 1) / within)


def with_collective_part(rows: Rows) -> Frame:
    """Return the embedded ensembles that reached a loss, with their collective part ``c``."""
    separate = rows.where(family="separate").frame.groupby(KEYS)["correlation"].mean()
    embedded = rows.where(family="embedded").between("loss", 0.0).frame
    embedded = embedded.join(separate.rename("separate"), on=KEYS)
    excess = embedded["correlation"] - embedded["separate"]
    return embedded.assign(c=excess / (1 - embedded["separate"]))


@functools.lru_cache(maxsize=256)
def collective(rows: Rows) -> Rows:
    """Return the means over seeds of the embedded ensembles, with their collective part."""
    means = with_collective_part(rows).groupby([*KEYS, "p"]).mean(numeric_only=True)
    return Rows(means.reset_index())


def mean_slope(rows: Rows, y: str, x: str) -> float:
    """Return the slope of ``y`` per doubling of ``x`` at p ≥ 0.9, with all else equal."""
    others = [name for name in ("p", *KEYS) if name != x]
    slopes = []
    for _, group in collective(rows).between("p", 0.9).frame.groupby(others):
        if len(group) > 1:
            slopes.append(Rows(group).slope(x, y))
    if not slopes:
        raise MissingCellsError(f"several values of {x}")
    return statistics.fmean(slopes)


def transition_points(rows: Rows) -> Frame:
    """Return the p halfway from the correlation at p=0 to 1, by width, scale and loss."""
    points = collective(rows).frame.groupby(KEYS)[["p", "correlation"]]
    return points.apply(lambda frame: Rows(frame).halfway("p", "correlation"))


def range_of_transition(rows: Rows) -> float:
    """Return the range of the transition over scales and training losses, mean over widths."""
    points = transition_points(rows).groupby("width")
    if (points.count() < 2).any():
        raise MissingCellsError("several scales or losses of each width")
    return float((points.max() - points.min()).mean())


def lazy_transition(rows: Rows) -> float:
    """Return the transition at the largest scale and width."""
    points = transition_points(rows).reset_index(name="transition")
    return Rows(points).last("width").last("scale").mean("transition")


def falls(statement: str, y: str, y_name: str, x: str) -> Claim:
    """Return the claim that a quantity falls with ``x``."""
    return Claim(
        statement=statement,
        measure=f"slope of {y_name} per doubling of {x}, p ≥ 0.9",
        statistic=partial(mean_slope, y=y, x=x),
        below=0.0,
    )


CLAIMS = [
    falls("features change less at a larger scale of outputs", "change", "change", "scale"),
    falls(
        "at equal coupling and training loss, feature learning makes members more similar",
        "c",
        "collective part",
        "scale",
    ),
    falls("members become more similar during training", "c", "collective part", "loss"),
    falls(
        "at equal scale, members of wider networks are less similar",
        "c",
        "collective part",
        "width",
    ),
    Claim(
        statement="the law and the width determine the transition (to 0.03 in p)",
        measure="range of the transition over scales and training losses, mean over widths",
        statistic=range_of_transition,
        below=0.03,
        paper="the law decides",
        jumps=True,
    ),
    Claim(
        statement="lazy members of the widest networks are independent up to p=0.95 "
        "(the limit: about 0.99)",
        measure="transition at the largest scale and width",
        statistic=lazy_transition,
        above=0.95,
        paper="dynamics are those of the limit",
    ),
]


def rich_to_lazy(rows: Rows, column: str) -> str:
    """Return a title with the mean of a column at p ≥ 0.9, at the richest and laziest scale."""
    coupled = rows.between("p", 0.9)
    rich, lazy = (part.mean(column) for part in (coupled.first("scale"), coupled.last("scale")))
    return f"{rich:.2f} if rich, {lazy:.2f} if lazy (p ≥ 0.9)"


def plot(table: Frame) -> Figure:
    """Return collective part and change of features against p, a column for each width."""
    smallest_loss = Rows(with_collective_part(Rows(table))).first("loss").frame
    draw = partial(curves, x="p", by="scale", label="α={}", colours=shades(table["scale"]))
    all_panels = []
    for column, label in (("c", "collective part c"), ("change", "change of features")):
        for width, rows in smallest_loss.groupby("width"):
            title = state(partial(rich_to_lazy, Rows(rows), column), label)
            title = f"width ×{width:g}: {title}"
            all_panels.append(Panel(title, "shift p", label, draw(rows, y=column)))
    return Figure(all_panels, columns=max(1, smallest_loss["width"].nunique()))
