"""Cells are measured once, whatever happens."""

from __future__ import annotations

import threading
import time

import pytest
from experiments import problem

from embens.experiments import grid
from embens.experiments.engines import Inline
from embens.experiments.job import Done, make_job
from embens.experiments.results import Results
from embens.experiments.table import tidy


class Counting(Inline):
    """Remembers what it was given."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def submit(self, job):
        self.seen.append(job.key)
        super().submit(job)


def run(cells, folder, **options):
    engine = Counting()
    outcome = grid.run("transition", cells, results=Results(folder), engine=engine, **options)
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
        grid.run("transition", problem.cells(4), results=Results(tmp_path), engine=engine)
    outcome, _ = run(problem.cells(4), tmp_path)
    assert (outcome.measured, outcome.known) == (2, 2)
    assert not (tmp_path / "claims").exists()


def test_a_failed_cell_is_kept_with_its_error_and_the_rest_goes_on(tmp_path):
    cells = [problem.bad(), *problem.cells(2)]
    outcome, _ = run(cells, tmp_path)
    assert outcome.measured == 3
    assert len(outcome.failed) == 1
    error = Results(tmp_path).records[outcome.failed[0]]["error"]
    assert "Traceback" in error
    assert "members" in error
    again, seen = run(cells, tmp_path)
    assert (again.measured, seen, len(again.failed)) == (0, [], 1)
    retried, seen = run(cells, tmp_path, retry_failed=True)
    assert (retried.measured, len(seen), len(retried.failed)) == (1, 1, 1)


def test_large_cells_come_first(tmp_path):
    order = []

    class Watcher(grid.Watcher):
        def start(self, *numbers):
            self.numbers = numbers

        def update(self, job, done):
            order.append((job.cell.members, job.cell.weight))

    watcher = Watcher()
    grid.run(
        "transition", problem.cells(3), results=Results(tmp_path), engine=Inline(), watcher=watcher
    )
    assert [members for members, _ in order] == [3, 2, 1]
    assert watcher.numbers[0] == pytest.approx(sum(weight for _, weight in order))


class Pretending(Counting):
    """Returns made-up rows, since tracing modules in two threads is not safe in torch.fx."""

    def wait(self, seconds):
        time.sleep(0.01)
        jobs, self._jobs = self._jobs, []
        return [Done(j.key, [{"accuracy": j.cell.members / 100}], None, 0.01) for j in jobs]


def test_two_runs_on_one_folder_share_the_work(tmp_path):
    outcomes, seen = [], []

    def work():
        engine = Pretending()
        cells = problem.cells(30)
        outcomes.append(grid.run("transition", cells, results=Results(tmp_path), engine=engine))
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
    assert len(tidy(Results(tmp_path), "transition", problem.SETTING)) == 30


def test_narrowing_says_what_there_is():
    cells = problem.cells(4)
    assert [c.members for c in grid.narrow(cells, members=["1", 3])] == [1, 3]
    assert grid.narrow(cells, gamma=["M"]) == cells
    with pytest.raises(ValueError, match="members: expected some of 1, 2, 3, 4; got 9"):
        grid.narrow(cells, members=[9])
    with pytest.raises(ValueError, match="does not sweep it"):
        grid.narrow(cells, width=[1.0])


def test_the_cells_of_another_run_count_as_progress(tmp_path):
    class Watcher(grid.Watcher):
        seen = ()

        def start(self, total, done, cells, finished):
            other = Results(tmp_path)  # it is faster than this run
            for cell in problem.cells(2):
                job = make_job("transition", cell)
                other.add({"key": job.key, "rows": [{"accuracy": 0.5}]})
            self.seen = []

        def update(self, job, done):
            self.seen.append("own")

        def skip(self, weight):
            assert weight > 0
            self.seen.append("other's")

    watcher = Watcher()
    outcome = grid.run(
        "transition", problem.cells(3), results=Results(tmp_path), engine=Inline(), watcher=watcher
    )
    assert sorted(watcher.seen) == ["other's", "other's", "own"]
    assert (outcome.measured, outcome.known) == (1, 2)
