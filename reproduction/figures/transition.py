"""From the independent to the collective regime (fig:shifting_modulations).

Modulations N(p, 1−p²), and below signs with the same mean, at all hidden sites, γ=M, against the
number of members M; a curve for each p. Black and grey: one network and separate networks, at the
best learning rate for one network. The last panel shows, against p, the correlation and the
coupling of the infinitely wide ensemble, which changes smoothly.

The transition is defined by the measured correlation of members: the p at which it is halfway from
its value at p=0 to 1, its value at p=1, where all members are the same model. Cells with γ=1 at
large p test the paper's explanation of why members improve with M there: γ=M raises the effective
learning rate.
"""

import functools
import math
from functools import partial

from embens import embed, laws
from embens.theory import regime
from reproduction import baselines
from reproduction.claims import Claim, rise_and_fall, slope
from reproduction.drawing import Figure, Mark, Panel, curves, panels, shades, state
from reproduction.grid import cells
from reproduction.grid.cells import Cell, Row, sweep
from reproduction.grid.settings import MODULATIONS, SIGNS, load_data
from reproduction.rows import Frame, MissingCellsError, Rows, where
from reproduction.training import scaled_gamma, train

AROUND_BEST = (3, 14)
"""Numbers of members well below and above the paper's best, 7."""
NEAR = 0.1
"""Distance in p that counts as near the transition."""
FEWEST_SHIFTS = 5
"""With fewer values of p, gaps in the sweep would decide where the transition seems to be."""
MEMBER_TRAIN = "member_train_accuracy"
NORMAL = "normal"
LAW_NAMES = {NORMAL: "N(p, 1−p²)", SIGNS: "signs"}

SHIFTS = {
    "quick": (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0),
    "cpu": (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95),
    "gpu": (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9),
    "paper": (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.8, 0.9, 0.95, 1.0),
}
SIGN_SHIFTS = {"quick": (0.0, 0.9), "cpu": SHIFTS["cpu"], "gpu": (), "paper": (0.0, 0.6, 0.9)}
UNSCALED_SHIFTS = {"quick": (0.8, 0.9), "cpu": (0.9,), "gpu": (), "paper": (0.8, 0.9)}
"""Shifts that are also trained with γ=1."""
MEMBERS = {**cells.MEMBERS, "paper": (1, 2, 3, 5, 7, 10, 14, 20, 28, 40)}
SEVERAL_MEMBERS = {preset: members[1:] for preset, members in MEMBERS.items()}
MOST_SHIFTS = {"quick": (), "cpu": (0.0, 0.6, 0.9), "paper": ()}
"""Shifts that are also trained with 32 members."""
SEEDS = {"quick": 4, "cpu": 3, "paper": 3}

POOLED = True
SWEEP = [
    sweep(law=NORMAL, p=SHIFTS, members=MEMBERS, gamma="M"),
    sweep(law=SIGNS, p=SIGN_SHIFTS, members=MEMBERS, gamma="M"),
    sweep(law=(NORMAL, SIGNS), p=MOST_SHIFTS, members=32, gamma="M"),
    sweep(law=NORMAL, p=UNSCALED_SHIFTS, members=SEVERAL_MEMBERS, gamma="1"),
    baselines.sweep(1.0),
]


def measure(cell: Cell) -> Row:
    """Train one ensemble and score it."""
    is_normal = cell["law"] == NORMAL
    law = laws.Shifted(cell["p"]) if is_normal else laws.Signs(cell["p"])
    family = MODULATIONS if is_normal else SIGNS
    ensemble = cell.build_ensemble(embed, pre=law, post=law)
    coupling = math.nan
    # The coupling depends on p alone, so one number of members is enough.
    if cell["members"] == 2 and cell["gamma"] == "M" and is_normal:
        inputs = load_data(cell.setting).train.inputs[:8]
        coupling = regime(ensemble, inputs.double().cpu()).coupling
    training = train(cell, ensemble, gamma=scaled_gamma(cell), family=family)
    return {**training.evaluate(), "coupling": coupling}


scaled = where(law=NORMAL, gamma="M")


def several_scaled(rows: Rows) -> Rows:
    """Return ensembles of at least four members with γ=M."""
    return scaled(rows).between("members", low=4)


def several_shifts(rows: Rows) -> Rows:
    """Return ensembles of at least four members, if the sweep resolves a transition in p."""
    several = several_scaled(rows)
    if several["p"].nunique() < FEWEST_SHIFTS:
        raise MissingCellsError(f"at least {FEWEST_SHIFTS} values of p")
    return several


@functools.lru_cache(maxsize=256)
def transition_point(rows: Rows) -> float:
    """Return the p at which the correlation is halfway from its value at p=0 to 1 (M ≥ 4)."""
    return several_shifts(rows).halfway("p", "correlation")


def below(rows: Rows) -> Rows:
    """Return the ensembles below the transition."""
    return scaled(rows).between("p", high=transition_point(rows))


def above(rows: Rows) -> Rows:
    """Return the ensembles above the transition, without p=1, where all members are one model."""
    return scaled(rows).between("p", transition_point(rows), 0.999)


def several_below(rows: Rows) -> Rows:
    """Return the ensembles of at least four members below the transition."""
    return below(rows).between("members", low=4)


def several_above(rows: Rows) -> Rows:
    """Return the ensembles of at least four members above the transition."""
    return above(rows).between("members", low=4)


def below_with_many_members(rows: Rows) -> Rows:
    """Return the ensembles below the transition, if the sweep covers the paper's best M."""
    return below(rows).spanning("members", *AROUND_BEST)


def growth_up_to(rows: Rows, distance: float) -> float:
    """Return the fraction of the growth of correlation up to a distance from the transition."""
    import numpy

    shifts, fractions = several_shifts(rows).growth("p", "correlation")
    return float(numpy.interp(transition_point(rows) + distance, shifts, fractions))


def growth_near(rows: Rows) -> float:
    """Return the fraction of the growth of correlation near the transition."""
    return growth_up_to(rows, NEAR) - growth_up_to(rows, -NEAR)


def effect_of_gamma(rows: Rows) -> float:
    """Return the slope of member accuracy per doubling of M with γ=M minus that with γ=1."""
    shifts = sorted(rows.where(gamma="1")["p"].unique())
    compared = rows.where(law=NORMAL, p=shifts).between("members", low=2)
    with_scaling = compared.where(gamma="M").slope("members", "member_accuracy")
    without_scaling = compared.where(gamma="1").slope("members", "member_accuracy")
    return with_scaling - without_scaling


def gap_difference(rows: Rows) -> float:
    """Return the gap between members' train and test accuracy, above minus below."""
    gap_above = several_above(rows).mean(MEMBER_TRAIN) - several_above(rows).mean("member_accuracy")
    gap_below = several_below(rows).mean(MEMBER_TRAIN) - several_below(rows).mean("member_accuracy")
    return gap_above - gap_below


def advantage_of_signs(rows: Rows, column: str) -> float:
    """Return the mean of a column for centred signs minus that for N(0, 1), M ≥ 4."""
    several = rows.where(p=0.0, gamma="M").between("members", low=4)
    return several.where(law=SIGNS).mean(column) - several.where(law=NORMAL).mean(column)


def change_with_members(rows: Rows) -> float:
    """Return the change of correlation past M=10 at the p nearest to the transition.

    It is measured in units of 1 minus the correlation at p=0.
    """
    shifts = [float(p) for p in scaled(rows)["p"].unique()]
    nearest_shift = min(shifts, key=lambda p: abs(p - transition_point(rows)))
    nearest = scaled(rows).where(p=nearest_shift)
    few = nearest.between("members", 2, 7).mean("correlation")
    many = nearest.between("members", 11).mean("correlation")
    start = several_scaled(rows).where(p=0.0).mean("correlation")
    return (many - few) / (1 - start)


# Which p lie below or above depends on the measured transition, so these statistics jump.
conditional_claim = partial(Claim, jumps=True)
CLAIMS = [
    Claim(
        statement="the curves separate into two groups near p=0.6",
        measure="p at which the correlation is halfway from p=0 to p=1 (M ≥ 4)",
        statistic=transition_point,
        above=0.5,
        below=0.7,
        paper="transition at p≈0.6",
    ),
    Claim(
        statement="most of the change happens near the transition",
        measure="fraction of the growth of correlation within 0.1 of the transition in p",
        statistic=growth_near,
        above=0.5,
        paper="p=0.55 and p=0.65 already show the behaviour of their regimes",
    ),
    Claim(
        statement="below the transition the correlation hardly depends on p",
        measure="fraction of the growth of correlation up to 0.1 before the transition",
        statistic=lambda rows: growth_up_to(rows, -NEAR),
        below=0.25,
        paper="almost constant for the whole range of p in the independent regime",
    ),
    conditional_claim(
        statement="above the transition the correlation grows with p",
        measure="slope of correlation in p",
        statistic=slope(several_above, "correlation", "p", log_x=False),
        above=0.0,
        paper="grows with p in the collective regime",
    ),
    conditional_claim(
        statement="below, ensemble accuracy rises with M and falls again",
        measure="smaller of the rise to the best M and the fall to the largest M",
        statistic=rise_and_fall(below_with_many_members),
        above=0.0,
        paper="a distinctive inverted U",
    ),
    conditional_claim(
        statement="below, the best number of members is near 7",
        measure="best M, mean over p",
        statistic=lambda rows: below_with_many_members(rows).best("members"),
        above=3.5,
        below=14.0,
        paper="best accuracy at M=7",
    ),
    conditional_claim(
        statement="above, ensemble accuracy grows with M",
        measure="slope of accuracy per doubling of M",
        statistic=slope(above, "accuracy"),
        above=0.0,
        paper="monotonically grows on average",
    ),
    conditional_claim(
        statement="above, members fit the training data equally well for every M (to 0.25 %)",
        measure="slope of member train accuracy per doubling of M",
        statistic=slope(above, MEMBER_TRAIN),
        above=-0.0025,
        paper="maximal for all sizes in the collective regime",
    ),
    conditional_claim(
        statement="below, member train accuracy falls with M",
        measure="slope of member train accuracy per doubling of M",
        statistic=slope(below, MEMBER_TRAIN),
        below=0.0,
        paper="decreases monotonically and significantly",
    ),
    conditional_claim(
        statement="above, member test accuracy rises with M",
        measure="slope of member accuracy per doubling of M",
        statistic=slope(above, "member_accuracy"),
        above=0.0,
        paper="increases in the collective regime",
    ),
    Claim(
        statement="above, members gain more from M with γ=M than with γ=1",
        measure="difference of the slopes of member accuracy per doubling of M",
        statistic=effect_of_gamma,
        above=0.0,
        paper="γ=M is an effectively higher rate",
    ),
    conditional_claim(
        statement="below, member test accuracy falls with M",
        measure="slope of member accuracy per doubling of M",
        statistic=slope(below, "member_accuracy"),
        below=0.0,
        paper="decreases in the independent regime",
    ),
    conditional_claim(
        statement="the gap between members' train and test accuracy is smaller below",
        measure="gap above the transition minus gap below (M ≥ 4)",
        statistic=gap_difference,
        above=0.0,
        paper="a small difference",
    ),
    conditional_claim(
        statement="at the transition the regime changes with M, near M=10",
        measure="change of correlation past M=10, relative to its growth from p=0 to p=1",
        statistic=change_with_members,
        above=0.5,
        paper="it is driven by M, at M≈10",
    ),
    Claim(
        statement="centred signs leave members more accurate than N(0, 1)",
        measure="member accuracy at p=0, signs minus normal, mean over M ≥ 4",
        statistic=partial(advantage_of_signs, column="member_accuracy"),
        above=0.0,
        paper="– (the same limit)",
    ),
    Claim(
        statement="centred signs make more accurate ensembles than N(0, 1)",
        measure="ensemble accuracy at p=0, signs minus normal, mean over M ≥ 4",
        statistic=partial(advantage_of_signs, column="accuracy"),
        above=0.0,
        paper="– (the same limit)",
    ),
    *baselines.claims(below, jumps=True),
]


PAPER_BEST = Mark("paper: best M=7", x=7.0)
PAPER_TRANSITION = Mark("paper: p=0.6", x=0.6)


def titles_of_law(rows: Rows, law: str) -> dict[str, str]:
    """Return the titles of the panels against M, with the results of one law."""
    several = partial(rows.where, law=law, gamma="M")
    name = LAW_NAMES[law]

    def accuracy() -> str:
        best = several(p=0.0).best("members")
        is_last = best == several(p=0.0)["members"].max()
        return f"{name}: best M={best:g}{', the largest,' if is_last else ''} at p=0"

    def members() -> str:
        low = 100 * several(p=0.0).slope("members", "member_accuracy")
        high = 100 * several(p=0.9).slope("members", "member_accuracy")
        return f"{name}: members {low:+.1f} % (p=0), {high:+.1f} % (p=0.9) per doubling of M"

    def train_accuracy() -> str:
        low = 100 * several(p=0.0).slope("members", MEMBER_TRAIN)
        high = 100 * several(p=0.9).slope("members", MEMBER_TRAIN)
        return f"{name}: train accuracy {low:+.1f} % (p=0), {high:+.1f} % (p=0.9) per doubling"

    def correlation() -> str:
        low = several(p=0.0).between("members", low=4).mean("correlation")
        high = several(p=0.9).between("members", low=4).mean("correlation")
        return f"{name}: correlation {low:.2f} at p=0, {high:.2f} at p=0.9"

    return {
        "accuracy": state(accuracy, f"{name}: ensemble accuracy"),
        "member_accuracy": state(members, f"{name}: member accuracy"),
        MEMBER_TRAIN: state(train_accuracy, f"{name}: member accuracy in training"),
        "correlation": state(correlation, f"{name}: correlation"),
    }


def plot(table: Frame) -> Figure:
    """Return the paper's four panels for both laws, and one against p."""
    rows = Rows(table)
    by_shift = partial(curves, x="members", by="p", colours=shades(table["p"].dropna()))
    all_panels = []
    for law in (NORMAL, SIGNS):
        rows_of_law = table[(table["law"] == law) & (table["gamma"] == "M")]
        if rows_of_law["members"].nunique() < 2:
            continue
        draw_law = partial(by_shift, rows_of_law, label="p={}", ends="no larger M was trained")
        against_members = panels(
            baselines.with_lines(draw_law, table),
            titles_of_law(rows, law),
            marks={"accuracy": [PAPER_BEST]},
        )
        if law == NORMAL:
            unscaled = table[table["gamma"] == "1"]
            against_members[1].curves.extend(
                by_shift(unscaled, y="member_accuracy", label="γ=1, p={}", style="dash")
            )
        all_panels += against_members
    # The transition comes first; then the panels of both laws, in three rows.
    all_panels.insert(0, shift_panel(table))
    return Figure(all_panels)


def shift_panel(table: Frame) -> Panel:
    """Return correlation and coupling of the normal law against p."""
    normal = table[(table["law"] == NORMAL) & (table["gamma"] == "M")]
    member_colours = {2: "#c6a500", 4: "#d39200", 8: "#e07b00", 16: "#c04000", 32: "#a02c00"}
    all_curves = curves(
        normal, "p", "correlation", by="members", label="M={}", colours=member_colours
    )
    all_curves += curves(
        normal, "p", "coupling", label="coupling in the limit", colours="#333333", style="dash"
    )
    title = state(
        lambda: f"halfway to equal members at p={transition_point(Rows(table)):.2f}",
        "correlation against p",
    )
    return Panel(title, "shift p", "correlation, coupling", all_curves, marks=[PAPER_TRANSITION])
