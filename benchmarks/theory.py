"""Kernels of infinitely wide ensembles against neural-tangents' of one ordinary network.

    python -m benchmarks.theory [--rounds 7] [--only mlp]

In one process and in turns: all five kernels of an embedded network here, NNGP and NTK of the plain
one there (jitted, float64, compiled before). Memory is the peak of a process of its own for each.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable
from pathlib import Path

import torch

import embens
from benchmarks.peers import neural_tangents
from benchmarks.timing import Contestant, Row, compare, write
from embens import laws, networks, theory

STD = 2**0.5


def perceptron() -> tuple[torch.nn.Module, torch.Tensor]:
    x = torch.randn(2000, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return networks.mlp(64, 8, 4, weight_std=STD), x


def their_perceptron() -> Callable[[], object]:
    import jax

    stax = neural_tangents().stax
    hidden = [layer for _ in range(4) for layer in (stax.Dense(8, W_std=STD), stax.Relu())]
    *_, kernel = stax.serial(*hidden, stax.Dense(1, W_std=STD))
    x = perceptron()[1].numpy()
    function = jax.jit(lambda x: kernel(x, None, ("nngp", "ntk")))
    return lambda: jax.block_until_ready(function(x))


def convolutional() -> tuple[torch.nn.Module, torch.Tensor]:
    x = torch.randn(32, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return networks.cnn((8,) * 4, outputs=1, weight_std=STD, parametrization="ntk"), x


def their_convolutional() -> Callable[[], object]:
    import jax

    stax = neural_tangents().stax
    layers = []
    for i in range(4):
        layers += [stax.Conv(8, (3, 3), padding="SAME", W_std=STD), stax.Relu()]
        layers += [stax.AvgPool((2, 2), strides=(2, 2))] if i < 3 else []
    *_, kernel = stax.serial(*layers, stax.GlobalAvgPool(), stax.Dense(1, W_std=STD))
    x = convolutional()[1].permute(0, 2, 3, 1).numpy()
    function = jax.jit(lambda x: kernel(x, None, ("nngp", "ntk")))
    return lambda: jax.block_until_ready(function(x))


CASES = {
    "theory-mlp": (
        "Five kernels of a ReLU MLP of depth 4, 2000 points of 64 features",
        perceptron,
        their_perceptron,
    ),
    "theory-cnn": (
        "Five kernels of the paper's CNN with global pooling, 32 images 16×16",
        convolutional,
        their_convolutional,
    ),
}


def ensembles(network: torch.nn.Module) -> dict[str, torch.nn.Module]:
    law = laws.Shifted(0.5)
    return {
        "embens, centred modulations": embens.embed(network),
        "embens, shifted modulations": embens.embed(network, pre=law, post=law),
        "embens, the plain network": network,
    }


def peak_bytes(kind: str, name: str) -> int:
    """Return the peak memory of one computation in a process of its own."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=_peak, args=(kind, name, sender))
    process.start()
    result = receiver.recv()
    process.join()
    return result


def _peak(kind: str, name: str, connection) -> None:
    _, build, theirs = CASES[kind]
    network, x = build()
    if name == "neural-tangents":
        theirs()()
    elif name:
        theory.kernels(ensembles(network)[name], x)
    else:  # nothing but the libraries
        neural_tangents()
    status = Path("/proc/self/status").read_text()  # ru_maxrss would be the parent's, if larger
    connection.send(1024 * int(status.split("VmHWM:")[1].split()[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=[name.removeprefix("theory-") for name in CASES])
    options = parser.parse_args()
    for kind, (title, build, theirs) in CASES.items():
        if options.only and not kind.endswith(options.only):
            continue
        network, x = build()
        contestants = [
            Contestant(name, lambda e=e, x=x: theory.kernels(e, x), ours=True)
            for name, e in ensembles(network).items()
        ]
        row = Row(
            name=kind,
            title=title,
            unit="neural-tangents' NNGP and NTK of one network",
            bar=1.0,
            limit=0.5,
            limit_reason="half of the pairs, by symmetry, at the same cost for each",
            rounds=options.rounds,
        )
        row.results, row.reference = compare(
            theirs(), contestants, rounds=options.rounds, seconds=0.1
        )
        print(row)
        base = peak_bytes(kind, "")
        for name in (*ensembles(network), "neural-tangents"):
            megabytes = (peak_bytes(kind, name) - base) / 2**20
            print(f"    {name:<42} {megabytes:7.0f} MB above the libraries", flush=True)
        write(row)


if __name__ == "__main__":
    main()
