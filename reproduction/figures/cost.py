"""Cost against the reference network (text, 10 % at M=50).

The paper's network on random images: time of a training step and of inference, parameters, and
memory (parameters and what the backward pass keeps), relative to the reference network.

Ensemble and reference network are timed in turn, and the ratio is that of their fastest turns,
which other work on the machine disturbs least. Last-layer dropout is timed at inference as
``collapse`` leaves it, one network with the mean output.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from embens import laws
from embens.embedding.families import independent, last_layer_dropout, mc_dropout
from reproduction.claims import Claim, Frame, Rows, trend, where
from reproduction.grid.cells import Cell, Row, batch_ensemble, sweep
from reproduction.drawing import Figure, curves, panels
from reproduction.grid.settings import PRESETS, count_parameters

LLD, SEPARATE = "last-layer dropout", "independent"
COLOURS = {"BatchEnsemble": "#1f77b4", "MC dropout": "#2ca02c", LLD: "#d62728", SEPARATE: "#7f7f7f"}
MEMBERS = {"quick": (1, 2, 4), "cpu": (1, 2, 4, 8, 16), "paper": (1, 2, 5, 10, 20, 50)}
MOST = {**MEMBERS, "quick": (1, 2, 4, 8, 20, 50), "cpu": (1, 2, 4, 8, 16, 50)}  # of the last layer
BATCH = {"quick": 32, "cpu": 32, "paper": 128}
TURNS = {"quick": 3, "cpu": 5, "paper": 10}
SEEDS = {"quick": 4, "cpu": 5, "paper": 5}

_SAME = {"width": 1.0, "batch": BATCH, "turns": TURNS}  # the width is relative to the paper's
SWEEP = [
    sweep(family=[name for name in COLOURS if name != LLD], members=MEMBERS, **_SAME),
    sweep(family=LLD, members=MOST, **_SAME),
]


def weight(cell: Cell) -> float:
    """Return roughly what a cell costs: its passes through the network."""
    return (2 + (1 if cell.family == LLD else cell.members)) * cell.turns


def measure(cell: Cell) -> Row:
    """Time one ensemble and the reference network in turn."""
    device = cell.setting.device
    network, generator = replace(cell, setting=PRESETS["paper"]).draw()
    network = network.to(device)
    make = {
        "BatchEnsemble": batch_ensemble,
        "MC dropout": partial(mc_dropout, law=laws.Normal()),
        LLD: last_layer_dropout,
        SEPARATE: independent,
    }[cell.family]
    ensemble = make(network, cell.members, generator=generator).to(device)
    inputs = torch.randn(cell.batch, 3, 32, 32, generator=generator).to(device)
    target = torch.randint(100, (cell.batch,), generator=generator).to(device)
    served = ensemble.collapse() if cell.family == LLD else ensemble

    def single() -> Tensor:
        return nn.functional.cross_entropy(network(inputs), target)

    def together() -> Tensor:
        return ensemble.objective(ensemble(inputs), target)

    step, step_together = (
        partial(_step, torch.optim.SGD(module.parameters(), lr=1e-6, momentum=0.9), loss)
        for module, loss in ((network, single), (ensemble, together))
    )
    passes = (torch.no_grad()(lambda: network(inputs)), torch.no_grad()(lambda: served(inputs)))
    return {
        "step": _ratio(step, step_together, cell.turns, device),
        "inference": _ratio(*passes, cell.turns, device),
        "parameters": count_parameters(ensemble) / count_parameters(network),
        "memory": _memory(ensemble, together) / _memory(network, single),
    }


def _step(optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> None:
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()


def _ratio(one: Callable[[], object], other: Callable[[], object], turns: int, on: str) -> float:
    """Return how many times longer the second takes, from the fastest of some turns of each."""
    fastest = [math.inf, math.inf]
    for turn in range(turns + 1):
        for k, function in enumerate((one, other)):
            started = time.perf_counter()
            function()
            if on.startswith("cuda"):
                torch.cuda.synchronize()
            if turn:  # the first one warms up
                fastest[k] = min(fastest[k], time.perf_counter() - started)
    return fastest[1] / fastest[0]


def _memory(module: nn.Module, loss: Callable[[], Tensor]) -> float:
    """Return bytes of parameters and of what the backward pass keeps, every storage once."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    for tensor in (*module.parameters(), *module.buffers()):
        keep(tensor.detach())
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss()
    return float(sum(kept.values()))


def _most_common(rows: Rows) -> Rows:
    """Return the BatchEnsembles with the largest M that all families have."""
    common = min(int(some["members"].max()) for _, some in rows.by("family"))
    return rows.where(family="BatchEnsemble", members=common)


_CHEAP, _at_fifty = "about 10 % more computation time at M=50", where(family=LLD, members=50)
CLAIMS = [
    Claim(lambda t: _at_fifty(t).mean("step"), below=1.1).says(
        "a training step costs at most 1.1 × that of one network at M=50",
        _CHEAP,
        "last-layer dropout, ratio of times",
    ),
    Claim(lambda t: _at_fifty(t).mean("inference"), below=1.1).says(
        "inference costs at most 1.1 × that of one network at M=50",
        _CHEAP,
        "last-layer dropout, ratio of times, collapsed",
    ),
    Claim(lambda t: _most_common(t).mean("parameters"), below=1.1).says(
        "a BatchEnsemble has hardly more parameters than one network (1.1 ×)",
        "approximately the same as in the reference model",
        "ratio of parameters at the largest M that all families have",
    ),
    Claim(trend(where(family="BatchEnsemble"), "step", log_y=True), above=0.7, below=1.2).says(
        "the time of a BatchEnsemble's step grows in proportion to M",
        "computations are reused only if modulations are in the last layers",
        "exponent of the time in M",
    ),
]


def plot(table: Frame) -> Figure:
    """Return a panel for each ratio."""
    draw = partial(curves, table, "members", by="family", colours=COLOURS, ends="not timed beyond")
    titles = {
        "step": "training step: is last-layer dropout free?",
        "inference": "inference, times one network",
        "parameters": "parameters: all but separate networks share",
        "memory": "memory in training, times one network",
    }
    return Figure(panels(draw, titles, y_log=10))
