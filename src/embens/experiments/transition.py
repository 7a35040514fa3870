"""Transition between the independent and the collective regime (fig:shifting_modulations).

All modulations are N(p, 1 − p²), γ(M) = M. The paper sees two groups of curves, apart already at
p = 0.55 and 0.65. The same cells with γ = 1 at large p check its explanation of why members get
better with M there: γ = M raises the effective rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from embens.experiments.claims import Claim, Frame, Missing, Rows, judge, trend
from embens.experiments.contract import CellBase, Row, batch_ensemble, product
from embens.experiments.figure import Figure, Panel, against_members, curves, shades
from embens.experiments.setting import Setting, data_set
from embens.experiments.training import train
from embens.theory import regime

LABEL = "fig:shifting_modulations"
TITLE = "From the independent to the collective regime"
ABOUT = (
    "Modulations N(p, 1−p²) at all hidden sites, γ=M, against the number of members M; a curve for "
    "each p. Beside them, against p: the correlation, and the coupling of the infinitely wide "
    "ensemble's kernels, which changes smoothly."
)
LOW, HIGH = 0.55, 0.65  # the paper's groups: at most LOW, at least HIGH

SHIFTS = {
    "quick": (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
    "cpu": (0.0, 0.3, 0.5, 0.6, 0.7, 0.9),
    "paper": (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.8, 0.9, 1.0),
}
SLOW = {"quick": (0.8, 0.9), "cpu": (0.9,), "paper": (0.8, 0.9)}  # also with gamma = 1
MEMBERS = {
    "quick": (1, 2, 4, 8, 16, 32),
    "cpu": (1, 2, 4, 8, 16),
    "paper": (1, 2, 3, 5, 7, 10, 14, 20, 28, 40),
}
SEEDS = {"quick": 4, "cpu": 3, "paper": 3}


@dataclass(frozen=True)
class Cell(CellBase):
    """One ensemble; ``gamma`` is ``"M"`` or ``"1"``."""

    p: float
    members: int
    gamma: str


def cells(setting: Setting) -> list[Cell]:
    """Return the sweep over p and M, and over some of it with γ=1."""
    shifts, slow, members = (axis[setting.preset] for axis in (SHIFTS, SLOW, MEMBERS))
    return [
        *product(Cell, setting, gamma=["M"], p=shifts, members=members),
        *product(Cell, setting, gamma=["1"], p=slow, members=members[1:]),
    ]


def measure(cell: Cell) -> Row:
    """Train one ensemble."""
    network, generator = cell.draw()
    ensemble = batch_ensemble(network, cell.members, p=cell.p, generator=generator)
    coupling = math.nan
    if cell.members == 2 and cell.gamma == "M":  # it depends on p alone
        inputs = data_set(cell.setting).train.inputs[:8]
        coupling = regime(ensemble, inputs.double().cpu()).coupling
    gamma = float(cell.members) if cell.gamma == "M" else 1.0
    training = train(ensemble, cell.setting, seed=cell.seed, gamma=gamma)
    return {**training.evaluate(), "coupling": coupling}


def _scaled(rows: Rows) -> Rows:
    return rows.where(gamma="M")


def _below(rows: Rows) -> Rows:
    return _scaled(rows).between("p", high=LOW)


def _above(rows: Rows) -> Rows:
    return _scaled(rows).between("p", HIGH, 0.999)  # at p=1 all members are the same model


def _several(rows: Rows) -> Rows:
    return rows.between("members", 4)


def _halfway(rows: Rows) -> float:
    shifts, values = _several(_scaled(rows)).curve("p", "correlation")
    middle = (values[0] + values[-1]) / 2
    for k in range(1, len(values)):
        if values[k] >= middle:
            part = (middle - values[k - 1]) / (values[k] - values[k - 1])
            return shifts[k - 1] + part * (shifts[k] - shifts[k - 1])
    return math.nan


def _sharpness(rows: Rows) -> float:
    shifts, values = _scaled(rows).last("members").curve("p", "member_train_accuracy")
    below = [v for p, v in zip(shifts, values, strict=True) if p <= LOW]
    above = [v for p, v in zip(shifts, values, strict=True) if p >= HIGH]
    if not below or not above or len(below) + len(above) < 3:
        raise Missing(f"several p on both sides of {LOW} and {HIGH}")
    return (above[0] - below[-1]) / (above[-1] - below[0])


def _early_growth(rows: Rows) -> float:
    shifts, values = _several(_scaled(rows)).curve("p", "correlation")
    end = max(k for k, p in enumerate(shifts) if p <= LOW)
    return (values[end] - values[0]) / (values[-1] - values[0])


def _around_the_best(rows: Rows) -> Rows:
    rows = _below(rows)
    if rows["members"].min() > 3 or rows["members"].max() < 14:
        raise Missing("numbers of members from 3 or fewer to 14 or more")
    return rows


def _effect_of_gamma(rows: Rows) -> float:
    shifts = sorted(rows.where(gamma="1")["p"].unique())
    both = rows.where(p=shifts).between("members", 2)
    scaled, plain = (both.where(gamma=gamma) for gamma in ("M", "1"))
    return scaled.slope("members", "member_accuracy") - plain.slope("members", "member_accuracy")


def _gap(rows: Rows) -> float:
    several = _several(rows)
    return several.mean("member_train_accuracy") - several.mean("member_accuracy")


def _spread(rows: Rows) -> float:
    spread = _several(rows).frame.groupby(["p", "members"])["accuracy"].std().mean()
    return math.log(spread) if spread > 0 else math.nan


def _switch(rows: Rows) -> float:
    positions = []
    for low, high in ((2, 7), (11, math.inf)):
        part = _scaled(rows).between("members", low, high)
        sides = (_below(part), part.where(p=0.6), _above(part))
        below, middle, above = (side.mean("correlation") for side in sides)
        positions.append((middle - below) / (above - below))
    return abs(positions[1] - positions[0])


def claims(table: Frame) -> list[Claim]:
    """Return the paper's observations on this figure."""
    test = partial(judge, table)
    return [
        test("transition point", _halfway, above=0.5, below=0.7).says(
            "the two groups of curves part near p=0.6",
            paper="transition at p≈0.6",
            measure="p at which the correlation is half-way (M ≥ 4)",
        ),
        test("sharpness", _sharpness, above=0.5).says(
            "most of the change happens across the transition point",
            paper="p=0.55 and p=0.65 already show the behaviour of their regimes",
            measure=f"part of the change of member train accuracy between the p's around {LOW} "
            f"and {HIGH}, at the largest M",
        ),
        test("constant correlation below", _early_growth, below=0.25).says(
            "below the transition correlation hardly depends on p",
            paper="almost constant for the whole range of p in the independent regime",
            measure="part of the growth of correlation with p that happens below",
        ),
        test(
            "correlation grows above",
            trend(lambda t: _several(_above(t)), "correlation", "p", log_x=False),
            above=0.0,
        ).says(
            "above the transition correlation grows with p",
            paper="grows with p in the collective regime",
            measure="slope of correlation in p (M ≥ 4)",
        ),
        test(
            "inverted U below",
            lambda t: _around_the_best(t).rise_and_fall("members"),
            above=0.0,
        ).says(
            "below, ensemble accuracy rises with M and falls again",
            paper="a distinctive inverted U",
            measure="smaller of rise to the best M and fall to the largest",
        ),
        test(
            "best M below",
            lambda t: _around_the_best(t).per_seed(lambda mine: mine.best("members")),
            above=3.5,
            below=14.0,
        ).says(
            "the best number of members is near 7",
            paper="best accuracy at M=7",
            measure="best M, mean over seeds",
        ),
        test("accuracy grows above", trend(_above, "accuracy"), above=0.0).says(
            "above, ensemble accuracy grows with M",
            paper="monotonically grows on average",
            measure="slope of accuracy per doubling of M",
        ),
        test(
            "train accuracy maximal above",
            lambda t: min(_above(t).curve("members", "member_train_accuracy")[1]),
            above=0.98,
        ).says(
            "above, members fit the train data whatever M is",
            paper="maximal for all sizes in the collective regime",
            measure="lowest member train accuracy over M",
        ),
        test("train accuracy falls below", trend(_below, "member_train_accuracy"), below=0.0).says(
            "below, member train accuracy falls with M",
            paper="decreases monotonically and significantly",
            measure="slope per doubling of M",
        ),
        test("member accuracy rises above", trend(_above, "member_accuracy"), above=0.0).says(
            "above, member test accuracy rises with M",
            paper="increases in the collective regime",
            measure="slope per doubling of M",
        ),
        test("the rise is due to γ", _effect_of_gamma, above=0.0).says(
            "above, members gain more from M with γ=M than with γ=1",
            paper="an artifact of γ=M, an effectively higher rate",
            measure="difference of slopes per doubling of M",
        ),
        test("member accuracy falls below", trend(_below, "member_accuracy"), below=0.0).says(
            "below, member test accuracy falls with M",
            paper="decreases in the independent regime",
            measure="slope per doubling of M",
        ),
        test("smaller gap below", lambda t: _gap(_above(t)) - _gap(_below(t)), above=0.0).says(
            "the gap between train and test accuracy of members is smaller below",
            paper="small difference between train and test accuracy in the independent regime",
            measure="gap above less gap below (M ≥ 4)",
        ),
        test(
            "smaller spread below", lambda t: _spread(_above(t)) - _spread(_below(t)), above=0.0
        ).says(
            "ensemble accuracy varies less from seed to seed below",
            paper="variance is higher in the collective regime",
            measure="log of the ratio of standard deviations over seeds (M ≥ 4)",
        ),
        test("switch at p=0.6", _switch, above=0.5).says(
            "at p=0.6 the regime changes with M, near M=10",
            paper="at the transition point it is driven by M and happens at M≈10",
            measure="part of the distance between the groups that p=0.6 moves past M=10",
        ),
    ]


def plot(table: Frame) -> Figure:
    """Return the paper's four panels, and one against p."""
    rows, slow = (table[table["gamma"] == gamma] for gamma in ("M", "1"))
    colours = shades(table["p"])
    by_shift = partial(curves, x="members", by="p", colours=colours)
    panels = against_members(lambda column: by_shift(rows, y=column, label="p={}"))
    panels[1].curves.extend(by_shift(slow, y="member_accuracy", label="γ=1, p={}", style="dash"))
    some = {2: "#c6a500", 8: "#e07b00", 32: "#a02c00"}
    found = [
        *curves(rows, "p", "correlation", by="members", label="M={}", colours=some),
        *curves(
            *(rows, "p", "coupling"), label="coupling in the limit", colours="#333333", style="dash"
        ),
    ]
    panels.append(Panel("against p", "shift p", "correlation, coupling", found))
    return Figure(TITLE, panels, columns=3)
