"""Cells are measured once, whatever happens."""

from __future__ import annotations

import subprocess
import threading
import time
from dataclasses import replace

import pytest
from experiments import problem

from embens.experiments import grid, lean, setting, table, task, training, transition
from embens.experiments.engines import Inline
from embens.experiments.store import Store
from embens.experiments.table import manifest, tidy
from embens.experiments.task import Done, make_task, perform


class Counting(Inline):
    """Remembers what it was given."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def submit(self, task):
        self.seen.append(task.key)
        super().submit(task)


def run(cells, folder, **options):
    engine = Counting()
    outcome = grid.run("transition", cells, store=Store(folder), engine=engine, **options)
    return outcome, engine.seen


def test_a_second_run_has_nothing_to_do(tmp_path):
    first, seen = run(problem.cells(3), tmp_path)
    assert (first.measured, first.known, len(seen)) == (3, 0, 3)
    second, seen = run(problem.cells(4), tmp_path)
    assert (second.measured, second.known, len(seen)) == (1, 3, 1)


def test_a_run_that_is_interrupted_goes_on_where_it_was(tmp_path):
    class Stopping(Inline):
        def wait(self, seconds):
            if self.count == 2:
                raise KeyboardInterrupt
            self.count += 1
            return super().wait(seconds)

    engine = Stopping()
    engine.count = 0
    with pytest.raises(KeyboardInterrupt):
        grid.run("transition", problem.cells(4), store=Store(tmp_path), engine=engine)
    outcome, _ = run(problem.cells(4), tmp_path)
    assert (outcome.measured, outcome.known) == (2, 2)
    assert not (tmp_path / "claims").exists()


def test_a_failed_cell_is_kept_with_its_error_and_the_rest_goes_on(tmp_path):
    cells = [problem.bad(), *problem.cells(2)]
    outcome, _ = run(cells, tmp_path)
    assert outcome.measured == 3
    assert len(outcome.failed) == 1
    error = Store(tmp_path).records[outcome.failed[0]]["error"]
    assert "Traceback" in error
    assert "members" in error
    again, seen = run(cells, tmp_path)
    assert (again.measured, seen, len(again.failed)) == (0, [], 1)
    retried, seen = run(cells, tmp_path, retry_failed=True)
    assert (retried.measured, len(seen), len(retried.failed)) == (1, 1, 1)


def test_large_cells_come_first(tmp_path):
    order = []

    class Watcher:
        def start(self, *numbers):
            self.numbers = numbers

        def update(self, task, done, weight):
            order.append((task.cell.members, weight))

    watcher = Watcher()
    grid.run(
        "transition", problem.cells(3), store=Store(tmp_path), engine=Inline(), watcher=watcher
    )
    assert [members for members, _ in order] == [3, 2, 1]
    assert watcher.numbers[0] == pytest.approx(sum(weight for _, weight in order))


def test_the_key_is_of_everything_in_the_cell():
    cell = problem.cells(1)[0]
    keys = {
        make_task("transition", changed).key
        for changed in (
            cell,
            replace(cell, p=0.6),
            replace(cell, seed=1),
            replace(cell, members=2),
            replace(cell, setting=replace(cell.setting, threads=2)),
            replace(cell, setting=replace(cell.setting, lr=0.02)),
            replace(cell, setting=replace(cell.setting, device="cuda")),
            replace(cell, setting=replace(cell.setting, records="abc")),
        )
    }
    assert len(keys) == 8
    assert make_task("transition", cell).key == make_task("transition", replace(cell)).key


@pytest.fixture
def version_with(monkeypatch):
    """Return the code version that ``transition`` would have if a module's source were another."""

    def version_of(module, old, new):
        original = task.inspect.getsource
        source = original(module)
        assert old in source
        text = source.replace(old, new)
        with monkeypatch.context() as patch:
            patch.setattr(task.inspect, "getsource", lambda m: text if m is module else original(m))
            task.code_version.cache_clear()
            found = task.code_version("transition")
        task.code_version.cache_clear()
        return found

    return version_of


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (transition, "inverted U below", "another name"),
        (transition, "middle = (values[0]", "middle = (values[1]"),  # a statistic
        (transition, "0.9, 1.0), (1, 2, 4", "0.9), (1, 2, 4"),  # a sweep
        (transition, '"""Train one ensemble."""', '"""Other words."""'),
        (transition, "import math", "import math  # a comment"),
        (setting, "train=1000", "train=1600"),  # another preset
    ],
)
def test_the_key_does_not_change_with_what_changes_no_number(version_with, module, old, new):
    assert version_with(module, old, new) == task.code_version("transition")


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (transition, 'if cell.gamma == "M" else 1.0', 'if cell.gamma == "M" else 2.0'),
        (transition, "    members: int\n    gamma: str", "    members: int = 2\n    gamma: str"),
        (setting, "_read(setting).standardise()", "_read(setting)"),
        (lean, "_MOMENTUM = 0.9", "_MOMENTUM = 0.8"),
        (training, "0.01 + 0.99", "0.02 + 0.98"),
    ],
)
def test_the_key_changes_with_the_code_that_measures(version_with, module, old, new):
    assert version_with(module, old, new) != task.code_version("transition")


class Pretending(Counting):
    """Returns made-up rows, since tracing modules in two threads is not safe in torch.fx."""

    def wait(self, seconds):
        time.sleep(0.01)
        tasks, self._tasks = self._tasks, []
        return [Done(t.key, [{"accuracy": t.cell.members / 100}], None, 0.01) for t in tasks]


def test_two_runs_on_one_folder_share_the_work(tmp_path):
    outcomes, seen = [], []

    def work():
        engine = Pretending()
        cells = problem.cells(30)
        outcomes.append(grid.run("transition", cells, store=Store(tmp_path), engine=engine))
        seen.extend(engine.seen)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == sorted(set(seen))
    assert [o.measured + o.known for o in outcomes] == [30, 30]
    assert sum(o.measured for o in outcomes) == 30
    assert min(o.measured for o in outcomes) > 0
    assert len(tidy(Store(tmp_path), "transition", problem.SETTING)) == 30


def test_narrowing_says_what_there_is():
    cells = problem.cells(4)
    assert [c.members for c in grid.narrow(cells, members=["1", 3])] == [1, 3]
    assert grid.narrow(cells, gamma=["M"], members=None) == cells
    with pytest.raises(ValueError, match="members: expected some of 1, 2, 3, 4; got 9"):
        grid.narrow(cells, members=[9])
    with pytest.raises(ValueError, match="does not sweep it"):
        grid.narrow(cells, width=[1.0])


def test_the_threads_of_a_cell_are_set_and_put_back():
    import torch

    before = torch.get_num_threads()
    cell = problem.cells(1)[0]
    done = perform(make_task("transition", replace(cell, setting=replace(cell.setting, threads=2))))
    assert done.error is None
    assert torch.get_num_threads() == before


def test_a_measurement_that_raises_gives_its_text():
    done = perform(make_task("transition", problem.bad()))
    assert isinstance(done, Done)
    assert done.rows is None
    assert "Traceback" in (done.error or "")


def test_the_table_holds_what_the_present_code_measured(tmp_path):
    run(problem.cells(2), tmp_path)
    store = Store(tmp_path)
    store.add({**next(iter(store.records.values())), "key": "old", "code": "another"})
    found = tidy(store, "transition", problem.SETTING)
    assert list(found["members"]) == [1, 2]
    assert set(found) >= {"p", "gamma", "seed", "accuracy", "seconds"}
    assert not len(tidy(store, "transition", replace(problem.SETTING, records="other data")))


def test_results_with_other_epochs_stay_out_of_the_table(tmp_path):
    longer = replace(problem.SETTING, epochs=2)
    run(problem.cells(3), tmp_path)
    run(problem.cells(2, longer), tmp_path)
    store = Store(tmp_path)
    assert list(tidy(store, "transition", problem.SETTING)["members"]) == [1, 2, 3]
    assert list(tidy(store, "transition", longer)["members"]) == [1, 2]
    assert manifest("transition", longer, [], store)["cells"] == 2


def test_the_cells_of_another_run_count_as_progress(tmp_path):
    class Watcher:
        seen = ()

        def start(self, total, done, cells, finished):
            other = Store(tmp_path)  # it is faster than this run
            for cell in problem.cells(2):
                task = make_task("transition", cell)
                other.add({"key": task.key, "rows": [{"accuracy": 0.5}]})
            self.seen = []

        def update(self, task, done, weight):
            self.seen.append("own")

        def skip(self, weight):
            assert weight > 0
            self.seen.append("other's")

    watcher = Watcher()
    outcome = grid.run(
        "transition", problem.cells(3), store=Store(tmp_path), engine=Inline(), watcher=watcher
    )
    assert sorted(watcher.seen) == ["other's", "other's", "own"]
    assert (outcome.measured, outcome.known) == (1, 2)


def test_the_commit_is_not_that_of_a_repository_in_which_the_library_is_installed(
    tmp_path, monkeypatch
):
    site = tmp_path / "venv" / "lib" / "embens" / "experiments"
    site.mkdir(parents=True)
    (site / "table.py").write_text("installed")
    for arguments in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "theirs"]):
        author = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *author, *arguments], cwd=tmp_path, check=True)
    monkeypatch.setattr(table, "__file__", str(site / "table.py"))
    assert table.commit() is None
