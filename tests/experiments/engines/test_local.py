"""Processes: as many as there may be, the same numbers, and no worker is missed for long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
from experiments import problem

from embens.experiments import grid
from embens.experiments.engines import Inline
from embens.experiments.engines.local import Local
from embens.experiments.job import make_job, perform
from embens.experiments.results import Results
from embens.experiments.setting import PRESETS, fingerprint


@pytest.fixture
def local():
    engine = Local(2)
    yield engine
    engine.close()


def rows(results):
    return {key: record["rows"] for key, record in results.records.items()}


def test_results_are_those_of_one_process(tmp_path, local):
    cells = problem.cells(4)
    grid.run("transition", cells, results=Results(tmp_path / "one"), engine=Inline())
    grid.run("transition", cells, results=Results(tmp_path / "two"), engine=local)
    one, two = Results(tmp_path / "one"), Results(tmp_path / "two")
    assert str(rows(one)) == str(
        dict(sorted(rows(two).items(), key=lambda i: list(rows(one)).index(i[0])))
    )


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def test_a_worker_that_is_killed_is_replaced_and_its_cell_tried_again(local):
    job = make_job("transition", problem.slow())
    local.submit(job)
    first = local._pool[0].process
    os.kill(first.pid, signal.SIGKILL)
    wait_for(lambda: (not local.wait(0.1)) and local._pool and local._pool[0].process is not first)
    assert local._pool[0].job is job


def test_a_cell_whose_worker_died_once_has_the_result_of_this_process(tmp_path, local):
    lost = problem.deadly(tmp_path / "pid")
    local.submit(make_job("transition", lost))
    done = []
    wait_for(lambda: done.extend(local.wait(0.1)) or done)
    assert int((tmp_path / "pid").read_text()) != os.getpid()
    assert str(done[0].rows) == str(perform(make_job("transition", problem.plain(lost))).rows)


def test_a_cell_that_kills_its_workers_fails_and_others_go_on(local):
    local.submit(make_job("transition", problem.slow()))
    good = make_job("transition", problem.cells(1)[0])
    done = []
    for _ in range(2):
        os.kill(local._pool[0].process.pid, signal.SIGKILL)
        dead = local._pool[0].process
        wait_for(
            lambda dead=dead: (
                done.extend(local.wait(0.1)) or not any(w.process is dead for w in local._pool)
            )
        )
    assert len(done) == 1
    assert "the worker died with exit code -9, 2 times" in done[0].error
    local.submit(good)
    wait_for(lambda: done.extend(local.wait(0.1)) or len(done) == 2)
    assert done[1].key == good.key
    assert done[1].error is None


SCRIPT = """
import sys
from pathlib import Path

if __name__ == "__main__":
    from experiments import problem
    from embens.experiments import grid
    from embens.experiments.engines.local import Local
    from embens.experiments.results import Results

    class Watcher(grid.Watcher):
        def update(self, job, done):
            print("pids", *(w.process.pid for w in engine._pool), flush=True)

    engine = Local(2)
    cells = [problem.slow(), *problem.cells(2)]
    grid.run("transition", cells, results=Results(sys.argv[1]), engine=engine, watcher=Watcher())
"""


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks processes up in /proc")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_killed_loses_only_what_was_in_flight_and_leaves_no_workers(tmp_path, how):
    script = tmp_path / "run.py"
    script.write_text(textwrap.dedent(SCRIPT))
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(2)]
    pids = [int(word) for word in lines[-1].split()[1:]]
    assert pids
    process.send_signal(how)
    process.wait(30)
    process.stdout.close()
    wait_for(lambda: not any(is_alive(pid) for pid in pids))
    results = Results(tmp_path / "out")
    assert len(results.records) == 2
    assert all(
        results.claim(key) for key in (*results.records, make_job("transition", problem.slow()).key)
    )
    results.release_all()


def test_workers_are_told_where_the_data_are(tmp_path, monkeypatch):
    first = problem.write_cifar(tmp_path / "first")
    second = problem.write_cifar(tmp_path / "second", train=30)
    for folder, count in ((first, 40), (second, 30)):
        monkeypatch.setenv("EMBENS_DATA", str(folder))
        here = fingerprint(replace(PRESETS["cpu"], epochs=1))
        cell = replace(problem.cells(1)[0], setting=here)
        engine = Local(1)
        try:
            engine.submit(make_job("transition", cell))
            done = []
            wait_for(lambda engine=engine, done=done: done.extend(engine.wait(0.1)) or done)
        finally:
            engine.close()
        assert done[0].error is None, (count, done[0].error)
        assert str(done[0].rows) == str(perform(make_job("transition", cell)).rows)
