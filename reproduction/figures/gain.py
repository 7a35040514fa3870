"""Gain and cost of many models inside one network (ours: gain and cost).

Members that differ by random signs with mean p, inside one network, compared with one network and
separate networks at the best learning rate for one network. A lower log loss is better.

Signs have the same moments and limit as N(p, 1 − p²), and do better here, though not on all data
(``docs/adr/0008-default-law.md``). The width, the number of images and the rate of the quick preset
were chosen once, for eight members at p = 0, on training images that are not used here. The network
of the other experiments, 16 units wide, is too narrow to gain.
"""

from functools import partial

from embens import embed, laws
from reproduction import baselines
from reproduction.baselines import baseline_rows, ensemble_rows
from reproduction.claims import Claim, difference
from reproduction.drawing import GREY, Figure, Panel, curves, panels, shades, state
from reproduction.grid.cells import Cell, Row, sweep
from reproduction.grid.settings import SIGNS, of_preset
from reproduction.rows import Frame, Rows, where
from reproduction.training import train

SHIFTS = (0.0, 0.5, 0.9, 1.0)
MEMBERS = {"quick": (2, 4, 8), "cpu": (2, 4, 8, 16), "paper": (2, 4, 8, 16)}
WIDTH = {"quick": 4.0, "cpu": 1.0, "paper": 1.0}
RATE = {"quick": 4.0, "cpu": 1.0, "paper": 1.0}
"""Learning rate relative to the setting's."""
SEEDS = {"quick": 15, "cpu": 5, "paper": 3}
CHANGES = {"quick": {"train": 500, "lr": 0.012}}

POOLED = True
SWEEP = [sweep(p=SHIFTS, members=MEMBERS, width=WIDTH), baselines.sweep(WIDTH)]


def measure(cell: Cell) -> Row:
    """Train one ensemble and score it."""
    law = laws.Signs(cell["p"])
    ensemble = cell.build_ensemble(embed, pre=law, post=law)
    lr = of_preset(RATE, cell.setting.preset) * cell.setting.rate_of(SIGNS)
    return train(cell, ensemble, lr=lr, gamma=ensemble.natural_gamma).evaluate()


eight_members = where(p=0.0, members=8)
eight_equal_members = where(p=1.0, members=8)
one_network = where(networks=8, members=1)


def ratio_of_parameters(rows: Rows) -> float:
    """Return the number of parameters of eight members relative to one network."""
    return eight_members(rows).mean("parameters") / one_network(rows).mean("parameters")


def over_one(rows: Rows, column: str) -> float:
    """Return a column of eight members minus that of one network."""
    return eight_members(rows).mean(column) - one_network(rows).mean(column)


COMPARED = "for eight members (p=0) against one network"
CLAIMS = [
    *baselines.claims(eight_members),
    Claim(
        statement="eight members have a lower log loss than one network at its best rate",
        measure="difference of test log losses, M=8 minus one network",
        statistic=difference("nll", eight_members, one_network),
        below=0.0,
        paper="ensembles improve on a single model",
    ),
    Claim(
        statement="eight different members are better than eight equal ones",
        measure="difference of test accuracies, p=0 minus p=1, M=8",
        statistic=difference("accuracy", eight_members, eight_equal_members),
        above=0.0,
        paper="at p=1 an embedded ensemble is a single model",
    ),
    Claim(
        statement="eight members have less than twice the parameters of one network",
        measure="ratio of parameters, M=8 to one network",
        statistic=ratio_of_parameters,
        below=2.0,
        paper="approximately the same as in the reference model",
    ),
]


def plot(table: Frame) -> Figure:
    """Return quality and correlation against M, and log loss against parameters."""
    table = table.assign(size=table["parameters"] / table["parameters"].min())
    embedded = ensemble_rows(Rows(table)).frame
    separate = baseline_rows(Rows(table)).frame
    draw = partial(
        curves,
        embedded,
        by="p",
        label="inside one network, p={}",
        colours=shades(table["p"].dropna()),
    )
    rows = Rows(table)
    titles = {
        "accuracy": state(
            lambda: f"accuracy: {100 * over_one(rows, 'accuracy'):+.1f} points {COMPARED}",
            "accuracy",
        ),
        "nll": state(lambda: f"log loss: {over_one(rows, 'nll'):+.2f} {COMPARED}", "log loss"),
        "correlation": state(
            lambda: f"correlation {eight_members(rows).mean('correlation'):.2f} at p=0, M=8",
            "correlation",
        ),
    }
    width = float(table["width"].max())
    against_members = panels(
        baselines.with_lines(partial(draw, "members"), table, width=width), titles
    )
    against_size = [
        *draw("size", "nll"),
        *curves(separate, "size", "nll", label=baselines.SEPARATE, colours=GREY, style="dash"),
    ]
    size_text = state(
        lambda: f"eight members: {ratio_of_parameters(rows):.2f} × the parameters of one network",
        "parameters",
    )
    cost_panel = Panel(
        size_text, "parameters, relative to one network", "log loss, test", against_size
    )
    return Figure([*against_members, cost_panel])
