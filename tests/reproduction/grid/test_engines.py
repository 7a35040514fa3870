"""All engines give the same results, and lost workers and nodes are replaced."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from reproduction.grid import engines, runs
from reproduction.grid.engines import inline, local
from reproduction.grid.keys import key_of
from reproduction.grid.results import Results
from reproduction.grid.runs import measure
from reproduction.grid.settings import PRESETS, with_fingerprint
from tests.reproduction import problem

ROOT = Path(__file__).parents[3]


def two(jobs):
    return local(jobs, workers=2)


def rows(results):
    return {key: str(record["rows"]) for key, record in results.records.items()}


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)
    return value


def test_results_are_those_of_one_process(tmp_path):
    for name, engine in (("one", inline), ("two", two)):
        runs.run("transition", problem.cells(4), Results(tmp_path / name), engine)
    assert rows(Results(tmp_path / "one")) == rows(Results(tmp_path / "two"))
    assert not multiprocessing.active_children()


def test_a_cell_whose_worker_died_once_has_the_result_of_this_process(tmp_path):
    lost = problem.deadly(tmp_path / "pid")
    ((_, done),) = two([lost])
    assert int((tmp_path / "pid").read_text()) != os.getpid()
    assert str(done["rows"]) == str(measure(problem.plain(lost))["rows"])


def kill_workers(times):
    """Kill the only worker several times."""
    dead = set()
    for _ in range(times):
        alive = wait_for(lambda: [p for p in multiprocessing.active_children() if p not in dead])
        dead.update(alive)
        os.kill(alive[0].pid, signal.SIGKILL)


def test_a_cell_that_kills_its_workers_fails_and_others_go_on():
    cells = [problem.slow(), problem.cells(1)[0]]
    killer = threading.Thread(target=kill_workers, args=(2,))
    killer.start()
    (lost, failed), (second, good) = local(cells, workers=1)
    killer.join()

    assert [lost, second] == cells
    assert "the worker died with exit code -9, 2 times" in failed["error"]
    assert "error" not in good


def test_an_engine_that_is_closed_ends_its_workers():
    running = two([*problem.cells(1), problem.slow()])
    assert "rows" in next(running)[1]
    assert len(multiprocessing.active_children()) == 2
    running.close()
    assert not multiprocessing.active_children()


SCRIPT = """
import multiprocessing
import sys

if __name__ == "__main__":
    from tests.reproduction import problem
    from reproduction.grid import runs
    from reproduction.grid.engines import local
    from reproduction.grid.results import Results

    def watched(jobs):
        for done in local(jobs, workers=2):
            yield done
            print("pids", *(p.pid for p in multiprocessing.active_children()), flush=True)

    cells = [problem.slow(), *problem.cells(2)]
    runs.run("transition", cells, Results(sys.argv[1]), watched)
"""


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks processes up in /proc")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_run_loses_only_unfinished_cells_and_leaves_no_workers(tmp_path, how):
    script = tmp_path / "run.py"
    script.write_text(textwrap.dedent(SCRIPT))
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(2)]
    pids = [int(word) for word in lines[-1].split()[1:]]
    assert len(pids) == 2
    process.send_signal(how)
    process.wait(30)
    process.stdout.close()
    wait_for(lambda: not any(is_alive(pid) for pid in pids))
    assert len(Results(tmp_path / "out").records) == 2


def test_workers_get_the_data_folder(tmp_path, monkeypatch):
    first = problem.write_cifar(tmp_path / "first")
    second = problem.write_cifar(tmp_path / "second", train=30)
    for folder in (first, second):
        monkeypatch.setenv("EMBENS_DATA", str(folder))
        here = with_fingerprint(replace(PRESETS["cpu"], epochs=1))
        cell = replace(problem.cells(1)[0], setting=here)
        ((_, done),) = local([cell], workers=1)
        assert str(done["rows"]) == str(measure(cell)["rows"])


on_ray = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray's own pipes and logs
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.xdist_group("ray"),
]


class TestRay:
    """A cluster, really started."""

    pytestmark = on_ray

    @pytest.fixture(autouse=True)
    def workers_find_the_tests(self, monkeypatch):
        pytest.importorskip("ray", reason="Ray is not installed: pip install 'embens[ray]'")
        monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield

    def test_results_are_identical_and_a_worker_that_is_killed_does_not_lose_its_cell(
        self, tmp_path
    ):
        lost = problem.deadly(tmp_path / "pid")
        cells = [*problem.cells(3), problem.bad(), lost]
        runs.run("transition", cells[:3], Results(tmp_path / "here"), inline)
        there = Results(tmp_path / "ray")
        outcome = runs.run("transition", cells, there, lambda cells: engines.ray(cells, workers=2))
        assert outcome == (5, [problem.bad()])
        assert "Traceback" in there.records.pop(key_of(problem.bad()))["error"]
        assert int((tmp_path / "pid").read_text()) != os.getpid()
        measured = rows(there)
        assert measured.pop(key_of(lost)) == str(measure(problem.plain(lost))["rows"])
        assert measured == rows(Results(tmp_path / "here"))

    @pytest.mark.long  # starting Ray takes most of a minute
    def test_a_task_asks_for_the_resources_of_its_cell(self):
        import ray

        cell = problem.cells(1)[0]
        cuda = replace(cell, setting=replace(cell.setting, device="cuda", threads=2))
        running = engines.ray([cuda, cell], workers=2, gpus_per_cell=0.5)
        assert next(running)[0] == cell  # there is no GPU here: the other one waits
        assert ray.cluster_resources()["CPU"] == 2
        running.close()
        assert not ray.is_initialized()

    @pytest.mark.long  # starting Ray takes most of a minute
    def test_a_node_that_is_lost_in_the_middle_is_made_up_for(self, tmp_path):
        from ray.cluster_utils import Cluster

        mark, done = tmp_path / "started", {}
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        node = cluster.add_node(num_cpus=1)
        cells = problem.stuck(mark, node.node_id)

        def work():
            for cell, record in engines.ray(cells, address=cluster.address):
                done[key_of(cell)] = record

        worker = threading.Thread(target=work)
        worker.start()
        try:
            wait_for(mark.exists, 600)  # until a cell is on the node that will be lost
            cluster.add_node(num_cpus=1)  # nodes may join as well
            cluster.remove_node(node, allow_graceful=False)
            worker.join(300)
            assert not worker.is_alive()
        finally:
            cluster.shutdown()
        for cell in cells:
            record = done[key_of(cell)]
            assert str(record["rows"]) == str(measure(problem.plain(cell))["rows"])
