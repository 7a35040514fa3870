"""Rows on everything around a training step: ``fit``, ``predict``, memory and imports."""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import embens
from benchmarks import peers
from benchmarks.rows import Result, Row
from benchmarks.saved_memory import saved_bytes
from benchmarks.tasks import (
    chunked_step,
    cnn_task,
    ensemble_step,
    networks_step,
    peer_step,
)
from benchmarks.timing import (
    Contestant,
    Step,
    compare,
    describe_noise,
    summarise,
    time_step,
)

BATCH = 128
IMPORT = """
import time
wall, cpu = time.perf_counter(), time.process_time()
import {}
print(time.perf_counter() - wall, time.process_time() - cpu)
"""


def fit_mlp(rounds: int) -> list[Row]:
    """Fit of a perceptron 3×32 with 16 members on data like the digits."""
    network = embens.networks.mlp(
        inputs=64, width=32, depth=3, outputs=10, parametrization="standard"
    )
    ensemble = embens.batch_ensemble(network, 16)
    data = (torch.randn(1347, 64), torch.randint(10, (1347,)))
    title = "`fit` for 4 epochs, MLP 3×32, M=16, 1,347 rows"
    return [_fit("fit-mlp", title, ensemble, data, epochs=4, rounds=rounds)]


def fit_cnn(rounds: int) -> list[Row]:
    """Fit of a small CNN with 4 members."""
    network = embens.networks.cnn(channels=(16, 32), image=16, outputs=10)
    ensemble = embens.batch_ensemble(network, 4)
    data = (torch.randn(512, 3, 16, 16), torch.randint(10, (512,)))
    title = "`fit` for 2 epochs, CNN 16–32, M=4, 512 images 16×16"
    return [_fit("fit-cnn", title, ensemble, data, epochs=2, rounds=rounds)]


def _fit(
    name: str,
    title: str,
    ensemble: embens.EmbeddedEnsemble,
    data: tuple[Tensor, Tensor],
    *,
    epochs: int,
    rounds: int,
) -> Row:
    """Compare ``fit``, with its setup, history and checks, with a bare training loop."""
    x, y = data
    initial = {key: value.clone() for key, value in ensemble.state_dict().items()}
    scheduler = embens.training.linear_decay(epochs, hold=1.0)

    def bare_loop() -> None:
        ensemble.load_state_dict(initial)
        optimizer = torch.optim.SGD(ensemble.parameter_groups(), momentum=0.9, fused=True)
        ensemble.train()
        for _ in range(epochs):
            for index in torch.randperm(len(x)).split(BATCH):
                optimizer.zero_grad()
                embens.objective(ensemble(x[index]), y[index]).backward()
                optimizer.step()

    def fit() -> None:
        ensemble.load_state_dict(initial)
        embens.fit(
            ensemble,
            data,
            epochs=epochs,
            batch_size=BATCH,
            scheduler=scheduler,
            progress=False,
        )

    contestants = [Contestant("embens.fit", fit, ours=True, bar=1.10)]
    comparison = compare(bare_loop, contestants, rounds=rounds)
    row = Row(name, title, "a bare training loop", 1.0, "the loop itself", rounds)
    row.results = comparison.results
    row.reference = comparison.reference
    return row


def predict(rounds: int) -> list[Row]:
    """First prediction of a fitted table for a new number of rows, against later ones."""
    import numpy as np

    from embens.tabular import EmbeddedEnsembleClassifier

    generator = np.random.default_rng(0)
    x = generator.normal(size=(5000, 10))
    y = (x[:, 0] + x[:, 1] ** 2 > 1).astype(int)
    model = EmbeddedEnsembleClassifier(tune=False, max_epochs=5, random_state=0)
    model.fit(x[:1000], y[:1000])
    model.predict_proba(x[:100])
    sizes = random.sample(range(200, 5000), rounds)
    ratios, later_times = [], []
    for size in sizes:
        rows = x[:size]
        first = time_step(lambda rows=rows: model.predict_proba(rows))
        later = [time_step(lambda rows=rows: model.predict_proba(rows)) for _ in range(5)]
        ratios.append(first / statistics.median(later))
        later_times.append(statistics.median(later))
    row = Row(
        "predict",
        "predict_proba of a fitted table, first call with a new number of rows",
        "later calls with the same rows",
        1.0,
        "no work depends on the number of rows",
        rounds,
    )
    row.results = [summarise("embens", ratios, bar=1.1)]
    row.reference = f"{describe_noise(later_times)}; 200 to 5,000 rows"
    return [row]


def imports(rounds: int) -> list[Row]:
    """Import of embens against the import of torch, each in a new process."""
    for module in ("torch", "embens"):  # byte code and file cache
        import_seconds(module)
    wall_ratios, cpu_ratios, torch_times = [], [], []
    for turn in range(rounds):
        if turn % 2:
            torch_wall, torch_cpu = import_seconds("torch")
            wall, cpu = import_seconds("embens")
        else:
            wall, cpu = import_seconds("embens")
            torch_wall, torch_cpu = import_seconds("torch")
        wall_ratios.append(wall / torch_wall)
        cpu_ratios.append(cpu / torch_cpu)
        torch_times.append(torch_wall)
    row = Row("imports", "`import embens`", "`import torch`", 1.0, "embens imports torch", rounds)
    row.results = [
        summarise("wall time", wall_ratios, bar=1.05),
        summarise("CPU time", cpu_ratios, bar=1.05),
    ]
    row.reference = describe_noise(torch_times)
    return [row]


def import_seconds(module: str) -> tuple[float, float]:
    """Return the wall time and the CPU time of an import in a new process."""
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has byte code, as torch
    command = [sys.executable, "-c", IMPORT.format(module)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    output = result.stdout
    wall, cpu = output.split()
    return float(wall), float(cpu)


def memory(rounds: int) -> list[Row]:
    """Memory that autograd keeps for the backward pass; deterministic, so without rounds."""
    members = 8
    task = cnn_task(32)
    ensemble = embens.batch_ensemble(task.reference, members)
    torch_uncertainty = peers.TorchUncertainty(task.reference, members)
    stacked = peers.StackedNetworks(task.make, members)
    networks = [task.make() for _ in range(members)]
    modules: list[nn.Module] = [ensemble, torch_uncertainty, stacked, task.reference, *networks]
    parameters = []
    for module in modules:
        parameters += module.parameters()
    unit = saved_bytes(task.step, parameters)

    def networks_in_one_graph() -> None:
        outputs = torch.stack([network(task.x) for network in networks])
        F.cross_entropy(outputs.flatten(0, 1), task.y.repeat(members)).backward()

    def measure(name: str, step: Step, *, ours: bool = True, bar: float | None = None) -> Result:
        return Result(name, ours, saved_bytes(step, parameters) / unit, bar=bar)

    reference = f"{unit / 2**20:.1f} MiB, largest sum of saved storages without parameters"
    chunked = Row(
        "memory-chunks",
        "Memory for backward(chunk=…), BatchEnsemble M=8 of the paper's CNN, batch 32",
        "reference",
        1.0,
        "the activations of one member",
        reference=reference,
    )
    chunked.results = [
        measure("embens, backward(chunk=1)", chunked_step(ensemble, task), bar=1.5),
        measure("embens, backward(chunk=2)", chunked_step(ensemble, task, 2)),
        measure("embens, backward(chunk=4)", chunked_step(ensemble, task, 4)),
        measure("M networks in a loop", networks_step(networks, task), ours=False),
    ]
    graph = Row(
        "memory",
        "Memory for backward in one graph, BatchEnsemble M=8 of the paper's CNN, batch 32",
        "reference",
        members,
        "the activations of all members",
        reference=reference,
    )
    graph.results = [
        measure("embens", ensemble_step(ensemble, task), bar=11.0),
        measure("torch-uncertainty", peer_step(torch_uncertainty, task, members), ours=False),
        measure("stacked networks, vmap", peer_step(stacked, task, members), ours=False),
        measure("M networks in one graph", networks_in_one_graph, ours=False),
    ]
    return [chunked, graph]
