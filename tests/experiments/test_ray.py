"""A Ray cluster, really started: the same numbers, and lost workers and nodes are made up for."""

from __future__ import annotations

import os
import signal
import time
import warnings
from dataclasses import replace

import pytest
from experiments import problem

from embens.experiments import grid, task
from embens.experiments.engines import Inline
from embens.experiments.store import Store
from embens.experiments.task import make_task

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'embens[ray]'")

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray's own pipes and logs
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.xdist_group("ray"),
]


@pytest.fixture(scope="module")
def engine():
    from embens.experiments.engines.ray import Ray

    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        tests = os.path.dirname(os.path.dirname(__file__))
        patch.setenv("PYTHONPATH", tests)  # where workers find experiments.problem
        started = Ray(workers=2)
        yield started
        started.close()


def rows(store):
    return {key: str(record["rows"]) for key, record in store.records.items()}


def drain(engine, count, seconds=120):
    done, end = [], time.monotonic() + seconds
    while len(done) < count:
        assert time.monotonic() < end, "waited too long"
        done += engine.wait(0.5)
    return done


def test_results_are_identical_to_those_of_this_process(tmp_path, engine):
    cells = [*problem.cells(3), problem.bad()]
    grid.run("transition", cells[:3], store=Store(tmp_path / "here"), engine=Inline())
    outcome = grid.run("transition", cells, store=Store(tmp_path / "ray"), engine=engine)
    assert outcome.measured == 4
    assert len(outcome.failed) == 1
    there = Store(tmp_path / "ray")
    failed = there.records.pop(outcome.failed[0])
    assert "Traceback" in failed["error"]
    assert rows(there) == rows(Store(tmp_path / "here"))


def test_a_worker_that_is_killed_in_the_middle_does_not_lose_its_cell(tmp_path, engine):
    mark = tmp_path / "pid"
    cell = problem.cells(1)[0]
    lost = make_task("transition", replace(cell, seed=7))
    engine._flying[_die_once.options(num_cpus=1, max_retries=3).remote(str(mark), lost)] = (
        lost,
        time.perf_counter(),
    )
    (done,) = drain(engine, 1)
    assert mark.exists()
    assert done.error is None
    assert str(done.rows) == str(task.perform(lost).rows)


@ray.remote
def _die_once(mark, lost):
    from embens.experiments.task import perform

    if not os.path.exists(mark):
        with open(mark, "w") as file:
            file.write(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    return perform(lost)


def test_a_task_asks_for_the_resources_of_its_cell(engine):
    cell = problem.cells(1)[0]
    on_gpu = make_task("transition", replace(cell, setting=replace(cell.setting, device="cuda")))
    assert (on_gpu.gpus, on_gpu.threads) == (1, 1)
    engine.submit(on_gpu)
    assert engine.wait(0.2) == []  # there is no GPU here: it waits for one
    (reference,) = engine._flying
    ray.cancel(reference, force=True)
    engine._flying.clear()
    assert engine.slots == 4


def test_a_node_that_is_lost_in_the_middle_is_made_up_for(tmp_path, engine):
    from ray.cluster_utils import Cluster

    engine.ray.shutdown()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    node = cluster.add_node(num_cpus=1, resources={"second": 1})
    from embens.experiments.engines.ray import Ray

    other = Ray(address=cluster.address)
    try:
        mark = tmp_path / "started"
        task_ = make_task("transition", replace(problem.cells(1)[0], seed=9))
        spread = _wait_where_lost.options(num_cpus=1, max_retries=3, scheduling_strategy="SPREAD")
        for _ in range(2):  # one on each node; the one on the second never ends there
            other._flying[spread.remote(str(mark), task_)] = (task_, time.perf_counter())
        end = time.monotonic() + 60
        while not mark.exists():
            assert time.monotonic() < end
            time.sleep(0.1)
        cluster.remove_node(node, allow_graceful=False)
        done = drain(other, 2)
        assert [d.error for d in done] == [None, None]
        assert str(done[0].rows) == str(done[1].rows) == str(task.perform(task_).rows)
    finally:
        other.close()
        cluster.shutdown()


@ray.remote
def _wait_where_lost(mark, lost):
    from embens.experiments.task import perform

    if _is_second():
        with open(mark, "w") as file:
            file.write("here")
        time.sleep(600)
    return perform(lost)


def _is_second():
    mine = ray.get_runtime_context().get_node_id()
    return any(
        n["NodeID"] == mine and n["Alive"] and "second" in n["Resources"] for n in ray.nodes()
    )
