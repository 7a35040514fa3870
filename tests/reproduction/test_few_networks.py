"""Separate networks with longer training, a part of compare."""

from dataclasses import replace

import pandas
import pytest

from reproduction import few_networks
from reproduction.__main__ import main
from reproduction.competitors import FOUR_NETWORKS, SEPARATE, TWO_NETWORKS
from reproduction.figures import compare
from reproduction.grid.cells import cells_of
from reproduction.grid.settings import PRESETS

TIMES = ("training_seconds", "inference_seconds")


def few_cells(preset="quick"):
    cells = cells_of("compare", PRESETS[preset], [0])
    return [cell for cell in cells if cell.experiment == "few-networks"]


@pytest.mark.parametrize("cell", few_cells("cpu"), ids=lambda cell: str(cell.values))
def test_networks_times_epochs_is_the_budget(cell):
    networks = few_networks.as_separate_networks(cell)
    members = {TWO_NETWORKS: 2, FOUR_NETWORKS: 4}[cell["system"]]
    assert compare.members_of(networks) == members
    paid = cell["budget"] * cell.setting.epochs
    assert compare.epochs_of(networks) * members == pytest.approx(paid, abs=members / 2)


def test_every_budget_is_swept_that_trains_networks_as_long_as_one():
    budgets = {}
    for cell in few_cells("cpu"):
        budgets.setdefault(cell["system"], []).append(cell["budget"])
    assert budgets == {TWO_NETWORKS: [2, 4, 8], FOUR_NETWORKS: [4, 8]}


@pytest.mark.parametrize("budget", [2, 4])
def test_two_networks_are_separate_networks_at_twice_the_compute_only(budget):
    (cell,) = [
        replace(cell, setting=replace(cell.setting, epochs=2))
        for cell in few_cells()
        if cell["system"] == TWO_NETWORKS and cell["budget"] == budget
    ]
    few = few_networks.measure(cell)
    many = compare.measure(replace(cell.with_values(system=SEPARATE), experiment="compare"))
    assert few["epochs"] == budget
    for name in TIMES:
        del few[name], many[name]
    assert (few == many) == (budget == 2)


def test_a_run_adds_few_networks_to_the_published_systems(tmp_path, capsys):
    options = ["--epochs", "1", "--workers", "0", "--seeds", "1", "--out", str(tmp_path)]
    main(["compare", *options, "--only", "system=separate networks", "budget=2"])
    folder = tmp_path / "compare" / "quick"
    (folder / "results.jsonl").unlink()
    main(["compare", *options, "--only", "system=separate networks,two networks", "budget=2"])
    assert "1 cells measured" in capsys.readouterr().out
    table = pandas.read_csv(folder / "table.csv")
    assert list(table["system"]) == [SEPARATE, TWO_NETWORKS]
    assert table["nll"].nunique() == 1
