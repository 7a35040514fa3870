"""From the independent to the collective regime (fig:shifting_modulations).

Modulations N(p, 1−p²) at all hidden sites, γ=M, against the number of members M; a curve for each
p. Black and grey: one network and separate ones, at the best rate for one network. Beside them,
against p: the correlation, and the coupling of the infinitely wide ensemble's kernels, which
changes smoothly.

The transition is where it is measured: the p at which the correlation of members is half-way from
its value at p = 0 to 1, which it has at p = 1, where members are the same model. Cells with γ = 1
at large p check the paper's explanation of why members get better with M there: γ = M raises the
effective rate.
"""

import functools
import math
from functools import partial

from embens import laws
from embens.embedding.families import embed
from reproduction.grid import cells as contract
from reproduction import baselines as fair
from reproduction.claims import Claim, Frame, Missing, Rows, inverted_u, trend, where
from reproduction.grid.cells import Cell, Row, sweep, train
from reproduction.drawing import Figure, Panel, curves, panels, shades
from reproduction.grid.settings import data_set
from embens.theory import regime

NEAR = 0.1  # distance from the transition in p
FIT = "member_train_accuracy"

SHIFTS = {
    "quick": (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0),
    "cpu": (0.0, 0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95),
    "paper": (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.8, 0.9, 0.95, 1.0),
}
SLOW = {"quick": (0.8, 0.9), "cpu": (0.9,), "paper": (0.8, 0.9)}  # also with gamma = 1
MEMBERS = {**contract.MEMBERS, "paper": (1, 2, 3, 5, 7, 10, 14, 20, 28, 40)}
SEEDS = {"quick": 4, "cpu": 5, "paper": 3}

SWEEP = [
    sweep(p=SHIFTS, members=MEMBERS, gamma="M"),
    sweep(p=SLOW, members={k: some[1:] for k, some in MEMBERS.items()}, gamma="1"),
    fair.sweep(1.0),
]


def measure(cell: Cell) -> Row:
    """Train one ensemble."""
    law = laws.Shifted(cell.p)
    ensemble = cell.make(embed, pre=law, post=law)
    coupling = math.nan
    if cell.members == 2 and cell.gamma == "M":  # it depends on p alone
        inputs = data_set(cell.setting).train.inputs[:8]
        coupling = regime(ensemble, inputs.double().cpu()).coupling
    gamma = float(cell.members) if cell.gamma == "M" else 1.0
    training = train(cell, ensemble, gamma=gamma)
    return {**training.evaluate(), "coupling": coupling}


_scaled, _several = where(gamma="M"), partial(Rows.between, column="members", low=4)


@functools.lru_cache(maxsize=256)
def halfway(rows: Rows) -> float:
    """Shift p at which the correlation is half-way from p=0 to p=1 (M ≥ 4)."""
    return _several(_scaled(rows)).halfway("p", "correlation")


def _below(rows: Rows) -> Rows:
    return _scaled(rows).between("p", high=halfway(rows))


def _above(rows: Rows) -> Rows:
    return _scaled(rows).between("p", halfway(rows), 0.999)  # at p=1 all members are one model


def _growth(rows: Rows, distance: float) -> float:
    """Return the part of the growth of correlation up to a distance from the transition in p."""
    import numpy

    growth = _several(_scaled(rows)).growth("p", "correlation")
    return float(numpy.interp(halfway(rows) + distance, *growth))


def _around_the_best(rows: Rows) -> Rows:
    if rows["members"].min() > 3 or rows["members"].max() < 14:
        raise Missing("numbers of members from 3 or fewer to 14 or more")
    return _below(rows)


def _effect_of_gamma(rows: Rows) -> float:
    """Difference of slopes of member accuracy per doubling of M."""
    both = rows.where(p=sorted(rows.where(gamma="1")["p"].unique())).between("members", 2)
    scaled, plain = (both.where(gamma=gamma) for gamma in ("M", "1"))
    return scaled.slope("members", "member_accuracy") - plain.slope("members", "member_accuracy")


def _gap(rows: Rows) -> float:
    """Gap between members' train and test accuracy, above the transition less below (M ≥ 4)."""
    above, below = (_several(some(rows)) for some in (_above, _below))
    gaps = [some.mean(FIT) - some.mean("member_accuracy") for some in (above, below)]
    return gaps[0] - gaps[1]


def _switch(rows: Rows) -> float:
    """Part of the way from p=0 to p=1 that the p nearest to the transition moves past M=10."""
    shifts = [float(p) for p in _scaled(rows)["p"].unique()]
    nearest = _scaled(rows).where(p=min(shifts, key=lambda p: abs(p - halfway(rows))))
    few, many = (nearest.between("members", *ends) for ends in ((2, 7), (11, math.inf)))
    start = _several(_scaled(rows)).where(p=0.0).mean("correlation")
    return (many.mean("correlation") - few.mean("correlation")) / (1 - start)


_beside = partial(Claim, jumps=True)  # which p's are above depends on where it is
CLAIMS = [
    Claim(halfway, above=0.5, below=0.7).says(
        "the two groups of curves part near p=0.6", "transition at p≈0.6"
    ),
    Claim(lambda t: _growth(t, NEAR) - _growth(t, -NEAR), above=0.5).says(
        "most of the change happens near the transition, wherever it is",
        "p=0.55 and p=0.65 already show the behaviour of their regimes",
        "part of the growth of correlation that lies within 0.1 of the transition in p",
    ),
    Claim(lambda t: _growth(t, -NEAR), below=0.25).says(
        "below the transition correlation hardly depends on p",
        "almost constant for the whole range of p in the independent regime",
        "part of the growth of correlation up to 0.1 before the transition",
    ),
    _beside(trend(lambda t: _several(_above(t)), "correlation", "p", log_x=False), above=0.0).says(
        "above the transition correlation grows with p", "grows with p in the collective regime"
    ),
    _beside(inverted_u(_around_the_best), above=0.0).says(
        "below, ensemble accuracy rises with M and falls again", "a distinctive inverted U"
    ),
    _beside(lambda t: _around_the_best(t).best("members"), above=3.5, below=14.0).says(
        "the best number of members is near 7", "best accuracy at M=7", "best M, mean over p"
    ),
    _beside(trend(_above, "accuracy"), above=0.0).says(
        "above, ensemble accuracy grows with M", "monotonically grows on average"
    ),
    _beside(lambda t: min(_above(t).curve("members", FIT)[1]), above=0.98).says(
        "above, members fit the train data whatever M is",
        "maximal for all sizes in the collective regime",
        "lowest member train accuracy over M",
    ),
    _beside(trend(_below, FIT), below=0.0).says(
        "below, member train accuracy falls with M", "decreases monotonically and significantly"
    ),
    _beside(trend(_above, "member_accuracy"), above=0.0).says(
        "above, member test accuracy rises with M", "increases in the collective regime"
    ),
    Claim(_effect_of_gamma, above=0.0).says(
        "above, members gain more from M with γ=M than with γ=1",
        "γ=M is an effectively higher rate",
    ),
    _beside(trend(_below, "member_accuracy"), below=0.0).says(
        "below, member test accuracy falls with M", "decreases in the independent regime"
    ),
    _beside(_gap, above=0.0).says(
        "the gap between train and test accuracy of members is smaller below", "a small difference"
    ),
    _beside(_switch, above=0.5).says(
        "at the transition the regime changes with M, near M=10", "it is driven by M, at M≈10"
    ),
    *fair.claims(_below, jumps=True),
]


def plot(table: Frame) -> Figure:
    """Return the paper's four panels, and one against p."""
    rows, slow = (table[table["gamma"] == gamma] for gamma in ("M", "1"))
    by_shift = partial(curves, x="members", by="p", colours=shades(table["p"].dropna()))
    titles = {
        "accuracy": "small p: a best M? large p: growth?",
        "member_accuracy": "members: who loses and who gains with M",
        FIT: "small p: too many members no longer fit",
        "correlation": "two groups of curves: apart, and alike",
    }
    found = panels(fair.beside(partial(by_shift, rows, label="p={}"), table), titles)
    found[1].curves.extend(by_shift(slow, y="member_accuracy", label="γ=1, p={}", style="dash"))
    some, limit = {2: "#c6a500", 8: "#e07b00", 32: "#a02c00"}, "coupling in the limit"
    against = [
        *curves(rows, "p", "correlation", by="members", label="M={}", colours=some),
        *curves(rows, "p", "coupling", label=limit, colours="#333333", style="dash"),
    ]
    where_apart = "where members become alike; the limit is smooth"
    return Figure([*found, Panel(where_apart, "shift p", "correlation, coupling", against)], 3)
