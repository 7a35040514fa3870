"""The battery of the experiment compare, and the compute that each system gets."""

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
from tests.reproduction.battery import Battery

SETTING = cells_of("compare", PRESETS["quick"], [0])[0].setting


class TestCompare(Battery):
    name = "compare"
    timed = ("training_seconds", "inference_seconds")

    @staticmethod
    def confirming_rows(cell, noise):
        loss = typical_loss(cell["system"], two_networks=0.26) - 0.01 * math.log2(cell["budget"])
        if cell["system"] in SIGNS:
            loss -= 0.01 * math.log2(cell["budget"])
        return make_row(loss, noise)

    @staticmethod
    def contradicting_rows(cell, noise):
        loss = typical_loss(cell["system"], two_networks=0.28) - 0.01 * math.log2(cell["budget"])
        if cell["system"] == SIGNS[2]:
            loss = 0.2
        elif cell["system"] in SIGNS:
            loss = 0.4
        return make_row(loss, noise)


def typical_loss(system, two_networks):
    losses = {
        ONE: 0.3,
        WIDE: 0.29,
        SEPARATE: 0.27,
        TWO_NETWORKS: two_networks,
        SIGNS[0]: 0.25,
        SIGNS[1]: 0.215,
    }
    return losses.get(system, 0.35)


def make_row(loss, noise):
    return {
        "accuracy": 1 - loss + noise(0.001),
        "member_accuracy": 0.95 - loss,
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


def cell_of(system, budget, seed=0, setting=SETTING):
    return Cell(setting, {"system": system, "budget": budget, "seed": seed}, "compare")


def make_table(losses):
    """Return a table from log losses by ``(system, budget)``."""
    rows = []
    for (system, budget), loss in losses.items():
        row = {"system": system, "budget": budget, "seed": 0, "guessing": 2.77}
        rows.append({**row, "accuracy": 1 - loss, "nll": loss, "scaled_nll": loss})
    return pandas.DataFrame(rows)


LOSSES = {(ONE, 1): 9.0, (ONE, 2): 0.5, (ONE, 4): 0.1, (SIGNS[0], 1): 0.0, (SIGNS[0], 2): 0.4}


def test_systems_are_compared_at_the_largest_budget_that_both_have():
    rows = Rows(make_table(LOSSES))

    assert compare.advantage(rows, "nll", SIGNS[0], ONE) == pytest.approx(-0.1)


def test_systems_without_a_common_budget_are_not_compared():
    rows = Rows(make_table({(ONE, 4): 1.0, (SIGNS[0], 2): 1.0}))

    with pytest.raises(MissingCellsError, match="budget of both"):
        compare.advantage(rows, "nll", SIGNS[0], ONE)


def test_trend_is_a_slope_per_doubling_of_the_budget():
    rows = Rows(make_table({**LOSSES, (ONE, 1): 0.2}))

    # The differences are -0.2 at 1 × and -0.1 at 2 ×.
    assert compare.trend_of_advantage(rows) == pytest.approx(0.1)


@pytest.mark.parametrize("budget", [1, 2, 4, 8])
@pytest.mark.parametrize("system", SYSTEMS)
def test_epochs_times_cost_of_a_pass_is_the_budget(system, budget):
    cell = cell_of(system, budget, setting=replace(SETTING, epochs=16))

    epochs = compare.epochs_of(cell)

    if system == WIDE:
        assert epochs == 16  # the width pays for the rest
    elif SYSTEMS[system].shares_pass:
        assert epochs == 16 * budget
    else:
        assert epochs * compare.members_of(cell) == 16 * budget


@pytest.mark.parametrize(
    ("network", "channels"),
    [("cnn", (8, 16)), ("norm-cnn", (8, 16)), ("mlp", (32, 32, 32))],
)
def test_wider_network_costs_the_budget(network, channels):
    cell = cell_of(WIDE, 4, setting=replace(SETTING, network=network, channels=channels))
    images = torch.zeros(1, 1, 8, 8)

    width = compare.affordable_width(cell, images)

    cost = compare.operations(compare.reference_of(cell, 1.0), images)
    cost_of_wider = compare.operations(compare.reference_of(cell, width), images)
    assert cost_of_wider / cost == pytest.approx(4.0, rel=0.1)


def test_norm_network_depends_on_its_generator_only():
    setting = replace(SETTING, network="norm-cnn", channels=(4, 8))
    image = torch.ones(2, 1, 8, 8)

    first = build_reference(setting, generator=torch.Generator().manual_seed(1))
    torch.randn(3)
    second = build_reference(setting, generator=torch.Generator().manual_seed(1))

    assert torch.equal(first(image), second(image))
    assert any(isinstance(module, torch.nn.BatchNorm2d) for module in first)


def test_systems_are_trained_at_their_recorded_rates(monkeypatch):
    setting = replace(SETTING, epochs=1, rates=((SIGNS[0], 0.02), (ONE, 0.3)))
    train_system = compare.train_system
    rates = []

    def record_rate(cell, problem, rate):
        rates.append(rate)
        return train_system(cell, problem, rate)

    monkeypatch.setattr(compare, "train_system", record_rate)
    row = compare.measure(cell_of(SIGNS[0], 1, setting=setting))

    assert rates == [0.02]
    assert row["lr"] == 0.02


def test_split_batch_trains_each_member_on_its_rows():
    problem = load_problem(SETTING)
    problem = replace(problem, data=compare.with_validation(problem.data, 0))
    split_cell = cell_of(SPLIT[0], 1, setting=replace(SETTING, epochs=1))
    whole_cell = split_cell.with_values(system=SIGNS[0], budget=2)

    split = compare.train_system(split_cell, problem, 0.01).ensemble
    whole = compare.train_system(whole_cell, problem, 0.01).ensemble

    assert compare.epochs_of(split_cell) == 1
    differences = []
    for split_parameter, parameter in zip(split.parameters(), whole.parameters(), strict=True):
        differences.append(not torch.equal(split_parameter, parameter))
    assert any(differences)
