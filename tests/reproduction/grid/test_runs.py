"""Cells are measured once; interrupted runs continue."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from reproduction.grid import runs
from reproduction.grid.cells import cells_of
from reproduction.grid.engines import inline
from reproduction.grid.keys import key_of
from reproduction.grid.results import Results
from reproduction.grid.runs import measure
from reproduction.grid.settings import PRESETS
from tests.reproduction import problem


def run(cells, folder, **options):
    """Run cells in this process; return their count, the failed ones, and the measured ones."""
    measured = []

    def recording(cells):
        for cell, outcome in inline(cells):
            measured.append(cell)
            yield cell, outcome

    count, failed = runs.run("transition", cells, Results(folder), recording, **options)
    return count, failed, measured


def test_second_run_measures_new_cells_only(tmp_path):
    count, failed, measured = run(problem.cells(3), tmp_path)
    assert count == len(measured) == 3
    assert failed == []

    count, failed, measured = run(problem.cells(4), tmp_path)
    assert count == len(measured) == 1
    assert failed == []


def test_a_run_that_is_interrupted_goes_on_where_it_was(tmp_path):
    closed = []

    def stopping(jobs):
        try:
            yield from inline(jobs[:2])
            raise KeyboardInterrupt
        finally:
            closed.append(True)

    with pytest.raises(KeyboardInterrupt):
        runs.run("transition", problem.cells(4), Results(tmp_path), stopping)
    assert closed
    count, failed, _ = run(problem.cells(4), tmp_path)
    assert count == 2
    assert failed == []


def test_an_engine_is_closed_if_a_result_cannot_be_kept(tmp_path, monkeypatch):
    closed = []

    def engine(jobs):
        try:
            yield from inline(jobs)
        finally:
            closed.append(True)

    def add(self, record):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Results, "add", add)
    with pytest.raises(OSError, match="No space left"):
        runs.run("transition", problem.cells(2), Results(tmp_path), engine)
    assert closed


def test_large_cells_come_first(tmp_path):
    _, _, measured = run(problem.cells(3), tmp_path)
    assert [cell["members"] for cell in measured] == [3, 2, 1]


def test_failed_cell_is_kept_with_its_error_and_the_others_are_measured(tmp_path):
    count, failed, _ = run([problem.bad(), *problem.cells(2)], tmp_path)

    assert count == 3
    assert failed == [problem.bad()]
    error = Results(tmp_path).records[key_of(problem.bad())]["error"]
    assert "Traceback" in error
    assert "members" in error


def test_failed_cells_are_measured_again_on_request(tmp_path):
    cells = [problem.bad(), *problem.cells(2)]
    run(cells, tmp_path)

    count, failed, measured = run(cells, tmp_path)
    assert count == 0
    assert failed == [problem.bad()]
    assert measured == []

    count, failed, measured = run(cells, tmp_path, retry_failed=True)
    assert count == 1
    assert failed == measured == [problem.bad()]


def test_selecting_lists_the_available_values():
    cells = problem.cells(4)
    assert [cell["members"] for cell in runs.select(cells, members=["1", 3])] == [1, 3]
    assert runs.select(cells, gamma=["M"]) == cells
    with pytest.raises(ValueError, match="members must be among 1, 2, 3, 4, got 9"):
        runs.select(cells, members=[9])
    with pytest.raises(ValueError, match="does not sweep width"):
        runs.select(cells, width=[1.0])


def test_networks_of_other_widths_are_not_trained_as_baselines():
    cells = cells_of("widths", PRESETS["quick"], [0, 1])
    selected = runs.select(cells, width=[0.5, 1.0], seed=[1])
    baselines = [cell for cell in selected if cell.experiment == "baselines"]
    assert [(cell.width, cell.seed) for cell in baselines] == [(0.5, 1), (1.0, 1)]


def test_the_threads_of_a_cell_are_set_and_put_back():
    before = torch.get_num_threads()
    cell = problem.cells(1)[0]
    outcome = measure(replace(cell, setting=replace(cell.setting, threads=2)))
    assert "rows" in outcome
    assert torch.get_num_threads() == before


def test_a_measurement_that_raises_gives_its_text():
    outcome = measure(problem.bad())
    assert "rows" not in outcome
    assert "Traceback" in outcome["error"]
