"""A Ray cluster, really started: the same numbers, and lost workers and nodes are made up for."""

from __future__ import annotations

import os
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from experiments import problem

from embens.experiments import grid
from embens.experiments.engines import Inline
from embens.experiments.job import make_job, perform
from embens.experiments.results import Results

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
        tests = str(Path(__file__).parents[2])
        patch.setenv(
            "PYTHONPATH", tests, prepend=os.pathsep
        )  # where workers find experiments.problem
        started = Ray(workers=2)
        yield started
        started.close()


def rows(results):
    return {key: str(record["rows"]) for key, record in results.records.items()}


def drain(engine, count, seconds=120):
    done, end = [], time.monotonic() + seconds
    while len(done) < count:
        assert time.monotonic() < end, "waited too long"
        done += engine.wait(0.5)
    return done


def test_results_are_identical_to_those_of_this_process(tmp_path, engine):
    cells = [*problem.cells(3), problem.bad()]
    grid.run("transition", cells[:3], results=Results(tmp_path / "here"), engine=Inline())
    outcome = grid.run("transition", cells, results=Results(tmp_path / "ray"), engine=engine)
    assert outcome.measured == 4
    assert len(outcome.failed) == 1
    there = Results(tmp_path / "ray")
    failed = there.records.pop(outcome.failed[0])
    assert "Traceback" in failed["error"]
    assert rows(there) == rows(Results(tmp_path / "here"))


def test_a_worker_that_is_killed_in_the_middle_does_not_lose_its_cell(tmp_path, engine):
    lost = problem.deadly(tmp_path / "pid")
    engine.submit(make_job("transition", lost))
    (done,) = drain(engine, 1)
    assert int((tmp_path / "pid").read_text()) != os.getpid()
    assert done.error is None
    assert str(done.rows) == str(perform(make_job("transition", problem.plain(lost))).rows)


def test_a_task_asks_for_the_resources_of_its_cell(engine):
    cell = problem.cells(1)[0]
    on_gpu = make_job("transition", replace(cell, setting=replace(cell.setting, device="cuda")))
    assert (on_gpu.gpus, on_gpu.threads) == (1, 1)
    engine.submit(on_gpu)
    assert engine.wait(0.2) == []  # there is no GPU here: it waits for one
    (reference,) = engine._flying
    ray.cancel(reference, force=True)
    engine._flying.clear()
    assert engine.slots == 4


def test_a_node_that_is_lost_in_the_middle_is_made_up_for(tmp_path, engine):
    from ray.cluster_utils import Cluster

    from embens.experiments.engines.ray import Ray

    engine.close()
    mark = tmp_path / "started"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    node = cluster.add_node(num_cpus=1)

    other = Ray(address=cluster.address)
    try:
        cells = problem.stuck(mark, node.node_id)
        for cell in cells:
            other.submit(make_job("transition", cell))
        end = time.monotonic() + 600
        while not mark.exists():  # until a cell is on the node that will be lost
            assert time.monotonic() < end, "no cell was started"
            time.sleep(0.1)
        cluster.add_node(num_cpus=1)  # nodes may join as well
        cluster.remove_node(node, allow_graceful=False)
        done = {d.key: d for d in drain(other, len(cells))}
    finally:
        other.close()
        cluster.shutdown()
    for cell in cells:
        found = done[make_job("transition", cell).key]
        assert found.error is None
        here = perform(make_job("transition", problem.plain(cell)))
        assert str(found.rows) == str(here.rows)
