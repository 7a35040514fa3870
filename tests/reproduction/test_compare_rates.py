"""The choice of the learning rates of compare, and its record."""

from __future__ import annotations

import math
from dataclasses import replace

import pandas
import pytest

from embens import metrics
from reproduction import compare_rates
from reproduction.__main__ import main
from reproduction.baselines import with_validation
from reproduction.competitors import ONE, SIGNS, SYSTEMS, TUNED
from reproduction.figures.compare import train_system
from reproduction.grid import settings
from reproduction.grid.cells import cells_of
from reproduction.grid.settings import PRESETS, read_choices, recorded_rates, with_choice
from reproduction.problems import load_problem
from reproduction.rows import MissingCellsError
from reproduction.training import outputs_of
from tests.reproduction.battery import check_figure


def table(losses):
    """Return a table from losses by ``(system, rate)``."""
    rows = []
    for (system, rate), loss in losses.items():
        rows.append({"system": system, "budget": 1, "lr": rate, "seed": 0, "validation_nll": loss})
    return pandas.DataFrame(rows)


def test_the_best_rate_of_a_family_serves_all_its_systems():
    losses = {(ONE, 0.1): 1.0, (ONE, 0.2): 0.9, (SIGNS[1], 0.1): 0.8, (SIGNS[1], 0.2): math.inf}
    choice = compare_rates.choose(table(losses))
    networks = [system for system, tuned in TUNED.items() if tuned == ONE]
    signs = [system for system, tuned in TUNED.items() if tuned == SIGNS[1]]

    assert choice["rates"] == {**dict.fromkeys(networks, 0.2), **dict.fromkeys(signs, 0.1)}
    assert choice["validation_nll"][ONE] == {"0.1": 1.0, "0.2": 0.9}
    check_figure(compare_rates.plot(table(losses)))


def test_a_family_that_always_diverges_has_no_rate():
    with pytest.raises(MissingCellsError, match="one network does not diverge"):
        compare_rates.choose(table({(ONE, 0.1): math.inf}))


def test_every_family_is_tuned_and_no_test_sample_is_used():
    cells = cells_of("compare-rates", PRESETS["quick"])
    assert {cell["system"] for cell in cells} == set(TUNED.values())
    assert set(TUNED) == set(SYSTEMS)
    assert all(TUNED[tuned] == tuned for tuned in TUNED.values())
    cell = cells[0]
    cell = replace(cell, setting=replace(cell.setting, epochs=1))
    problem = load_problem(cell.setting)
    data = with_validation(problem.data, cell.seed)
    training = train_system(cell, replace(problem, data=data), cell["lr"])
    outputs = outputs_of(training.ensemble, data.validation.inputs)
    expected = float(metrics.nll(outputs, data.validation.targets))
    assert compare_rates.measure(cell) == {"validation_nll": expected}


def test_the_record_keeps_other_choices_and_is_read_by_compare(tmp_path, monkeypatch):
    out, file = tmp_path / "results", tmp_path / "choices.json"
    file.write_text('{"quick": {"epochs": 7, "rates": {"networks": 0.5}}}')
    arguments = ["--workers", "0", "--out", str(out), "--only", f"system={ONE}"]
    assert main(["compare-rates", *arguments]) == 0
    assert main(["record", str(out), "--file", str(file)]) == 0
    choice = read_choices(file)["quick"]
    assert with_choice(PRESETS["quick"], choice).rates == (("networks", 0.5),)
    monkeypatch.setattr(settings, "read_choices", lambda: read_choices(file))
    rates = dict(recorded_rates("compare", "quick"))
    assert set(rates) == {system for system, tuned in TUNED.items() if tuned == ONE}
    assert set(rates.values()) < set(compare_rates.RATES["quick"])
    assert recorded_rates("compare", "gpu") == ()
