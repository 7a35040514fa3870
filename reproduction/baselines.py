"""Baselines: one network and M separate networks, at the learning rate that is best for one.

A fair comparison needs a reference network that is trained as well as possible. Its rate is the one
that the tuning recorded for networks. Without a record, each cell chooses its rate by the log loss
on held-out samples; the networks are then trained on all training samples.

Baseline cells belong to no figure: results of one experiment are reused by the others in the same
results folder.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from embens import independent, metrics
from reproduction.claims import Claim
from reproduction.datasets import DataSet
from reproduction.drawing import BLACK, GREY, Curve, curves
from reproduction.grid import cells
from reproduction.grid.cells import Cell, Row, Sweep, training_cost
from reproduction.grid.settings import NETWORKS as NETWORKS_FAMILY
from reproduction.grid.settings import load_data
from reproduction.rows import Frame, MissingCellsError, Rows, Selection
from reproduction.training import Training, outputs_of, train

FACTORS = (1.0, 4.0, 16.0)
"""Learning rates that are tried, relative to the preset's."""
TRIAL_NETWORKS = 2  # trained for each rate
NETWORKS = 8  # about the paper's best M
ONE, SEPARATE = "one network", "separate networks"


def sweep(width: Any) -> Sweep:
    """Return the sweep of the baselines at some relative widths."""
    return cells.sweep("baselines", width=width, networks=NETWORKS)


def estimate_cost(cell: Cell) -> float:
    """Return the rough cost of a cell, including the choice of the rate."""
    trainings = cell["networks"]
    if NETWORKS_FAMILY not in dict(cell.setting.rates):
        trainings += TRIAL_NETWORKS * len(FACTORS)
    return training_cost(cell.with_values(members=trainings))


def measure(cell: Cell) -> list[Row]:
    """Choose the learning rate and train separate networks with it.

    Args:
        cell: The cell.

    Returns:
        A row for 1, 2, 4 and all networks.
    """
    data = load_data(cell.setting)
    rate = dict(cell.setting.rates).get(NETWORKS_FAMILY)
    if rate is None:
        rate = choose_rate(cell, data)
    trained = train_separate(cell, cell["networks"], rate, data)
    rows = []
    for members in (1, 2, 4, cell["networks"]):
        subset = replace(trained, ensemble=trained.ensemble.subset(range(members)))
        rows.append({"members": members, "rate": rate, **subset.evaluate()})
    return rows


def choose_rate(cell: Cell, data: DataSet) -> float:
    """Return the best of a few learning rates by the log loss on held-out samples."""
    held_out = with_validation(data, cell.seed)
    rates = [factor * cell.setting.lr for factor in FACTORS]
    losses = {rate: held_out_loss(cell, held_out, rate) for rate in rates}
    return min(rates, key=losses.__getitem__)


def with_validation(data: DataSet, seed: int) -> DataSet:
    """Return the data with a validation part: a random fifth, unless there is one already."""
    if data.validation is not None:
        return data
    generator = torch.Generator().manual_seed(seed)
    return data.split(len(data.train.targets) // 5, generator=generator)


def train_separate(cell: Cell, networks: int, rate: float, data: DataSet) -> Training:
    """Train separate networks at a learning rate."""
    network, generator = cell.build_reference()
    ensemble = independent(network, networks, generator=generator)
    return train(cell, ensemble, data=data, lr=rate)


def held_out_loss(cell: Cell, data: DataSet, rate: float) -> float:
    """Return the validation loss of networks trained at a learning rate; infinite on divergence."""
    trial = train_separate(cell, TRIAL_NETWORKS, rate, data)
    if trial.diverged:
        return math.inf
    assert data.validation is not None
    outputs = outputs_of(trial.ensemble, data.validation.inputs)
    return float(metrics.member_nll(outputs, data.validation.targets).mean())


def baseline_rows(rows: Rows) -> Rows:
    """Return the rows of the baselines; only these have a number of networks."""
    if "networks" not in rows.frame:
        return Rows(rows.frame.iloc[:0])
    return Rows(rows.frame[rows.frame["networks"].notna()])


def ensemble_rows(rows: Rows) -> Rows:
    """Return the rows of the embedded ensembles."""
    return Rows(rows.frame.drop(baseline_rows(rows).frame.index))


def lines(table: Frame, column: str, *, width: float = 1.0) -> list[Curve]:
    """Return one network as a horizontal line, and separate networks against M.

    Args:
        table: The table.
        column: Column of the ordinate.
        width: Relative width of the networks.

    Returns:
        The curves; empty if no baselines were measured.
    """
    rows = baseline_rows(Rows(table)).frame
    if not len(rows):
        return []
    rows = rows[rows["width"] == width]
    most_members = float(table["members"].max())
    most_networks = rows["members"].max()
    ends = ""
    if most_networks < most_members:
        ends = f"{most_networks:g} were trained"
    all_curves = []
    one = rows[rows["members"] == 1]
    for curve in curves(one, "members", column, label=ONE, colours=BLACK):
        all_curves.append(
            replace(curve, x=[1.0, most_members], y=curve.y * 2, error=[], style="dash")
        )
    several = rows[rows["members"] > 1]
    for curve in curves(several, "members", column, label=SEPARATE, colours=GREY):
        all_curves.append(replace(curve, ends=ends, style="dash"))
    return all_curves


def with_lines(
    draw_column: Callable[..., list[Curve]], table: Frame, width: float = 1.0
) -> Callable[..., list[Curve]]:
    """Return a function that draws a column together with the lines of the baselines."""
    return lambda y: [*draw_column(y=y), *lines(table, y, width=width)]


def largest_ensembles(rows: Rows, selection: Selection) -> Rows:
    """Return the selected rows with the most members, at most as many as there are baselines."""
    return selection(rows).between("members", high=NETWORKS).last("members")


def accuracy_of_networks(rows: Rows, ensembles: Rows, networks: int) -> float:
    """Return the accuracy of some separate networks of the ensembles' width."""
    width = float(ensembles["width"].fillna(1.0).max()) if "width" in ensembles.frame else 1.0
    baselines = baseline_rows(rows)
    if not len(baselines.frame):
        raise MissingCellsError("cells of the baselines")
    return baselines.where(width=width, members=networks).mean("accuracy")


def gain_over_one(rows: Rows, selection: Selection) -> float:
    """Return the accuracy of the selected ensembles minus that of one network."""
    ensembles = largest_ensembles(rows, selection)
    return ensembles.mean("accuracy") - accuracy_of_networks(rows, ensembles, 1)


def gain_over_separate(rows: Rows, selection: Selection) -> float:
    """Return the accuracy of the selected ensembles minus that of as many separate networks."""
    ensembles = largest_ensembles(rows, selection)
    networks = int(ensembles.mean("members"))
    return ensembles.mean("accuracy") - accuracy_of_networks(rows, ensembles, networks)


def claims(selection: Selection, jumps: bool = False) -> list[Claim]:
    """Return claims that compare selected members with one network and with separate networks.

    The comparison uses at most eight members, and networks of the members' width.

    Args:
        selection: Selects the ensembles.
        jumps: Whether the selection itself can change from one set of seeds to another.

    Returns:
        Two claims.
    """
    measure_text = "difference of test accuracies, at the largest M up to 8"
    return [
        Claim(
            statement="the ensemble is more accurate than one network at its best rate",
            measure=measure_text,
            statistic=partial(gain_over_one, selection=selection),
            above=0.0,
            paper="ensembles improve on a single model",
            jumps=jumps,
        ),
        Claim(
            statement="the ensemble is as accurate as M separate networks (to 1 %)",
            measure=measure_text,
            statistic=partial(gain_over_separate, selection=selection),
            above=-0.01,
            paper="as if trained independently",
            jumps=jumps,
        ),
    ]
