"""compare: its battery, and the compute that each system gets."""

from __future__ import annotations

import math
from dataclasses import replace

import pandas
import pytest
import torch

from reproduction.competitors import (
    ONE,
    SEPARATE,
    SIGNS,
    SPLIT,
    SYSTEMS,
    TWO_NETWORKS,
    WIDE,
)
from reproduction.figures import compare
from reproduction.grid.cells import Cell, cells_of
from reproduction.grid.settings import PRESETS, build_reference
from reproduction.problems import load_problem
from reproduction.rows import MissingCellsError, Rows
from tests.reproduction.battery import Battery, check_figure

SETTING = cells_of("compare", PRESETS["quick"], [0])[0].setting


def rows(c, true, noise):
    quality = {ONE: 0.3, WIDE: 0.29, SEPARATE: 0.27, SIGNS[0]: 0.25, SIGNS[1]: 0.215}
    quality[TWO_NETWORKS] = 0.26 if true else 0.28
    loss = quality.get(c["system"], 0.35) - 0.01 * math.log2(c["budget"])
    if c["system"] in SIGNS and true:
        loss -= 0.01 * math.log2(c["budget"])
    elif c["system"] in SIGNS:
        loss = 0.4 if c["system"] != SIGNS[2] else 0.2
    return {
        "accuracy": 1 - loss + noise(0.001),
        "nll": loss + noise(0.001),
        "scaled_nll": loss + noise(0.001),
        "calibration": loss / 4 + noise(0.001),
        "scaled_calibration": loss / 8,
        "auroc": 1 - loss + noise(0.001),
        "guessing": math.log(8),
        "inference_seconds": 0.1,
        "training_seconds": 1.0,
        "parameters": 1000.0,
    }


class TestCompare(Battery):
    name, rows = "compare", staticmethod(rows)
    timed = ("training_seconds", "inference_seconds")


def cell_of(system, budget, seed=0, setting=SETTING):
    return Cell(setting, {"system": system, "budget": budget, "seed": seed}, "compare")


def table_of(losses):
    """Return a table from log losses by ``(system, budget)``."""
    table = []
    for (system, budget), loss in losses.items():
        row = {"system": system, "budget": budget, "seed": 0, "guessing": 2.77}
        table.append({**row, "accuracy": 1 - loss, "nll": loss, "scaled_nll": loss})
    return pandas.DataFrame(table)


LOSSES = {(ONE, 1): 9.0, (ONE, 2): 0.5, (ONE, 4): 0.1, (SIGNS[0], 1): 0.0, (SIGNS[0], 2): 0.4}
WITH_NETWORKS = {**LOSSES, (TWO_NETWORKS, 2): 0.3}


def test_systems_are_compared_at_budgets_of_both():
    rows = Rows(table_of(LOSSES))
    assert compare.advantage(rows, "nll", SIGNS[0], ONE) == pytest.approx(-0.1)
    with pytest.raises(MissingCellsError, match="budget of both"):
        compare.advantage(Rows(table_of({(ONE, 4): 1.0, (SIGNS[0], 2): 1.0})), "nll", SIGNS[0], ONE)


def test_the_trend_is_a_slope_per_doubling():
    rows = Rows(table_of({**LOSSES, (ONE, 1): 0.2}))
    # The differences are -0.2 at 1 × and -0.1 at 2 ×.
    assert compare.trend_of_advantage(rows) == pytest.approx(0.1)


def test_the_summary_states_the_values_of_the_strongest_competitors_at_the_largest_budget():
    figure = compare.summary(table_of(LOSSES))
    check_figure(figure)
    titles = [panel.title for panel in figure.panels]
    assert titles[0] == "accuracy at 2 ×: two members 60.0%, one network 50.0%"
    assert titles[1] == "log loss at 2 ×: two members 0.40, one network 0.50"
    assert "guessing: 2.77" in figure.panels[1].y_label
    assert [curve.label for curve in figure.panels[0].curves] == [ONE, SIGNS[0]]
    titles = [panel.title for panel in compare.summary(table_of(WITH_NETWORKS)).panels]
    assert titles[2].endswith("two members 0.40, two networks 0.30, one network 0.50")


@pytest.mark.parametrize("budget", [1, 2, 4, 8])
@pytest.mark.parametrize("system", SYSTEMS)
def test_epochs_times_cost_of_a_pass_is_the_budget(system, budget):
    cell = cell_of(system, budget, setting=replace(SETTING, epochs=16))
    epochs = compare.epochs_of(cell)
    if system == WIDE:
        assert epochs == 16  # the width pays for the rest
        return
    networks_per_pass = compare.members_of(cell)
    if SYSTEMS[system].shares_pass:
        networks_per_pass = 1
    assert epochs * networks_per_pass == 16 * budget


@pytest.mark.parametrize("network", ["cnn", "norm-cnn", "mlp"])
def test_the_wider_network_costs_the_budget(network):
    setting = replace(SETTING, network=network, channels=(8, 16))
    if network == "mlp":
        setting = replace(setting, channels=(32, 32, 32))
    cell = cell_of(WIDE, 4, setting=setting)
    images = torch.zeros(1, 1, 8, 8)
    width = compare.affordable_width(cell, images)
    costs = [compare.operations(compare.reference_of(cell, each), images) for each in (1.0, width)]
    assert costs[1] / costs[0] == pytest.approx(4.0, rel=0.1)


def test_the_norm_network_depends_on_its_generator_alone():
    setting = replace(SETTING, network="norm-cnn", channels=(4, 8))
    networks = []
    for _ in range(2):
        torch.randn(3)
        generator = torch.Generator().manual_seed(1)
        networks.append(build_reference(setting, generator=generator))
    image = torch.ones(2, 1, 8, 8)
    assert torch.equal(networks[0](image), networks[1](image))
    assert any(isinstance(module, torch.nn.BatchNorm2d) for module in networks[0])


def test_a_system_is_trained_at_its_recorded_rate(monkeypatch):
    setting = replace(SETTING, epochs=1, rates=((SIGNS[0], 0.02), (ONE, 0.3)))
    seen = []

    def train_system(cell, problem, rate):
        seen.append(rate)
        return original(cell, problem, rate)

    original = compare.train_system
    monkeypatch.setattr(compare, "train_system", train_system)
    row = compare.measure(cell_of(SIGNS[0], 1, setting=setting))
    assert seen == [0.02]
    assert row["lr"] == 0.02


def test_a_split_batch_trains_each_member_on_its_rows():
    problem = load_problem(SETTING)
    problem = replace(problem, data=compare.with_validation(problem.data, 0))
    cell = cell_of(SPLIT[0], 1, setting=replace(SETTING, epochs=1))
    split = compare.train_system(cell, problem, 0.01).ensemble
    same = compare.train_system(cell.with_values(system=SIGNS[0], budget=2), problem, 0.01).ensemble
    assert compare.epochs_of(cell) == 1
    pairs = list(zip(split.parameters(), same.parameters(), strict=True))
    assert not all(torch.equal(first, second) for first, second in pairs)
