"""Overhead of an experiment's cells: `transition --preset quick` against its bare arithmetic.

    python -m benchmarks.experiments [--seeds 4]

One p, every M, in turns: the training steps alone as a hand-written loop; and whole cells as the
command measures them (building, training with `embens.fit`, evaluating). Then the whole command,
with the preset's seeds, on all cores, against the bare arithmetic of all its cells shared out over
those cores.
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

import torch
from torch.nn import functional as F

from benchmarks.timing import RESULTS
from reproduction.figures import transition
from reproduction.grid.cells import Cell, cells_of
from reproduction.grid.settings import PRESETS, load_data

SETTING = PRESETS["quick"]
MEMBERS = transition.MEMBERS["quick"]
SHIFT = 0.3


def bare(members: int) -> None:
    """Train an ensemble of the quick preset, by hand, with nothing around the steps."""
    (inputs, targets), rows = load_data(SETTING).train, SETTING.batch_size
    width = SETTING.channels[0]
    sizes = [(width, inputs.shape[1]), (width, width), (width, width), (10, width)]
    weights = [torch.randn(s) * (2 / s[1]) ** 0.5 for s in sizes]
    pre = [torch.randn(members, 1, width) for _ in range(3)]
    post = [torch.randn(members, 1, width) for _ in range(3)]
    leaves = [*weights, *pre, *post]
    values = [leaf.detach() for leaf in leaves]
    momenta = [torch.zeros_like(v) for v in values]
    for leaf in leaves:
        leaf.requires_grad_()
    for epoch in range(SETTING.epochs):
        rate = 0.01 + 0.99 * min(1.0, 2 * (1 - epoch / SETTING.epochs))  # the paper's schedule
        order = torch.randperm(len(targets))
        pairs = zip(inputs[order].split(rows), targets[order].split(rows), strict=True)
        for x, y in pairs:
            for weight, v, u in zip(weights[:3], pre, post, strict=True):
                x = torch.relu(F.linear(x, weight) * v) * u
            outputs = F.linear(x, weights[3]).flatten(0, 1)
            loss = F.cross_entropy(outputs, y.repeat(members), reduction="sum") / rows
            gradients = list(torch.autograd.grad(loss, leaves))
            torch._foreach_add_(gradients[:4], values[:4], alpha=SETTING.weight_decay)
            torch._foreach_mul_(momenta, 0.9)
            torch._foreach_add_(momenta, gradients)
            torch._foreach_add_(values, momenta, alpha=-SETTING.lr * rate)


def cell(members: int) -> None:
    swept = {"p": SHIFT, "members": members, "gamma": "M", "seed": 0}
    transition.measure(Cell(SETTING, swept))


def seconds(work, members: int) -> float:
    start = time.process_time()
    work(members)
    return time.process_time() - start


def whole_run(seeds: int) -> tuple[int, float]:
    """Run the command in a fresh folder; return the number of cells and the seconds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "reproduction", "transition"]
        command += ["--preset", "quick", "--out", folder, "--seeds", str(seeds)]
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        taken = time.perf_counter() - start
    return len(cells_of("transition", SETTING, range(seeds))), taken


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=transition.SEEDS["quick"])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    roads = {"bare": bare, "cell": cell}
    for work in roads.values():
        work(1)
    times = {name: {m: [] for m in MEMBERS} for name in roads}
    for _ in range(options.rounds):
        for members in MEMBERS:
            for name, work in roads.items():
                times[name][members].append(seconds(work, members))
    found = {n: {m: statistics.median(t[m]) for m in MEMBERS} for n, t in times.items()}
    cells = cells_of("transition", SETTING, range(options.seeds))
    total = {n: sum(t[c.members] for c in cells) for n, t in found.items()}
    count, taken = whole_run(options.seeds)
    cores = os.cpu_count() or 1
    result = {
        "cells": count,
        "cores": cores,
        "seconds_by_members": found,
        "cells_over_bare": total["cell"] / total["bare"],
        "run_seconds": taken,
        "run_over_bare": taken * cores / total["bare"],
        "cells_per_minute": 60 * count / taken,
    }
    print(json.dumps(result, indent=2))
    (RESULTS / "experiments.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
