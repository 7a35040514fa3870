"""Rows on kernels of infinitely wide ensembles, against neural-tangents.

Ours are all five kernels of an embedded network, theirs are NNGP and NTK of the plain network, in
float64, jitted and compiled before the first measurement.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor, nn

import embens
from benchmarks.peers import neural_tangents
from benchmarks.rows import Result, Row
from benchmarks.timing import Contestant, Step, compare
from embens import laws, networks, theory

STD = math.sqrt(2)
PLAIN_LIBRARIES = "libraries alone"
NEURAL_TANGENTS = "neural-tangents"


def theory_mlp(rounds: int) -> list[Row]:
    """Kernels of a perceptron of depth 4 on 2,000 points."""
    title = "Five kernels of a ReLU MLP of depth 4, 2,000 points of 64 features"
    bars = {"centred": 0.49, "shifted": 0.85}
    return _theory("theory-mlp", title, bars, rounds)


def theory_cnn(rounds: int) -> list[Row]:
    """Kernels of a CNN with global pooling."""
    title = "Five kernels of the paper's CNN with global pooling, 32 images 16×16"
    return _theory("theory-cnn", title, {"centred": 1.0, "shifted": 1.0}, rounds)


def _theory(name: str, title: str, bars: dict[str, float], rounds: int) -> list[Row]:
    network, x = PROBLEMS[name]()
    contestants = []
    for label, module in embedded(network).items():

        def step(module: nn.Module = module) -> object:
            return theory.kernels(module, x)

        contestants.append(Contestant(label, step, ours=True, bar=bars.get(label)))
    row = Row(
        name,
        title,
        "neural-tangents' NNGP and NTK of one network",
        0.5,
        "half of the pairs, by symmetry, at the same cost per pair",
        rounds,
    )
    comparison = compare(PEERS[name](), contestants, rounds=rounds, seconds=0.1)
    row.results = comparison.results
    row.reference = comparison.reference
    return [row]


def theory_memory(rounds: int) -> list[Row]:
    """Peak memory of the kernels of a perceptron, each in a new process; without rounds."""
    problem = "theory-mlp"
    base = peak_bytes(problem, PLAIN_LIBRARIES)
    unit = peak_bytes(problem, NEURAL_TANGENTS) - base
    row = Row(
        "theory-memory",
        "Peak memory of five kernels of a ReLU MLP of depth 4, 2,000 points",
        "neural-tangents' NNGP and NTK of one network",
        reference=f"{unit / 2**20:.0f} MiB above the imported libraries",
    )
    network, _ = PROBLEMS[problem]()
    for label in embedded(network):
        used = peak_bytes(problem, label) - base
        row.results.append(Result(label, ours=True, ratio=used / unit, bar=1.0))
    return [row]


# Problems


def perceptron() -> tuple[nn.Module, Tensor]:
    """Return a perceptron and its inputs."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 64, generator=generator, dtype=torch.float64)
    return networks.mlp(64, 8, 4, weight_std=STD), x


def peer_perceptron() -> Step:
    """Return neural-tangents' kernels of the perceptron."""
    import jax

    stax = neural_tangents().stax
    layers = []
    for _ in range(4):
        layers += [stax.Dense(8, W_std=STD), stax.Relu()]
    *_, kernel = stax.serial(*layers, stax.Dense(1, W_std=STD))
    x = perceptron()[1].numpy()
    function = jax.jit(lambda x: kernel(x, None, ("nngp", "ntk")))
    return lambda: jax.block_until_ready(function(x))


def convolutional() -> tuple[nn.Module, Tensor]:
    """Return a convolutional network and its inputs."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 3, 16, 16, generator=generator, dtype=torch.float64)
    return networks.cnn((8,) * 4, outputs=1, weight_std=STD, parametrization="ntk"), x


def peer_convolutional() -> Step:
    """Return neural-tangents' kernels of the convolutional network."""
    import jax

    stax = neural_tangents().stax
    layers = []
    for i in range(4):
        layers += [stax.Conv(8, (3, 3), padding="SAME", W_std=STD), stax.Relu()]
        if i < 3:
            layers.append(stax.AvgPool((2, 2), strides=(2, 2)))
    *_, kernel = stax.serial(*layers, stax.GlobalAvgPool(), stax.Dense(1, W_std=STD))
    x = convolutional()[1].permute(0, 2, 3, 1).numpy()
    function = jax.jit(lambda x: kernel(x, None, ("nngp", "ntk")))
    return lambda: jax.block_until_ready(function(x))


PROBLEMS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "theory-mlp": perceptron,
    "theory-cnn": convolutional,
}
PEERS: dict[str, Callable[[], Step]] = {
    "theory-mlp": peer_perceptron,
    "theory-cnn": peer_convolutional,
}


def embedded(network: nn.Module) -> dict[str, nn.Module]:
    """Return a network with centred, with shifted and without modulations."""
    law = laws.Shifted(0.5)
    return {
        "centred": embens.embed(network),
        "shifted": embens.embed(network, pre=law, post=law),
        "the plain network": network,
    }


def peak_bytes(problem: str, label: str) -> int:
    """Return the peak memory of one computation in a new process."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_send_peak, args=(problem, label, sender))
    process.start()
    peak = receiver.recv()
    process.join()
    return peak


def _send_peak(problem: str, label: str, connection: Connection) -> None:
    neural_tangents()
    if label == NEURAL_TANGENTS:
        PEERS[problem]()()
    elif label != PLAIN_LIBRARIES:
        network, x = PROBLEMS[problem]()
        theory.kernels(embedded(network)[label], x)
    # ru_maxrss would include the peak of the parent process.
    status = Path("/proc/self/status").read_text()
    kibibytes = int(status.split("VmHWM:")[1].split()[0])
    connection.send(1024 * kibibytes)
