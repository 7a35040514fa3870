"""Overhead of an experiment: ``transition --preset quick`` against its bare arithmetic.

    python -m benchmarks.experiments [--seeds 4] [--write]

For one p and every M, a hand-written training loop alternates with a whole cell of the experiment
(building, ``embens.fit``, evaluation). Then the whole command runs on all cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

from benchmarks.rows import RESULTS
from embens.files import write_atomically
from reproduction.figures import transition
from reproduction.grid.cells import Cell, cells_of
from reproduction.grid.settings import PRESETS, load_data

SETTING = PRESETS["quick"]
MEMBERS = transition.MEMBERS["quick"]
SHIFT = 0.3


def train_by_hand(members: int) -> None:
    """Train an ensemble of the quick preset without any library around the steps."""
    inputs, targets = load_data(SETTING).train
    rows, width = SETTING.batch_size, SETTING.channels[0]
    sizes = [(width, inputs.shape[1]), (width, width), (width, width), (10, width)]
    weights = [torch.randn(size) * (2 / size[1]) ** 0.5 for size in sizes]
    pre = [torch.randn(members, 1, width) for _ in range(3)]
    post = [torch.randn(members, 1, width) for _ in range(3)]
    leaves = [*weights, *pre, *post]
    values = [leaf.detach() for leaf in leaves]
    momenta = [torch.zeros_like(value) for value in values]
    for leaf in leaves:
        leaf.requires_grad_()
    for epoch in range(SETTING.epochs):
        # The paper's schedule: constant, then linearly decreasing.
        rate = 0.01 + 0.99 * min(1.0, 2 * (1 - epoch / SETTING.epochs))
        order = torch.randperm(len(targets))
        batches = zip(inputs[order].split(rows), targets[order].split(rows), strict=True)
        for x, y in batches:
            for weight, v, u in zip(weights[:3], pre, post, strict=True):
                x = torch.relu(F.linear(x, weight) * v) * u
            outputs = F.linear(x, weights[3]).flatten(0, 1)
            loss = F.cross_entropy(outputs, y.repeat(members), reduction="sum") / rows
            gradients = list(torch.autograd.grad(loss, leaves))
            torch._foreach_add_(gradients[:4], values[:4], alpha=SETTING.weight_decay)
            torch._foreach_mul_(momenta, 0.9)
            torch._foreach_add_(momenta, gradients)
            torch._foreach_add_(values, momenta, alpha=-SETTING.lr * rate)


def measure_cell(members: int) -> None:
    """Run one cell of the experiment."""
    values = {"p": SHIFT, "members": members, "gamma": "M", "seed": 0}
    transition.measure(Cell(SETTING, values))


def cpu_seconds(function: Callable[[int], None], members: int) -> float:
    """Return the CPU time of a function."""
    start = time.process_time()
    function(members)
    return time.process_time() - start


def run_command(seeds: int) -> float:
    """Run the whole command in a new folder and return its seconds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "reproduction", "transition"]
        command += ["--preset", "quick", "--out", folder, "--seeds", str(seeds)]
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - start


def median_seconds(rounds: int) -> dict[str, dict[int, float]]:
    """Return the CPU time of both functions for every number of members."""
    functions = {"by hand": train_by_hand, "cell": measure_cell}
    times: dict[str, dict[int, list[float]]] = {}
    for name, function in functions.items():
        function(1)  # warm up
        times[name] = {members: [] for members in MEMBERS}
    for _ in range(rounds):
        for members in MEMBERS:
            for name, function in functions.items():
                times[name][members].append(cpu_seconds(function, members))
    medians: dict[str, dict[int, float]] = {}
    for name, by_members in times.items():
        medians[name] = {m: statistics.median(values) for m, values in by_members.items()}
    return medians


def main() -> None:
    """Measure and print the overhead."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=transition.SEEDS["quick"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="store the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    medians = median_seconds(options.rounds)
    cells = cells_of("transition", SETTING, range(options.seeds))
    totals = {}
    for name, seconds in medians.items():
        totals[name] = sum(seconds[cell["members"]] for cell in cells)
    run_seconds = run_command(options.seeds)
    cores = os.cpu_count() or 1
    result = {
        "cells": len(cells),
        "cores": cores,
        "seconds_by_members": medians,
        "cells_over_bare": totals["cell"] / totals["by hand"],
        "run_seconds": run_seconds,
        "run_over_bare": run_seconds * cores / totals["by hand"],
        "cells_per_minute": 60 * len(cells) / run_seconds,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.write:
        write_atomically(RESULTS / "experiments.json", text + "\n")


if __name__ == "__main__":
    main()
