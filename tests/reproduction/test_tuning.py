"""The choice of learning rates on validation data, and its record."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pandas
import pytest

from reproduction import tuning
from reproduction.__main__ import main
from reproduction.grid.cells import Cell, cells_of
from reproduction.grid.settings import UNTUNED, Setting, read_choices, with_choice
from reproduction.rows import MissingCellsError
from tests.reproduction import problem
from tests.reproduction.battery import check_figure, check_measurement


def table(losses, diverged=()):
    """Return a table from losses by ``(family, p, length, rate)``."""
    rows = []
    for (family, p, length, rate), loss in losses.items():
        row = {"family": family, "p": p, "members": 4, "length": length, "lr": rate, "seed": 0}
        has_diverged = float((family, rate) in diverged)
        rows.append({**row, "validation_nll": loss, "diverged": has_diverged})
    return pandas.DataFrame(rows)


LOSSES = {
    ("networks", 0.0, 20, 0.1): 2.05,
    ("networks", 0.0, 30, 0.05): 2.1,
    ("networks", 0.0, 30, 0.1): 2.011,
    ("networks", 0.0, 40, 0.1): 2.0,
    ("signs", 0.0, 30, 0.05): 2.0,
    ("signs", 0.9, 30, 0.05): 2.1,
    ("signs", 0.0, 30, 0.1): 1.9,
    ("signs", 0.9, 30, 0.1): 2.3,
}


def test_the_shortest_length_near_the_best_is_chosen():
    assert tuning.choose(table(LOSSES))["epochs"] == 30  # 40 is better by 0.011 only


def test_the_rate_of_a_family_is_the_best_on_average_over_its_cases():
    choice = tuning.choose(table(LOSSES))
    assert choice["rates"] == {"networks": 0.1, "signs": 0.05}
    assert choice["validation_nll"]["signs"] == {"0.05": 2.05, "0.1": 2.1}


def test_a_rate_that_diverges_is_not_chosen():
    choice = tuning.choose(table(LOSSES, diverged={("signs", 0.05)}))
    assert choice["rates"]["signs"] == 0.1
    with pytest.raises(MissingCellsError, match="signs does not diverge"):
        tuning.choose(table(LOSSES, diverged={("signs", 0.05), ("signs", 0.1)}))


def test_every_family_of_the_presets_is_tuned():
    families = {cell["family"] for cell in cells_of("tuning", UNTUNED["cpu"])}
    assert families == {"networks", "modulations", "signs", "dropout", "last layer", "low rank"}


@pytest.mark.parametrize("family", ["networks", "signs", "dropout", "last layer", "low rank"])
def test_each_family_is_measured_on_held_out_samples(family):
    values = {"family": family, "p": 0.0, "members": 2, "length": 2, "lr": 0.01, "seed": 0}
    cell = Cell(problem.SETTING, values, "tuning")
    check_measurement(cell)
    row = tuning.measure(cell)
    assert math.isfinite(row["validation_nll"])
    longer = tuning.measure(cell.with_values(length=4))
    assert longer["validation_nll"] != row["validation_nll"]


def test_the_table_becomes_a_figure():
    check_figure(tuning.plot(table(LOSSES)))


def test_a_tuning_is_recorded_and_read_by_the_preset(tmp_path, capsys):
    out, file = tmp_path / "results", tmp_path / "choices.json"
    file.write_text(json.dumps({"cpu": {"epochs": 7, "rates": {}}}))
    arguments = ["--workers", "0", "--seeds", "1", "--out", str(out)]
    only = ["--only", "family=networks", "lr=0.003,0.048"]
    assert main(["tuning", *arguments, *only]) == 0
    assert main(["record", str(out), "--file", str(file)]) == 0
    assert "quick: 60 epochs" in capsys.readouterr().out
    choices = read_choices(file)
    assert choices["cpu"] == {"epochs": 7, "rates": {}}
    setting = with_choice(replace(Setting(), epochs=1), choices["quick"])
    assert setting.epochs == 60
    assert setting.rate_of("networks") in (0.003, 0.048)
    assert setting.rate_of("signs") == Setting().lr
    assert with_choice(setting, None) is setting


def test_a_folder_without_a_tuning_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["record", str(tmp_path)])
    assert "finished tuning" in capsys.readouterr().err
