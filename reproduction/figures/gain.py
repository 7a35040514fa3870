"""Many models inside one network: what they gain, and what they cost (ours: gain and cost).

Members that differ by signs with mean p, inside one network, against one network and separate ones
at the best rate for one network; the lower the log loss, the better.

Signs have the moments and the limit of N(p, 1 − p²), and do better here, though not on all data
(``docs/adr/0008-default-law.md``). The width, the number of images and the rate of the quick preset
were chosen once, for eight members at p = 0, on train images that are not used here. The network of
the other experiments, 16 units wide, is too narrow to gain.
"""

from functools import partial

from embens import laws
from embens.embedding.families import embed
from reproduction import baselines as fair
from reproduction.claims import Claim, Frame, Rows, less, where
from reproduction.grid.cells import Cell, Row, sweep, train
from reproduction.drawing import Figure, Panel, curves, panels, shades

SHIFTS = (0.0, 0.5, 0.9, 1.0)
MEMBERS = {"quick": (2, 4, 8), "cpu": (2, 4, 8, 16), "paper": (2, 4, 8, 16)}
WIDTH = {"quick": 4.0, "cpu": 1.0, "paper": 1.0}
RATE = {"quick": 4.0, "cpu": 1.0, "paper": 1.0}  # times the setting's
SEEDS = {"quick": 15, "cpu": 5, "paper": 3}
QUICK = {"train": 500, "lr": 0.012}

SWEEP = [sweep(p=SHIFTS, members=MEMBERS, width=WIDTH), fair.sweep(WIDTH)]


def measure(cell: Cell) -> Row:
    """Train one ensemble."""
    law = laws.Signs(cell.p)
    ensemble = cell.make(embed, pre=law, post=law)
    lr, gamma = RATE[cell.setting.preset] * cell.setting.lr, ensemble.natural_gamma
    return train(cell, ensemble, lr=lr, gamma=gamma).evaluate()


_eight, _one = where(p=0.0, members=8), where(networks=8, members=1)
CLAIMS = [
    *fair.claims(_eight),
    Claim(less("nll", _eight, _one), below=0.0).says(
        "eight members have a lower log loss than one network at its own best rate",
        "ensembles improve on a single model",
        "difference of test log losses, M=8 less one network",
    ),
    Claim(less("accuracy", _eight, where(p=1.0, members=8)), above=0.0).says(
        "eight members that differ are better than eight that are one model",
        "at p=1 an embedded ensemble is a single model",
        "difference of test accuracies, p=0 less p=1, M=8",
    ),
    Claim(lambda t: _eight(t).mean("parameters") / _one(t).mean("parameters"), below=2.0).says(
        "eight members have less than twice the parameters of one network",
        "approximately the same as in the reference model",
        "ratio of parameters, M=8 to one network",
    ),
]


def plot(table: Frame) -> Figure:
    """Return quality and correlation against M, and log loss against parameters."""
    table = table.assign(size=table["parameters"] / table["parameters"].min())
    own, others = fair.without(Rows(table)).frame, fair.only(Rows(table)).frame
    colours, width = shades(table["p"].dropna()), float(table["width"].max())
    draw = partial(curves, own, by="p", label="inside one network, p={}", colours=colours)
    titles = {
        "accuracy": "accuracy: members that differ add up",
        "nll": "log loss: lower is better",
        "correlation": "p=0: members err apart; p=1: together",
    }
    style = {"label": fair.SEPARATE, "colours": "#7f7f7f", "style": "dash"}
    sizes = [*draw("size", "nll"), *curves(others, "size", "nll", **style)]
    found = panels(fair.beside(partial(draw, "members"), table, width=width), titles)
    cost = Panel("what each costs", "parameters, times one network", "log loss, test", sizes)
    return Figure([*found, cost])
