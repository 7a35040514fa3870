"""Cells are measured once, whatever happens; a key is of all that the numbers depend on."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch
from tests.reproduction import problem

from reproduction.figures import NAMES
from reproduction.grid import cells as contract
from reproduction.figures import gain
from reproduction.grid import runs as grid
from reproduction.grid import settings as setting
from reproduction.figures import transition
from reproduction.grid.engines import inline
from reproduction.grid.runs import key_of, perform
from reproduction.grid.results import Results


def run(cells, folder, **options):
    """Run cells in this process; return what became of them, and the cells in their order."""
    seen = []

    def counting(cells):
        for cell, found in inline(cells):
            seen.append(cell)
            yield cell, found

    return grid.run("transition", cells, Results(folder), counting, **options), seen


def test_a_second_run_has_nothing_to_do(tmp_path):
    first, seen = run(problem.cells(3), tmp_path)
    assert (first, len(seen)) == ((3, []), 3)
    second, seen = run(problem.cells(4), tmp_path)
    assert (second, len(seen)) == ((1, []), 1)


def test_a_run_that_is_interrupted_goes_on_where_it_was(tmp_path):
    closed = []

    def stopping(jobs):
        try:
            yield from inline(jobs[:2])
            raise KeyboardInterrupt
        finally:
            closed.append(True)

    with pytest.raises(KeyboardInterrupt):
        grid.run("transition", problem.cells(4), Results(tmp_path), stopping)
    assert closed
    assert run(problem.cells(4), tmp_path)[0] == (2, [])


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
        grid.run("transition", problem.cells(2), Results(tmp_path), engine)
    assert closed


def test_large_cells_come_first(tmp_path):
    _, seen = run(problem.cells(3), tmp_path)
    assert [cell["members"] for cell in seen] == [3, 2, 1]


def test_a_failed_cell_is_kept_with_its_error_and_the_rest_goes_on(tmp_path):
    cells = [problem.bad(), *problem.cells(2)]
    (measured, failed), _ = run(cells, tmp_path)
    assert (measured, failed) == (3, [problem.bad()])
    error = Results(tmp_path).records[key_of(failed[0])]["error"]
    assert "Traceback" in error
    assert "members" in error
    again, seen = run(cells, tmp_path)
    assert (again, seen) == ((0, failed), [])
    retried, seen = run(cells, tmp_path, retry_failed=True)
    assert (retried, len(seen)) == ((1, failed), 1)


def test_narrowing_says_what_there_is():
    cells = problem.cells(4)
    assert [c["members"] for c in grid.narrow(cells, members=["1", 3])] == [1, 3]
    assert grid.narrow(cells, gamma=["M"]) == cells
    with pytest.raises(ValueError, match="members: expected some of 1, 2, 3, 4; got 9"):
        grid.narrow(cells, members=[9])
    with pytest.raises(ValueError, match="does not sweep it"):
        grid.narrow(cells, width=[1.0])


def test_the_key_is_of_everything_in_the_cell():
    cell = problem.cells(1)[0]
    keys = {
        key_of(changed)
        for changed in (
            cell,
            cell.with_values(p=0.6),
            cell.with_values(seed=1),
            cell.with_values(members=2),
            replace(cell, setting=replace(cell.setting, threads=2)),
            replace(cell, setting=replace(cell.setting, lr=0.02)),
            replace(cell, setting=replace(cell.setting, device="cuda")),
            replace(cell, setting=replace(cell.setting, records="abc")),
        )
    }
    assert len(keys) == 8
    assert key_of(cell) == key_of(replace(cell))


def test_the_threads_of_a_cell_are_set_and_put_back():
    before = torch.get_num_threads()
    cell = problem.cells(1)[0]
    done = perform(replace(cell, setting=replace(cell.setting, threads=2)))
    assert "rows" in done
    assert torch.get_num_threads() == before


def test_a_measurement_that_raises_gives_its_text():
    done = perform(problem.bad())
    assert "rows" not in done
    assert "Traceback" in done["error"]


@pytest.fixture
def version_with(monkeypatch):
    """Return the code version of ``transition`` if something in a module were another."""

    def version_of(module, old, new):
        original = inspect.getsource
        assert old in original(module)

        def getsource(item):
            text = original(item)
            return text.replace(old, new) if item.__module__ == module.__name__ else text

        with monkeypatch.context() as patch:
            patch.setattr(grid.inspect, "getsource", getsource)
            return grid.code_version.__wrapped__("transition")

    return version_of


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (transition, "a distinctive inverted U", "other words"),
        (transition, "return gaps[0] - gaps[1]", "return gaps[0]"),  # a statistic
        (transition, "some[1:]", "some[2:]"),  # a sweep
        (transition, '"""Train one ensemble."""', '"""Other words."""'),
        (transition, "# it depends on p alone", "# other words"),
        (setting, "_read(setting)\n    for part", "_read(setting)\n    for other"),  # fingerprint
    ],
)
def test_the_key_does_not_change_with_what_changes_no_number(version_with, module, old, new):
    assert version_with(module, old, new) == grid.code_version.__wrapped__("transition")


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (transition, 'if cell["gamma"] == "M" else 1.0', 'if cell["gamma"] == "M" else 2.0'),
        (contract, "manual_seed(self.seed)", "manual_seed(self.seed + 1)"),
        (setting, "_read(setting).standardise()", "_read(setting)"),
        (setting, "lr: float = 0.003", "lr: float = 0.004"),
        (contract, 'keep="last"', 'keep="best"'),
        (contract, "isfinite().all(-1, keepdim=True)", "isfinite()"),
    ],
)
def test_the_key_changes_with_the_code_that_measures(version_with, module, old, new):
    assert version_with(module, old, new) != grid.code_version.__wrapped__("transition")


def test_the_key_changes_with_constants_that_measure_uses_and_with_versions(monkeypatch):
    def version(name):
        return grid.code_version.__wrapped__(name)

    before = {name: version(name) for name in ("transition", "gain")}
    monkeypatch.setattr(transition, "SHIFTS", {"quick": (0.0,)})
    assert version("transition") == before["transition"]
    monkeypatch.setattr(gain, "RATE", {"quick": 2.0})
    assert version("gain") != before["gain"]
    monkeypatch.setattr(grid.torch, "__version__", "1.0")
    assert version("transition") != before["transition"]


@pytest.mark.parametrize("constant", [object(), {"a": lambda x: x}, setting])
def test_what_has_no_hash_is_refused(monkeypatch, constant):
    monkeypatch.setattr(transition, "regime", constant)
    with pytest.raises(TypeError, match="regime: code that measures may use functions, classes"):
        grid.code_version.__wrapped__("transition")


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_has_a_key(name):
    assert len(grid.code_version.__wrapped__(name)) == 16
