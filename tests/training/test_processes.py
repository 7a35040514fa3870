"""Two gloo processes give the result of one, and seeds determine a run."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from training import problem

from embens.training import fit, processes

SCRIPT = """
import os, sys
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training import problem
import embens
from embens.training import (
    Batches, Callback, Checkpoint, ClipGradients, KeepLast, Objective, TimeLimit, fit
)

torch.set_num_threads(1)
folder = sys.argv[1]
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
results = {}


def trained(name, ensemble, *callbacks, progress=False):
    if rank:  # only the first process has the right weights to begin with
        with torch.no_grad():
            for parameter in ensemble.parameters():
                parameter.add_(1.0)
    history = fit(ensemble, problem.data(65), problem.data(20, 5), epochs=3, batch_size=16, lr=0.05,
                  callbacks=[KeepLast(), *callbacks], progress=progress)
    columns = ("loss", "ensemble_accuracy", "correlation", "validation_loss",
               "gradient_norm_shared", "gradient_norm_individual")
    rows = torch.tensor([[row[c] for c in columns] for row in history.epochs])
    results[name] = {**ensemble.state_dict(), "rows": rows.nan_to_num(-9)}


trained("same", problem.ensemble())
trained("own", problem.ensemble(), Batches("own"))
trained("chunk", problem.ensemble(), Objective(chunk=2))
seen = []


class Observer(Callback):
    def on_step(self, run):
        seen.append(run.loss)

    def on_end(self, run, history):
        seen.append(len(history.epochs))


trained("callbacks", problem.ensemble(), Observer(), ClipGradients(0.5))
results["seen"] = seen
trained("fresh", embens.mc_dropout(problem.reference(), 3, fresh=True))
trained("checkpoint", problem.ensemble(), Checkpoint(f"{folder}/checkpoints{world}", every=4),
        progress=True)

limit = TimeLimit(0.3 * (1 + rank))  # clocks that do not agree
limited = fit(problem.ensemble(), problem.data(65), epochs=10**6, callbacks=[limit], progress=False)
results["limited"] = limited.stopped, len(limited.epochs)
assert dist.is_initialized() == (world > 1)
x, y = problem.data(32)
rows = slice(rank, None, world)


def stepped(name, ensemble, wrap, kind=torch.optim.SGD, **options):
    # a plain loop: only the groups are of the ensemble
    model = wrap(ensemble) if world > 1 else ensemble
    groups = ensemble.parameter_groups(0.01, 0.02, gamma=2, optimizer=kind)
    optimizer = kind(groups, **options)
    for _ in range(3):
        optimizer.zero_grad()
        embens.objective(model(x[rows]), y[rows]).backward()
        optimizer.step()
    results[name] = {
        name: getattr(p, "full_tensor", lambda p=p: p)().detach()
        for name, p in ensemble.named_parameters()
    }


families = {
    "independent regime": lambda: problem.ensemble(),
    "collective regime": lambda: problem.ensemble(p=0.9),
    "last layer": lambda: embens.last_layer_dropout(
        problem.reference(), 3, trainable=True, generator=torch.Generator().manual_seed(1)),
    "networks": lambda: embens.independent(
        problem.reference(), 3, generator=torch.Generator().manual_seed(1)),
}
for family, make in families.items():
    for tool in (DistributedDataParallel, fully_shard):
        name = f"{tool.__name__}, {family}"
        stepped(name, make(), tool, momentum=0.9)
        stepped(f"{name}, AdamW", make(), tool, torch.optim.AdamW)
torch.save(results, f"{folder}/{world}-{rank}.pt")
"""


def run(command: list[str]) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, **pipes, text=True) as process:
        try:
            _, error = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its processes too
            raise
    assert process.returncode == 0, error
    return error


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict]:
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("there is no gloo")
    folder = tmp_path_factory.mktemp("parallel")
    script = folder / "script.py"
    script.write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    shown = run([*torchrun, str(script), str(folder)])
    run([sys.executable, str(script), str(folder)])
    found = {name: torch.load(folder / f"{name}.pt") for name in ("1-0", "2-0", "2-1")}
    return {**found, "shown": shown, "folder": folder}


@pytest.mark.parametrize("name", ["same", "own", "chunk", "callbacks", "fresh", "checkpoint"])
def test_two_processes_give_the_result_of_one(name, results):
    expected = results["1-0"][name]
    for process in ("2-0", "2-1"):
        found = results[process][name]
        assert found.keys() == expected.keys()
        for key in expected:
            torch.testing.assert_close(found[key], expected[key], rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.parametrize("tool", ["DistributedDataParallel", "fully_shard"])
def test_ddp_and_fsdp2_take_the_steps_of_one_process(tool, results):
    names = [name for name in results["1-0"] if name.startswith(tool)]
    assert len(names) == 8
    for name in names:
        test_two_processes_give_the_result_of_one(name, results)


def test_processes_end_by_the_clock_of_the_first(results):
    assert results["2-0"]["limited"] == results["2-1"]["limited"]
    assert results["2-0"]["limited"][0] == "time"


def test_only_the_first_process_shows_progress_and_writes(results):
    lines = [line for line in results["shown"].splitlines() if line.startswith("epoch ")]
    assert len(lines) == 3
    assert len(list((results["folder"] / "checkpoints2").iterdir())) == 2


def test_only_the_first_process_has_callbacks(results):
    seen = results["1-0"]["seen"]
    assert len(seen) == 3 * 5 + 1
    assert results["2-0"]["seen"] == pytest.approx(seen, rel=1e-4)
    assert results["2-1"]["seen"] == []


def test_a_seed_determines_the_run_and_the_global_generators_are_left_alone():
    def run(seed):
        ensemble = problem.ensemble(dropout=0.3)
        history = fit(ensemble, problem.Pairs(*problem.data(), noise=True), epochs=2, seed=seed)
        return problem.weights(ensemble), problem.without_time(history)

    torch.manual_seed(11)
    random.seed(11)
    before = torch.get_rng_state(), random.getstate()
    first = run(3)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    torch.manual_seed(12)
    random.seed(12)
    second, other = run(3), run(4)
    problem.assert_equal(first[0], second[0])
    assert repr(first[1]) == repr(second[1])
    assert any(
        not torch.equal(a, b)
        for a, b in zip(*(run[0].values() for run in (first, other)), strict=True)
    )


def test_seeds_made_of_several_numbers_are_different_and_stay_the_same():
    seeds = {processes.combine(a, b) for a in range(30) for b in range(30)}
    assert len(seeds) == 900
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert processes.combine(0, 1) == processes.combine(0, 1) != processes.combine(1, 0)


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
