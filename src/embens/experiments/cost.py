"""What ensembles cost (the paper's text: 10 % more time at M = 50 for last-layer dropout).

Ensemble and reference network are timed in turn, and the ratio is that of their fastest turns,
which other work on the machine disturbs least. Last-layer dropout is timed at inference as
``collapse`` leaves it, one network with the mean output.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from embens import laws
from embens.embedding.families import independent, last_layer_dropout, mc_dropout
from embens.ensemble import EmbeddedEnsemble
from embens.experiments.claims import Claim, Frame, Rows, judge, trend
from embens.experiments.contract import CellBase, Row, batch_ensemble
from embens.experiments.figure import Figure, Panel, curves
from embens.experiments.setting import PRESETS, Setting

LABEL = "text, 10 % at M=50"
TITLE = "Cost against the reference network"
ABOUT = (
    "The paper's network on random images: time of a training step and of inference, parameters, "
    "and memory (parameters and what the backward pass keeps), relative to the reference network."
)
COLOURS = {
    "BatchEnsemble": "#1f77b4",
    "MC dropout": "#2ca02c",
    "last-layer dropout": "#d62728",
    "independent": "#7f7f7f",
}

MEMBERS = {"quick": (1, 2, 4), "cpu": (1, 2, 4, 8, 16), "paper": (1, 2, 5, 10, 20, 50)}
MOST = {  # for last-layer dropout
    "quick": (1, 2, 4, 8, 20, 50),
    "cpu": (1, 2, 4, 8, 16, 50),
    "paper": (1, 2, 5, 10, 20, 50),
}
BATCH = {"quick": 32, "cpu": 32, "paper": 128}
TURNS = {"quick": 3, "cpu": 5, "paper": 10}
SEEDS = {"quick": 4, "cpu": 5, "paper": 5}


@dataclass(frozen=True)
class Cell(CellBase):
    """One ensemble; ``width`` is relative to the paper's network, a seed is a repetition."""

    family: str
    members: int
    width: float
    batch: int
    turns: int

    @property
    def weight(self) -> float:
        folded = 1 if self.family == "last-layer dropout" else self.members
        return (2 + folded) * self.turns


def cells(setting: Setting) -> list[Cell]:
    """Return families and members."""
    preset = setting.preset
    return [
        Cell(family, members, 1.0, BATCH[preset], TURNS[preset], setting=setting)
        for family in COLOURS
        for members in (MOST if family == "last-layer dropout" else MEMBERS)[preset]
    ]


def make(
    family: str, network: nn.Module, members: int, generator: torch.Generator
) -> EmbeddedEnsemble:
    """Return an ensemble of a family."""
    if family == "MC dropout":
        return mc_dropout(network, members, law=laws.Normal(), generator=generator)
    families = {"BatchEnsemble": batch_ensemble, "independent": independent}
    return families.get(family, last_layer_dropout)(network, members, generator=generator)


def measure(cell: Cell) -> Row:
    """Time one ensemble and the reference network in turn."""
    device = cell.setting.device
    network, generator = replace(cell, setting=PRESETS["paper"]).draw()
    network = network.to(device)
    ensemble = make(cell.family, network, cell.members, generator).to(device)
    inputs = torch.randn(cell.batch, 3, 32, 32, generator=generator).to(device)
    target = torch.randint(100, (cell.batch,), generator=generator).to(device)
    served = ensemble.collapse() if cell.family == "last-layer dropout" else ensemble

    def single() -> Tensor:
        return nn.functional.cross_entropy(network(inputs), target)

    def together() -> Tensor:
        return ensemble.objective(ensemble(inputs), target)

    steps = (_step(network, single), _step(ensemble, together))
    passes = (torch.no_grad()(lambda: network(inputs)), torch.no_grad()(lambda: served(inputs)))
    return {
        "step": _ratio(*steps, turns=cell.turns, device=device),
        "inference": _ratio(*passes, turns=cell.turns, device=device),
        "parameters": _numbers(ensemble) / _numbers(network),
        "memory": _memory(ensemble, together) / _memory(network, single),
    }


def _step(module: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], object]:
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-6, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def _ratio(
    one: Callable[[], object], other: Callable[[], object], *, turns: int, device: str
) -> float:
    """Return how many times longer the second takes, from the fastest of some turns of each."""
    fastest = [math.inf, math.inf]
    for turn in range(turns + 1):
        for k, function in enumerate((one, other)):
            started = time.perf_counter()
            function()
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            if turn:  # the first one warms up
                fastest[k] = min(fastest[k], time.perf_counter() - started)
    return fastest[1] / fastest[0]


def _numbers(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


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


def _at_fifty(rows: Rows) -> Rows:
    return rows.where(family="last-layer dropout", members=50)


def _most_common(rows: Rows) -> Rows:
    """Return the BatchEnsembles with the largest M that all families have."""
    common = min(int(some["members"].max()) for _, some in rows.by("family"))
    return rows.where(family="BatchEnsemble", members=common)


def claims(table: Frame) -> list[Claim]:
    """Return the paper's statement, and what it rests on."""
    test = partial(judge, table)
    cheap = "about 10 % more computation time at M=50"
    return [
        test("last-layer dropout: step", lambda t: _at_fifty(t).mean("step"), below=1.1).says(
            "a training step costs at most 1.1 × that of one network at M=50",
            paper=cheap,
            measure="ratio of times",
        ),
        test(
            "last-layer dropout: inference", lambda t: _at_fifty(t).mean("inference"), below=1.1
        ).says(
            "inference costs at most 1.1 × that of one network at M=50",
            paper=cheap,
            measure="ratio of times, collapsed",
        ),
        test(
            "BatchEnsemble: parameters", lambda t: _most_common(t).mean("parameters"), below=1.1
        ).says(
            "a BatchEnsemble has hardly more parameters than one network (1.1 ×)",
            paper="approximately the same as in the reference model",
            measure="ratio of parameters at the largest M that all families have",
        ),
        test(
            "BatchEnsemble: step",
            trend(partial(Rows.where, family="BatchEnsemble"), "step", log_y=True),
            above=0.7,
            below=1.2,
        ).says(
            "the time of a BatchEnsemble's step grows in proportion to M",
            paper="computations are reused only if modulations are in the last layers",
            measure="exponent of the time in M",
        ),
    ]


def plot(table: Frame) -> Figure:
    """Return a panel for each ratio."""
    draw = partial(curves, table, "members", by="family", colours=COLOURS)
    titles = {
        "step": "training step",
        "inference": "inference",
        "parameters": "parameters",
        "memory": "memory in training",
    }
    panels = [
        Panel(title, "members M", "relative to one network", draw(y=column), x_log=2, y_log=10)
        for column, title in titles.items()
    ]
    return Figure(TITLE, panels)
