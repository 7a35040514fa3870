"""Two gloo processes give the result of one, and seeds determine a run."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
import torch.distributed as dist
from training import parallel_runs, problem

from embens.training import fit, processes

SCRIPT = Path(parallel_runs.__file__)
PROCESSES = 2


def run_with_torchrun(folder: Path) -> str:
    """Run the script in two processes and return what they print to the error stream."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={PROCESSES}", str(SCRIPT), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    paths = [str(SCRIPT.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    with process:
        try:
            _, errors = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its processes too
            raise
    assert process.returncode == 0, errors
    return errors


@dataclass
class Results:
    """Results of one process, of each of two, and what the two printed."""

    of_one: dict[str, Any]
    of_two: list[dict[str, Any]]
    printed: str
    folder: Path


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Results:
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("there is no gloo")
    folder = tmp_path_factory.mktemp("parallel")
    printed = run_with_torchrun(folder)
    of_two = [torch.load(folder / f"{PROCESSES}-{rank}.pt") for rank in range(PROCESSES)]
    return Results(parallel_runs.measure(folder), of_two, printed, folder)


def assert_processes_agree(name: str, results: Results) -> None:
    expected = results.of_one[name]
    for of_process in results.of_two:
        actual = of_process[name]
        assert actual.keys() == expected.keys()
        for key in expected:
            torch.testing.assert_close(actual[key], expected[key], rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.parametrize("name", ["same", "own", "chunk", "callbacks", "fresh", "checkpoint"])
def test_fit_in_two_processes_gives_the_result_of_one(name, results):
    assert_processes_agree(name, results)


@pytest.mark.parametrize("tool", ["DistributedDataParallel", "fully_shard"])
def test_ddp_and_fsdp2_take_the_steps_of_one_process(tool, results):
    names = [name for name in results.of_one if name.startswith(tool)]
    assert len(names) == 8
    for name in names:
        assert_processes_agree(name, results)


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_ddp_has_the_gradients_of_one_process(family, results):
    assert_processes_agree(f"gradients, {family}", results)


def test_processes_end_by_the_clock_of_the_first(results):
    first, second = (of_process["limited"] for of_process in results.of_two)
    assert first == second
    assert first[0] == "time"


def test_only_the_first_process_shows_progress_and_writes(results):
    lines = [line for line in results.printed.splitlines() if line.startswith("epoch ")]
    assert len(lines) == 3
    assert len(list((results.folder / "checkpoints2").iterdir())) == 2


def test_only_the_first_process_has_callbacks(results):
    values = results.of_one["observed"]
    assert len(values) == 3 * 5 + 1
    first, second = (of_process["observed"] for of_process in results.of_two)
    assert first == pytest.approx(values, rel=1e-4)
    assert second == []


def fit_with_dropout_and_noise(seed):
    """Return the weights and the history of a run that draws from all global generators."""
    ensemble = problem.ensemble(dropout=0.3)
    history = fit(ensemble, problem.Pairs(*problem.data(), noise=True), epochs=2, seed=seed)
    return problem.weights(ensemble), repr(problem.without_time(history))


def test_seed_determines_the_run():
    torch.manual_seed(11)
    random.seed(11)
    weights, history = fit_with_dropout_and_noise(seed=3)
    torch.manual_seed(12)
    random.seed(12)
    weights_again, history_again = fit_with_dropout_and_noise(seed=3)
    other_weights, _ = fit_with_dropout_and_noise(seed=4)

    problem.assert_equal(weights, weights_again)
    assert history == history_again
    assert any(not torch.equal(weights[name], other_weights[name]) for name in weights)


def test_fit_leaves_the_global_generators_alone():
    torch_state, python_state = torch.get_rng_state(), random.getstate()

    fit_with_dropout_and_noise(seed=3)

    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state


def test_combined_seeds_differ_and_are_reproducible():
    seeds = {processes.combine(a, b) for a in range(30) for b in range(30)}

    assert len(seeds) == 900
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert processes.combine(0, 1) == processes.combine(0, 1)
    assert processes.combine(0, 1) != processes.combine(1, 0)


def test_generators_go_on_after_a_block_as_if_nothing_had_happened():
    numpy = pytest.importorskip("numpy")

    def draw():
        return torch.rand(()).item(), random.random(), numpy.random.rand()

    with processes.seeded(1):
        first = draw()
    states = processes.get_states()
    after = draw()
    with processes.seeded(1):
        assert draw() == first
    processes.set_states(states)
    assert draw() == after
