"""What ensembles cost (the paper's text: 10 % more time at M = 50 for last-layer dropout).

Time of a training step and of inference, parameters, and memory, each as a ratio to the reference
network; all families and independent ensembles. It is the paper's network on random images: no
training, no data. Both are timed in turn, and the ratio is that of their fastest turns, which
other work on the machine disturbs least. Last-layer dropout is timed at inference as ``collapse``
leaves it, one network with the mean output.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from embens import laws
from embens.embedding.families import batch_ensemble, independent, last_layer_dropout, mc_dropout
from embens.ensemble import EmbeddedEnsemble
from embens.experiments.claims import Claim, Table, judge, mean, select, slope
from embens.experiments.figure import Figure, Panel, curves
from embens.experiments.setting import PRESETS, Setting, reference

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


@dataclass(frozen=True)
class Cell:
    """One ensemble; ``width`` is relative to the paper's network, a seed is a repetition."""

    setting: Setting
    family: str
    members: int
    width: float
    batch: int
    turns: int
    seed: int

    @property
    def weight(self) -> float:
        """See :func:`embens.experiments.contract.weight`."""
        folded = 1 if self.family == "last-layer dropout" else self.members
        return (2 + folded) * self.turns


@dataclass(frozen=True)
class Sweep:
    """What a preset sweeps."""

    width: float
    batch: int
    members: tuple[int, ...]
    most: tuple[int, ...]  # for last-layer dropout
    turns: int
    seeds: int


SWEEPS = {
    "quick": Sweep(1.0, 32, (1, 2, 4), (1, 2, 4, 8, 20, 50), 3, 4),
    "cpu": Sweep(1.0, 32, (1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 50), 5, 5),
    "paper": Sweep(1.0, 128, (1, 2, 5, 10, 20, 50), (1, 2, 5, 10, 20, 50), 10, 5),
}

MAKE: dict[str, Callable[[nn.Module, int, torch.Generator], EmbeddedEnsemble]] = {
    "BatchEnsemble": lambda r, m, g: batch_ensemble(r, m, generator=g),
    "MC dropout": lambda r, m, g: mc_dropout(r, m, law=laws.Normal(), generator=g),
    "last-layer dropout": lambda r, m, g: last_layer_dropout(r, m, generator=g),
    "independent": lambda r, m, g: independent(r, m, generator=g),
}


def cells(setting: Setting, *, seeds: int | None = None) -> list[Cell]:
    """Return families, members and repetitions."""
    sweep = SWEEPS[setting.preset]
    return [
        Cell(setting, family, members, sweep.width, sweep.batch, sweep.turns, seed)
        for seed in range(seeds or sweep.seeds)
        for family in COLOURS
        for members in (sweep.most if family == "last-layer dropout" else sweep.members)
    ]


def measure(cell: Cell) -> dict[str, float]:
    """Time one ensemble and the reference network in turn."""
    paper, device = PRESETS["paper"], cell.setting.device
    generator = torch.Generator().manual_seed(cell.seed)
    network = reference(paper, cell.width, generator=generator).to(device)
    ensemble = MAKE[cell.family](network, cell.members, generator).to(device)
    inputs = torch.randn(cell.batch, 3, 32, 32, generator=generator).to(device)
    target = torch.randint(100, (cell.batch,), generator=generator).to(device)
    served = ensemble.collapse() if cell.family == "last-layer dropout" else ensemble

    def single() -> Tensor:
        return nn.functional.cross_entropy(network(inputs), target)

    def together() -> Tensor:
        return ensemble.objective(ensemble(inputs), target)

    steps = (_step(network, single), _step(ensemble, together))
    passes = (partial(_pass, network, inputs), partial(_pass, served, inputs))
    return {
        "step": _ratio(*steps, turns=cell.turns, device=device),
        "inference": _ratio(*passes, turns=cell.turns, device=device),
        "parameters": _numbers(ensemble) / _numbers(network),
        "memory": _memory(ensemble, together) / _memory(network, single),
    }


def _step(module: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], object]:
    optimiser = torch.optim.SGD(module.parameters(), lr=1e-6, momentum=0.9)

    def step() -> None:
        optimiser.zero_grad()
        loss().backward()
        optimiser.step()

    return step


@torch.no_grad()
def _pass(module: nn.Module, inputs: Tensor) -> Tensor:
    return module(inputs)


def _ratio(
    one: Callable[[], object], other: Callable[[], object], *, turns: int, device: str
) -> float:
    """Return how many times longer the second takes, from the fastest of some turns of each."""
    times: list[list[float]] = [[], []]
    for turn in range(turns + 1):
        for mine, function in zip(times, (one, other), strict=True):
            started = time.perf_counter()
            function()
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            if turn:  # the first one warms up
                mine.append(time.perf_counter() - started)
    return min(times[1]) / min(times[0])


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


def _at(table: Table, family: str) -> Table:
    return select(table, family=family)


def claims(table: Table) -> list[Claim]:
    """Return the paper's statement, and what it rests on."""
    test = partial(judge, table)
    cheap = "about 10 % more computation time at M=50"
    return [
        test(
            lambda t: mean(select(_at(t, "last-layer dropout"), members=50), "step"),
            name="last-layer dropout: step",
            statement="a training step costs at most 1.1 × that of one network at M=50",
            paper=cheap,
            measure="ratio of times",
            below=1.1,
        ),
        test(
            lambda t: mean(select(_at(t, "last-layer dropout"), members=50), "inference"),
            name="last-layer dropout: inference",
            statement="inference costs at most 1.1 × that of one network at M=50",
            paper=cheap,
            measure="ratio of times, collapsed",
            below=1.1,
        ),
        test(
            lambda t: mean(select(_at(t, "BatchEnsemble"), members=int(_common(t))), "parameters"),
            name="BatchEnsemble: parameters",
            statement="a BatchEnsemble has hardly more parameters than one network (1.1 ×)",
            paper="approximately the same as in the reference model",
            measure="ratio of parameters at the largest M that all families have",
            below=1.1,
        ),
        test(
            lambda t: slope(_at(t, "BatchEnsemble"), "members", "step", log_y=True),
            name="BatchEnsemble: step",
            statement="the time of a BatchEnsemble's step grows in proportion to M",
            paper="computations are reused only if modulations are in the last layers",
            measure="exponent of the time in M",
            above=0.7,
            below=1.2,
        ),
    ]


def _common(table: Table) -> int:
    return min(int(rows["members"].max()) for _, rows in table.groupby("family"))


def plot(table: Table) -> Figure:
    """Return a panel for each ratio."""
    panels = [
        Panel(
            title,
            "members M",
            "relative to one network",
            [
                c
                for family, colour in COLOURS.items()
                for c in curves(
                    _family(table, family), "members", column, by="family", colours=[colour]
                )
            ],
            x_log=True,
            y_log=True,
        )
        for title, column in (
            ("training step", "step"),
            ("inference", "inference"),
            ("parameters", "parameters"),
            ("memory in training", "memory"),
        )
    ]
    return Figure(TITLE, panels)


def _family(table: Table, family: str) -> Table:
    return table[table["family"] == family]
