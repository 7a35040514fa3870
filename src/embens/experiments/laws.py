"""Laws of equal mean and second moment and unequal tails, and initialisations people use (ours).

In the limit only the two moments of u count; what tails cost at finite width is in
``docs/theory.md``. Every ensemble is trained alike, with γ=M.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

from torch import Tensor

from embens import metrics
from embens.embedding.families import embed, independent, masksembles
from embens.ensemble import EmbeddedEnsemble
from embens.experiments.claims import Claim, Frame, Rows, judge, line
from embens.experiments.contract import CellBase, Row, product
from embens.experiments.figure import LABELS, Figure, Panel, curves, shades
from embens.experiments.setting import Setting, data_set
from embens.experiments.training import run, train
from embens.laws import Bernoulli, Correlated, Normal, Shifted, Signs, Ternary, Uniform
from embens.theory import effective_width, regime

LABEL = "ours: laws"
TITLE = "Laws of modulations"
ABOUT = (
    "M members with modulations of several laws, for u and v or for one of them, against width. "
    "Centred laws have E u² = 1; mixed ones the mean √½ too. N(1, ½) has a standard deviation of ½ "
    "and so E u² = 5/4. Beside each, what was known before training."
)
P = math.sqrt(0.5)
CENTRED = {
    "±1": Signs(0.0),
    "N(0, 1)": Normal(),
    "uniform": Uniform(),
    "ternary, ⅓ zeros": Ternary(1 / 3, math.sqrt(1.5)),
    "ternary, ⅔ zeros": Ternary(2 / 3, math.sqrt(3)),
}
MIXED = {
    "±1, mean √½": Signs(P),
    "N(√½, ½)": Shifted(P),
    "uniform, mean √½": Uniform(P - math.sqrt(1.5), P + math.sqrt(1.5)),
    "Bernoulli": Bernoulli(0.5, math.sqrt(2)),
}
LAWS = {**CENTRED, **MIXED, "N(1, ½)": Normal(1.0, 0.5)}
ONE, FASTER, SEPARATE = "one network", "one network, M × rate", "separate networks"
MASKS, ATTRACT, REPEL = "Masksembles", "±1, u attract", "±1, u repel"
ORDER = (SEPARATE, *LAWS, MASKS, ATTRACT, REPEL)
BOTH = "u and v"
WIDTHS = {"quick": (2.0, 4.0, 8.0), "cpu": (0.5, 1.0, 2.0), "paper": (0.5, 1.0, 2.0)}
MEMBERS = {"quick": 8, "cpu": 4, "paper": 8}
EXPECTED = {
    "signs have a lower log loss than normal modulations": ("nll", "±1", "N(0, 1)", 0.0),
    "so have they with the mean √½": ("nll", "±1, mean √½", "N(√½, ½)", 0.0),
    "signs are better than one network at the same rate": ("nll", "±1", ONE, 0.0),
    "signs are better than one network at M times the rate": ("nll", "±1", FASTER, 0.0),
    "signs are as good as separate networks, to 0.01 nats": ("nll", "±1", SEPARATE, 0.01),
    "N(1, ½) is nearly one model: separate networks correlate less, by 0.3": (
        *("correlation", SEPARATE, "N(1, ½)"),
        -0.3,
    ),
}
"""Statements: a column, of one less that of the other, is below a number."""


@dataclass(frozen=True)
class Cell(CellBase):
    """One ensemble; ``sites`` says what is modulated."""

    law: str
    sites: str
    width: float
    members: int


def cells(setting: Setting) -> list[Cell]:
    """Return the references and the laws, the most important ones first."""
    preset = setting.preset
    if preset == "quick":
        setting = replace(setting, train=500)  # all digits would be too easy
    some = list(CENTRED)[: None if preset == "quick" else 2]
    sweep = partial(product, Cell, setting, width=WIDTHS[preset])
    alone = sweep(law=(ONE, FASTER), sites=["none"], members=[1])
    several = partial(sweep, members=[MEMBERS[preset]])
    parts = several(law=some, sites=("u", "v"))
    return [*alone, *several(law=ORDER, sites=[BOTH]), *parts]


def make(cell: Cell) -> EmbeddedEnsemble:
    """Return the ensemble of a cell, untrained."""
    network, generator = cell.draw()
    if cell.law in (ONE, FASTER, SEPARATE):
        return independent(network, cell.members, generator=generator)
    if cell.law == MASKS:
        return masksembles(network, cell.members, overlap=0.5, generator=generator)
    if cell.law in (ATTRACT, REPEL):
        post = Correlated(0.5 if cell.law == ATTRACT else -0.5 / (cell.members - 1))
        return embed(network, cell.members, Signs(0.0), post, generator=generator)
    law = LAWS[cell.law]
    pre, post = (law if side in cell.sites else None for side in ("v", "u"))
    return embed(network, cell.members, pre, post, generator=generator)


def foresee(ensemble: EmbeddedEnsemble, x: Tensor) -> Row:
    """Return what is known before training; the place for a forecast."""
    return {
        "coupling": regime(ensemble, x).coupling,
        "effective_width": effective_width(ensemble, x),
    }


def measure(cell: Cell) -> Row:
    """Train one ensemble."""
    ensemble, setting = make(cell), cell.setting
    few = 2 if setting.network == "mlp" else 1
    known = foresee(ensemble, data_set(setting).train.inputs[:few].double())
    rate = setting.lr * (MEMBERS[setting.preset] if cell.law == FASTER else 1)
    training = train(ensemble, setting, seed=cell.seed, lr=rate)
    outputs = run(ensemble, training.data.test.inputs)
    differ = float(metrics.disagreement(outputs)) if len(outputs) > 1 else 0.0
    return {**training.evaluate(), "disagreement": differ, **known}


def _cost(rows: Rows, column: str) -> float:
    """Return the change of a column where tails cost half the width, over centred laws.

    A law is a point, also where two of them have the same effective width.
    """
    some, slopes = rows.where(law=list(CENTRED), sites=BOTH), []
    for _, each in some.by("width"):
        points = [(math.log2(r.mean("effective_width")), r.mean(column)) for _, r in each.by("law")]
        slopes.append(line(*zip(*points, strict=True)))
    return -fmean(slopes)


def claims(table: Frame) -> list[Claim]:
    """Return what theory leads one to expect of tails, and what is said of initialisations."""
    test = partial(judge, table)
    found = [
        test(
            f"{law} and {other}: {column}",
            lambda t, column=column, law=law, other=other: (
                t.where(law=law, sites=BOTH).mean(column)
                - t.where(law=other, sites=[BOTH, "none"]).mean(column)
            ),
            below=most,
        ).says(statement, paper="–", measure=f"{column}: {law} less {other}, mean over widths")
        for statement, (column, law, other, most) in EXPECTED.items()
    ]
    measure = "change per halving of the effective width, centred laws for u and v"
    return [
        *found,
        test("tails: member accuracy", lambda t: _cost(t, "member_accuracy"), below=0.0).says(
            "the more width tails cost, the worse is a member", paper="–", measure=measure
        ),
        test("tails: log loss", lambda t: _cost(t, "nll"), above=0.0).says(
            "the more width tails cost, the larger is the log loss", paper="–", measure=measure
        ),
    ]


def plot(table: Frame) -> Figure:
    """Return measures against width for u and v together, and log loss for one of them."""
    names = dict(
        zip((ONE, FASTER, *ORDER), shades(range(len(ORDER) + 2), "turbo").values(), strict=True)
    )
    shown = {"nll": "log loss", **LABELS, "effective_width": "effective width"}
    draw = partial(curves, x="width", by="law", colours=names)
    parts = {sites: table[table["sites"].isin([sites, "none"])] for sites in (BOTH, "u", "v")}
    panels = [
        Panel(f"{shown[y]}, {sites}", "width", shown[y], draw(parts[sites], y=y), x_log=2)
        for sites, columns in ((BOTH, shown), ("u", ["nll"]), ("v", ["nll"]))
        for y in columns
    ]
    return Figure(TITLE, panels, columns=4)
