"""Laws of modulations (ours: laws).

M members with modulations of several laws, for u and v or for one of them, against width. Centred
laws have E u² = 1; mixed laws additionally have the mean √½. N(1, ½) has a standard deviation of ½
and so E u² = 5/4. Two quantities are known before training: the coupling and the effective width.

Laws of equal mean and second moment have different tails, and some are common initialisations. In
the limit only the two moments of u count; ``docs/theory.md`` explains what tails cost at finite
width. Every ensemble is trained in the same way, with γ=M.
"""

import math
from functools import partial
from statistics import fmean

from embens import EmbeddedEnsemble, embed, independent, masksembles
from embens.laws import Bernoulli, Correlated, Normal, Shifted, Signs, Ternary, Uniform
from embens.theory import effective_width, regime
from reproduction import baselines
from reproduction.baselines import baseline_rows
from reproduction.claims import Claim, difference
from reproduction.drawing import BLACK, BROWN, GREY, Curve, Figure, curves, panels, shades, state
from reproduction.grid.cells import Cell, Row, sweep
from reproduction.grid.settings import MODULATIONS, load_data, of_preset
from reproduction.rows import Frame, Rows, fit_slope, where
from reproduction.training import disagreement, outputs_of, train

MEAN = math.sqrt(0.5)
CENTRED = {
    "±1": Signs(0.0),
    "N(0, 1)": Normal(),
    "uniform": Uniform(),
    "ternary, ⅓ zeros": Ternary(1 / 3, math.sqrt(1.5)),
    "ternary, ⅔ zeros": Ternary(2 / 3, math.sqrt(3)),
}
MIXED = {
    "±1, mean √½": Signs(MEAN),
    "N(√½, ½)": Shifted(MEAN),
    "uniform, mean √½": Uniform(MEAN - math.sqrt(1.5), MEAN + math.sqrt(1.5)),
    "Bernoulli": Bernoulli(0.5, math.sqrt(2)),
}
LAWS = {**CENTRED, **MIXED, "N(1, ½)": Normal(1.0, 0.5)}
ONE, FASTER, SEPARATE = "one network", "one network, M × rate", "separate networks"
MASKS, ATTRACT, REPEL = "Masksembles", "±1, u attract", "±1, u repel"
ORDER = (SEPARATE, *LAWS, MASKS, ATTRACT, REPEL)
BOTH = "u and v"
WIDTHS = {"quick": (2.0, 4.0, 8.0), "cpu": (0.5, 1.0, 2.0), "paper": (0.5, 1.0, 2.0)}
MEMBERS = {"quick": 8, "cpu": 4, "paper": 8}
ONE_SIDED = {"quick": list(CENTRED), "cpu": ["±1", "N(0, 1)"], "paper": ["±1", "N(0, 1)"]}
"""Laws that are also used for u or v alone."""
CHANGES = {"quick": {"train": 500}}  # all digits would be too easy

POOLED = True
SWEEP = [
    sweep(law=(ONE, FASTER), sites="none", width=WIDTHS, members=1),
    sweep(law=ORDER, sites=BOTH, width=WIDTHS, members=MEMBERS),
    sweep(law=ONE_SIDED, sites=("u", "v"), width=WIDTHS, members=MEMBERS),
    baselines.sweep(WIDTHS),
]


def build(cell: Cell) -> EmbeddedEnsemble:
    """Return the untrained ensemble of a cell."""
    network, generator = cell.build_reference()
    name, members = cell["law"], cell["members"]
    if name in (ONE, FASTER, SEPARATE):
        return independent(network, members, generator=generator)
    if name == MASKS:
        return masksembles(network, members, overlap=0.5, generator=generator)
    if name == ATTRACT:
        return embed(network, members, Signs(0.0), Correlated(0.5), generator=generator)
    if name == REPEL:
        post = Correlated(-0.5 / (members - 1))
        return embed(network, members, Signs(0.0), post, generator=generator)
    law = LAWS[name]
    pre = law if cell["sites"] in ("v", BOTH) else None
    post = law if cell["sites"] in ("u", BOTH) else None
    return embed(network, members, pre, post, generator=generator)


def predictions(cell: Cell, ensemble: EmbeddedEnsemble) -> Row:
    """Return the quantities that are known before training."""
    samples = 2 if cell.setting.network == "mlp" else 1
    inputs = load_data(cell.setting).train.inputs[:samples].double()
    return {
        "coupling": regime(ensemble, inputs).coupling,
        "effective_width": effective_width(ensemble, inputs),
    }


def measure(cell: Cell) -> Row:
    """Train one ensemble and score it."""
    ensemble = build(cell)
    before_training = predictions(cell, ensemble)
    lr = cell.setting.rate_of(MODULATIONS)
    if cell["law"] == FASTER:
        lr *= of_preset(MEMBERS, cell.setting.preset)
    training = train(cell, ensemble, lr=lr)
    outputs = outputs_of(ensemble, training.data.test.inputs)
    return {**training.evaluate(), "disagreement": disagreement(outputs), **before_training}


def cost_of_tails(rows: Rows, column: str) -> float:
    """Return the change of a column per halving of the effective width, over centred laws.

    Each law is one point, also where two laws have the same effective width.
    """
    slopes = []
    for _, rows_of_width in rows.where(law=list(CENTRED), sites=BOTH).by("width"):
        log_widths, means = [], []
        for _, rows_of_law in rows_of_width.by("law"):
            log_widths.append(math.log2(rows_of_law.mean("effective_width")))
            means.append(rows_of_law.mean(column))
        slopes.append(fit_slope(log_widths, means))
    return -fmean(slopes)


def compared(statement: str, column: str, law: str, other: str, below: float) -> Claim:
    """Return the claim that the difference of a column between two laws is below a value."""
    sites = [BOTH, "none"]
    return Claim(
        statement=statement,
        measure=f"{column}: {law} minus {other}, mean over widths",
        statistic=difference(column, where(law=law, sites=sites), where(law=other, sites=sites)),
        below=below,
    )


PER_HALVING = "change per halving of the effective width, centred laws for u and v"
CLAIMS = [
    compared("signs have a lower log loss than normal modulations", "nll", "±1", "N(0, 1)", 0.0),
    compared(
        "signs have a lower log loss than normal modulations with the mean √½",
        "nll",
        "±1, mean √½",
        "N(√½, ½)",
        0.0,
    ),
    compared("signs are better than one network at the same rate", "nll", "±1", ONE, 0.0),
    compared("signs are better than one network at M times the rate", "nll", "±1", FASTER, 0.0),
    compared("signs are as good as separate networks, to 0.01 nats", "nll", "±1", SEPARATE, 0.01),
    compared(
        "members with N(1, ½) are nearly equal: separate networks are less correlated, by 0.3",
        "correlation",
        SEPARATE,
        "N(1, ½)",
        -0.3,
    ),
    Claim(
        statement="the more width tails cost, the less accurate is a member",
        measure=f"member accuracy: {PER_HALVING}",
        statistic=partial(cost_of_tails, column="member_accuracy"),
        below=0.0,
    ),
    Claim(
        statement="the more width tails cost, the larger is the log loss",
        measure=f"log loss: {PER_HALVING}",
        statistic=partial(cost_of_tails, column="nll"),
        above=0.0,
    ),
    *baselines.claims(lambda rows: rows.where(law="±1", sites=BOTH).last("width")),
]


def best_law(rows: Rows, column: str, sites: str) -> str:
    """Return the law of the best mean at the largest width, of all members at some sites."""
    members = rows.where(sites=sites).last("width").frame
    means = members.groupby("law")[column].mean().sort_values()
    best = means.index[-1 if "accuracy" in column else 0]
    return f"{best} (width {members['width'].iloc[0]:g})"


def lowest_loss_text(rows: Rows, sites: str) -> str:
    """Return a title with the best law of modulations at some sites alone."""
    return f"{sites} alone: lowest loss with {best_law(rows, 'nll', sites)}"


def titles_of_both(rows: Rows) -> dict[str, str]:
    """Return the titles of the panels of u and v together, with the best law of each column."""
    titles = {}
    for column, statement, otherwise in (
        ("nll", "lowest loss", "u and v"),
        ("accuracy", "most accurate", "accuracy"),
        ("member_accuracy", "best members", "members"),
        ("correlation", "least correlated", "correlation"),
    ):
        titles[column] = state(partial(best_law_text, rows, column, statement), otherwise)
    return {**titles, "effective_width": "effective width, before training"}


def best_law_text(rows: Rows, column: str, statement: str) -> str:
    """Return a title with the best law of a column for u and v together."""
    return f"u and v: {statement} with {best_law(rows, column, BOTH)}"


def plot(table: Frame) -> Figure:
    """Return the scores against width for u and v together, and the log loss for each alone."""
    colours = {ONE: BLACK, FASTER: BROWN, SEPARATE: GREY}
    turbo = shades(range(len(ORDER) - 1), "turbo")
    colours.update(zip(ORDER[1:], turbo.values(), strict=True))
    draw = partial(curves, x="width", by="law", colours=colours)

    def rows_with(sites: str) -> Frame:
        return table[table["sites"].isin([sites, "none"])]

    tuned = baseline_rows(Rows(table)).frame
    members = table.loc[table["sites"] == BOTH, "members"].max()

    def draw_tuned(label: str, networks: int, y: str) -> list[Curve]:
        return curves(
            tuned[tuned["members"] == networks],
            "width",
            y,
            label=f"{label}, best rate",
            colours=colours[label],
            style="dash",
        )

    def draw_both(y: str) -> list[Curve]:
        return [
            *draw(rows_with(BOTH), y=y),
            *draw_tuned(ONE, 1, y),
            *draw_tuned(SEPARATE, members, y),
        ]

    all_panels = panels(draw_both, titles_of_both(Rows(table)), "width")
    for sites in ("u", "v"):
        if not (table["sites"] == sites).any():
            continue
        text = state(partial(lowest_loss_text, Rows(table), sites), f"{sites} alone")
        all_panels += panels(partial(draw, rows_with(sites)), {"nll": text}, "width")
    return Figure(all_panels)
