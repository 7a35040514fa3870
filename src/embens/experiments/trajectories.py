"""Learning curves of members for several M (fig:trajectories_log).

In the independent regime a member of an infinitely wide ensemble learns as if it were alone, if
γ = M. With γ = 1 it learns M times more slowly. At finite width curves coincide at first, and for
longer in a wider network.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from embens.experiments.claims import Claim, Frame, Missing, Rows, judge
from embens.experiments.contract import MEMBERS, CellBase, Row, batch_ensemble
from embens.experiments.figure import Figure, Panel, curves, shades
from embens.experiments.setting import Setting
from embens.experiments.training import train

LABEL = "fig:trajectories_log"
TITLE = "Learning curves of members"
ABOUT = (
    "Loss on the train data (mean over members and over the steps of an epoch) against epochs, "
    "modulations N(0, 1); a curve for each M. Left γ=1, centre γ=M, right γ=M at 4× width; below, "
    "test accuracy of members."
)
SCHEMES = (("1", 1.0), ("M", 1.0), ("M", 4.0))
EARLY = 0.1  # part of the epochs that count as early
APART = 0.2  # relative difference of losses at which curves are apart


@dataclass(frozen=True)
class Cell(CellBase):
    """One ensemble; ``gamma`` is ``"M"`` or ``"1"``."""

    gamma: str
    width: float
    members: int


def cells(setting: Setting) -> list[Cell]:
    """Return the sweep over schemes and members."""
    return [
        Cell(gamma, width, members, setting=setting)
        for gamma, width in SCHEMES
        for members in MEMBERS[setting.preset]
    ]


def measure(cell: Cell) -> list[Row]:
    """Train one ensemble; return a row for each epoch."""
    network, generator = cell.draw()
    ensemble = batch_ensemble(network, cell.members, generator=generator)
    gamma = float(cell.members) if cell.gamma == "M" else 1.0
    training = train(ensemble, cell.setting, seed=cell.seed, gamma=gamma, test_each_epoch=True)
    return training.trace


def _early(rows: Rows) -> Rows:
    return rows.between("epoch", high=max(2, round(EARLY * rows["epoch"].max())))


def _departures(rows: Rows) -> Frame:
    """Return |log(loss of M / loss of a single model)|, by M and epoch, mean over seeds."""
    import numpy

    losses = rows.frame.groupby(["members", "epoch"])["loss"].mean().unstack("epoch")
    if 1 not in losses.index or len(losses) < 2:
        raise Missing("M=1 and another M")
    return numpy.log(losses.drop(index=1) / losses.loc[1]).abs()


def _early_slowdown(rows: Rows, gamma: str) -> float:
    return _early(rows.where(gamma=gamma, width=1.0)).slope("members", "loss", log_y=True)


def _duration(rows: Rows, width: float) -> float:
    """Return the log of the epoch at which curves part, mean over M."""
    apart = _departures(rows.where(gamma="M", width=width)) > APART
    end = apart.columns.max() + 1
    first = [next((e for e in apart.columns if row[e]), end) for _, row in apart.iterrows()]
    return sum(map(math.log, first)) / len(first)


def _longer(rows: Rows) -> float:
    wide, narrow = _duration(rows, 4.0), _duration(rows, 1.0)
    if wide == narrow == math.log(rows["epoch"].max() + 1):
        raise Missing("epochs enough for curves to part; none did")
    return wide - narrow


def _early_loss_alone(rows: Rows, gamma: str) -> float:
    return _early(rows.where(gamma=gamma, width=1.0, members=1)).mean("loss")


def claims(table: Frame) -> list[Claim]:
    """Return the paper's observations on this figure."""
    test = partial(judge, table)
    return [
        test(
            "early curves coincide",
            lambda t: _departures(_early(t.where(gamma="M", width=1.0))).to_numpy().mean(),
            below=0.15,
        ).says(
            "with γ=M the early curves of all M coincide (to 15 %)",
            paper="almost identical in the early epochs for all M",
            measure="mean |log(loss at M / loss at 1)| over the first tenth of the epochs",
        ),
        test("γ=1 slows down", partial(_early_slowdown, gamma="1"), above=0.0).says(
            "with γ=1 training slows down with M",
            paper="γ=1 trains more slowly the more members there are",
            measure="exponent of the early loss in M, γ=1",
        ),
        test(
            "γ=M is better", lambda t: _early_slowdown(t, "1") - _early_slowdown(t, "M"), above=0.0
        ).says(
            "early training depends less on M with γ=M than with γ=1",
            paper="γ=M is natural and beneficial",
            measure="difference of the exponents of the early loss in M",
        ),
        test("longer at 4× width", _longer, above=0.0).says(
            "curves coincide for longer in the wider network",
            paper="the time of independent training increases with width",
            measure=f"log of the ratio of epochs until losses differ by {APART:.0%}",
        ),
        test(
            "a single model has no γ",
            lambda t: _early_loss_alone(t, "1") / _early_loss_alone(t, "M"),
            above=0.999,
            below=1.001,
        ).says(
            "at M=1 both scalings are the same (a check of the set-up)",
            paper="by definition",
            measure="ratio of early losses",
        ),
    ]


def plot(table: Frame) -> Figure:
    """Return the paper's three panels, and the same for test accuracy."""
    colours = shades(table["members"])
    panels = []
    for column, label, log in (
        ("loss", "member loss, train", 10),
        ("member_accuracy", "member accuracy, test", 0),
    ):
        for gamma, width in SCHEMES:
            rows = table[(table["gamma"] == gamma) & (table["width"] == width)]
            found = curves(rows, "epoch", column, by="members", label="M={}", colours=colours)
            title = f"γ={gamma}, width ×{width:g}"
            panels.append(Panel(title, "epoch", label, found, x_log=10, y_log=log))
    return Figure(TITLE, panels, columns=3)
