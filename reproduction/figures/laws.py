"""Laws of modulations (ours: laws).

M members with modulations of several laws, for u and v or for one of them, against width. Centred
laws have E u² = 1; mixed ones the mean √½ too. N(1, ½) has a standard deviation of ½ and so
E u² = 5/4. Beside each, what was known before training: its coupling, its effective width, and the
forecast of its members' correlation.

Laws of equal mean and second moment have unequal tails, and some are initialisations that people
use. In the limit only the two moments of u count; what tails cost at finite width is in
``docs/theory.md``. Every ensemble is trained alike, with γ=M.
"""

import math
from functools import partial
from statistics import fmean
from typing import Any

from embens import metrics
from embens.embedding.families import embed, independent, masksembles
from embens.ensemble import EmbeddedEnsemble
from reproduction import baselines as fair
from reproduction.claims import Claim, Frame, Rows, less, line, where
from reproduction.grid.cells import Cell, Row, run, sweep, train
from reproduction.drawing import LABELS, Curve, Figure, Panel, curves, panels, shades
from reproduction.grid.settings import data_set
from embens.finite import forecast
from embens.laws import Bernoulli, Correlated, Normal, Shifted, Signs, Ternary, Uniform
from embens.theory import effective_width, regime

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
FORECAST = {f"forecast_{name}": name for name in ("correlation", "gain", "nll")}
WIDTHS = {"quick": (2.0, 4.0, 8.0), "cpu": (0.5, 1.0, 2.0), "paper": (0.5, 1.0, 2.0)}
MEMBERS = {"quick": 8, "cpu": 4, "paper": 8}
ALONE = {"quick": list(CENTRED), "cpu": ["±1", "N(0, 1)"], "paper": ["±1", "N(0, 1)"]}
QUICK = {"train": 500}  # all digits would be too easy
_SINGLE = "N(1, ½) is nearly one model: separate networks correlate less, by 0.3"
EXPECTED = {
    "signs have a lower log loss than normal modulations": ("nll", "±1", "N(0, 1)", 0.0),
    "so have they with the mean √½": ("nll", "±1, mean √½", "N(√½, ½)", 0.0),
    "signs are better than one network at the same rate": ("nll", "±1", ONE, 0.0),
    "signs are better than one network at M times the rate": ("nll", "±1", FASTER, 0.0),
    "signs are as good as separate networks, to 0.01 nats": ("nll", "±1", SEPARATE, 0.01),
    _SINGLE: ("correlation", SEPARATE, "N(1, ½)", -0.3),
}
"""Statements: a column, of one less that of the other, is below a number."""

SWEEP = [  # the most important ones first
    sweep(law=(ONE, FASTER), sites="none", width=WIDTHS, members=1),
    sweep(law=ORDER, sites=BOTH, width=WIDTHS, members=MEMBERS),
    sweep(law=ALONE, sites=("u", "v"), width=WIDTHS, members=MEMBERS),
    fair.sweep(WIDTHS),
]


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


def foresee(cell: Cell, ensemble: EmbeddedEnsemble) -> Row:
    """Return what is known before training."""
    setting, (inputs, targets) = cell.setting, data_set(cell.setting).train
    few = inputs[: 2 if setting.network == "mlp" else 1].double()
    expected = dict.fromkeys(FORECAST, math.nan)
    if cell.members > 1:
        found = forecast(
            *(ensemble, inputs, targets), epochs=setting.epochs, batch_size=setting.batch_size,
            lr=setting.lr, weight_decay=setting.weight_decay, gamma=float(cell.members),
            seed=cell.seed,
        )  # fmt: skip
        expected = {name: float(getattr(found, column)) for name, column in FORECAST.items()}
    known = {"coupling": regime(ensemble, few).coupling, **expected}
    return {**known, "effective_width": effective_width(ensemble, few)}


def measure(cell: Cell) -> Row:
    """Train one ensemble."""
    ensemble, setting = make(cell), cell.setting
    known = foresee(cell, ensemble)
    rate = setting.lr * (MEMBERS[setting.preset] if cell.law == FASTER else 1)
    training = train(cell, ensemble, lr=rate)
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


def _errors(rows: Rows) -> tuple[float, float]:
    """Return the mean errors of forecast correlations, and of the constant that is best of all."""
    means = rows.where(sites=BOTH).frame.groupby(["law", "width"]).mean(numeric_only=True)
    found, forecast = means["correlation"], means["forecast_correlation"]
    return (found - forecast).abs().mean(), (found - found.median()).abs().mean()


_BOTH = {"sites": [BOTH, "none"]}
_PER_HALF = "change per halving of the effective width, centred laws for u and v"
CLAIMS = [
    *(
        Claim(less(column, where(law=law, **_BOTH), where(law=other, **_BOTH)), below=most).says(
            statement, measure=f"{column}: {law} less {other}, mean over widths"
        )
        for statement, (column, law, other, most) in EXPECTED.items()
    ),
    Claim(lambda t: _cost(t, "member_accuracy"), below=0.0).says(
        "the more width tails cost, the worse is a member", measure=_PER_HALF
    ),
    Claim(lambda t: _cost(t, "nll"), above=0.0).says(
        "the more width tails cost, the larger is the log loss", measure=_PER_HALF
    ),
    Claim(lambda t: _errors(t)[0], below=0.1, jumps=True).says(
        "the correlation of members is known before training (to 0.1)",
        measure="mean absolute error of the forecast, over laws and widths",
    ),
    Claim(lambda t: _errors(t)[0] / _errors(t)[1], below=0.5, jumps=True).says(
        "and twice as well as if all laws were alike",
        measure="error of the forecast, relative to that of the best constant",
    ),
    *fair.claims(lambda rows: rows.where(law="±1", sites=BOTH).last("width")),
]


def plot(table: Frame) -> Figure:
    """Return measures against width for u and v together, log loss for one, and forecasts."""
    names: dict[Any, str] = {ONE: "#000000", FASTER: "#8c564b", SEPARATE: "#7f7f7f"}
    names |= dict(zip(ORDER[1:], shades(range(len(ORDER) - 1), "turbo").values(), strict=True))
    draw = partial(curves, x="width", by="law", colours=names)
    parts = {sites: table[table["sites"].isin([sites, "none"])] for sites in (BOTH, "u", "v")}
    several = table.loc[table["sites"] == BOTH, "members"].max()
    best = fair.only(Rows(table)).frame

    def at_best_rate(y: str) -> list[Curve]:
        return [
            curve
            for label, members in ((ONE, 1), (SEPARATE, several))
            for curve in curves(
                *(best[best["members"] == members], "width", y),
                label=f"{label}, best rate", colours=names[label], style="dash",
            )
        ]  # fmt: skip

    titles = {
        "nll": "u and v: lower is better",
        "accuracy": "u and v: who gains over one network?",
        "member_accuracy": "u and v: tails cost a member accuracy",
        "correlation": "u and v: whose members err apart?",
        "effective_width": "what tails leave of the width, before training",
    }
    found = panels(lambda y: [*draw(parts[BOTH], y=y), *at_best_rate(y)], titles, "width")
    for sites in ("u", "v"):
        see = {"nll": f"{sites} alone: lower is better"}
        found += panels(partial(draw, parts[sites]), see, "width")
    groups = table[table["sites"] == BOTH].groupby(["law", "width"])
    means = groups[["forecast_correlation", "correlation"]].mean()
    points = [
        Curve(law, *means.loc[law].T.values.tolist(), colour=colour, style="points")
        for law, colour in names.items()
        if law in means.index
    ]
    line = Curve("as forecast", [0.2, 1.0], [0.2, 1.0], colour="#c7c7c7", style="dash")
    axes = ("forecast before training", LABELS["correlation"])
    see = "is correlation known before training?"
    return Figure([*found, Panel(see, *axes, [*points, line])])
