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
from embens.experiments.claims import Claim, Frame, Rows, judge
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
JOINT = {"Masksembles": 0.5, "±1, u attract": 0.5, "±1, u repel": -0.5}
"""Overlap 1/S of masks; else the correlation of u of two members, below 0 in units of 1/(M−1)."""
BOTH = "u and v"
WIDTHS = {"quick": (2.0, 4.0, 8.0), "cpu": (0.5, 1.0, 2.0), "paper": (0.5, 1.0, 2.0)}
MEMBERS = {"quick": 8, "cpu": 4, "paper": 8}
TRAIN = {"quick": 500, "cpu": 1000, "paper": 40_000}  # all digits would be too easy


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
    setting = replace(setting, train=min(setting.train, TRAIN[preset]))
    some = list(CENTRED)[: None if preset == "quick" else 2]
    sweep = partial(product, Cell, setting, width=WIDTHS[preset])
    alone = sweep(law=(ONE, FASTER), sites=["none"], members=[1])
    several = partial(sweep, members=[MEMBERS[preset]])
    parts = several(law=some, sites=("u", "v"))
    return [*alone, *several(law=(SEPARATE, *LAWS, *JOINT), sites=[BOTH]), *parts]


def make(cell: Cell) -> EmbeddedEnsemble:
    """Return the ensemble of a cell, untrained."""
    network, generator = cell.draw()
    if cell.law in (ONE, FASTER, SEPARATE):
        return independent(network, cell.members, generator=generator)
    if cell.law == "Masksembles":
        overlap = JOINT[cell.law]
        return masksembles(network, cell.members, overlap=overlap, generator=generator)
    if cell.law in JOINT:
        rho = JOINT[cell.law]
        post = Correlated(rho if rho > 0 else rho / (cell.members - 1))
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
    """Return the change of a column where tails cost half the width, over centred laws."""
    some = rows.where(law=list(CENTRED), sites=BOTH)
    return -fmean(each.slope("effective_width", column) for _, each in some.by("width"))


def claims(table: Frame) -> list[Claim]:
    """Return what theory leads one to expect of tails, and what is said of initialisations."""
    none = [BOTH, "none"]

    def less(column: str, law: str, other: str, sites: str = BOTH, **region: float) -> Claim:
        return judge(
            *(table, f"{law} ({sites}) and {other}: {column}"),
            lambda t: (
                t.where(law=law, sites=sites).mean(column)
                - t.where(law=other, sites=none).mean(column)
            ),
            measure=f"{column}: {law} ({sites}) less {other}, mean over widths",
            **region,
        )

    def tails(column: str, **region: float) -> Claim:
        measure = f"{column}, per halving of the effective width, centred laws for u and v"
        return judge(
            table, f"tails: {column}", lambda t: _cost(t, column), measure=measure, **region
        )

    found = {
        "signs have a lower log loss than normal modulations": less(
            "nll", "±1", "N(0, 1)", below=0.0
        ),
        "so have they with the mean √½": less("nll", "±1, mean √½", "N(√½, ½)", below=0.0),
        "the more width tails cost, the worse is a member": tails("member_accuracy", below=0.0),
        "the more width tails cost, the larger is the log loss": tails("nll", above=0.0),
        "signs are better than one network at the same rate": less("nll", "±1", ONE, below=0.0),
        "signs are better than one network at M times the rate": less(
            "nll", "±1", FASTER, below=0.0
        ),
        "signs are as good as separate networks, to 0.01 nats": less(
            "nll", "±1", SEPARATE, below=0.01
        ),
        "signs for v alone are as good as for both, to 0.01 nats": less(
            "nll", "±1", "±1", "v", below=0.01
        ),
        "N(1, ½) is nearly one model: it is more correlated than separate networks by 0.3": less(
            "correlation", "N(1, ½)", SEPARATE, above=0.3
        ),
    }
    return [claim.says(statement, paper="–") for statement, claim in found.items()]


def plot(table: Frame) -> Figure:
    """Return measures against width for u and v together, and log loss for one of them."""
    colours = shades(range(len(set(table["law"]))), "turbo")
    names = dict(zip((ONE, FASTER, SEPARATE, *LAWS, *JOINT), colours.values(), strict=False))
    draw = partial(curves, x="width", by="law", colours=names)
    parts = {sites: table[table["sites"].isin([sites, "none"])] for sites in (BOTH, "u", "v")}
    shown = {
        "nll": "log loss",
        **LABELS,
        "disagreement": "disagreement",
        "effective_width": "effective width",
    }
    panels = [
        Panel(label, "width", label, draw(parts[BOTH], y=column), x_log=2)
        for column, label in shown.items()
    ]
    panels += [
        Panel(f"{sites} alone", "width", "log loss", draw(parts[sites], y="nll"), x_log=2)
        for sites in ("u", "v")
    ]
    return Figure(TITLE, panels, columns=4)
