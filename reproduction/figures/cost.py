"""Cost relative to the reference network (text, 10 % at M=50).

The paper's network on random images: time of a training step and of inference, parameters, and
memory (parameters and saved activations), relative to the reference network.

Ensemble and reference network are timed alternately, and the ratio is that of the fastest times,
which other processes on the machine disturb least. Last-layer dropout is timed at inference after
``collapse``, as one network with the mean output.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from embens import EmbeddedEnsemble, independent, last_layer_dropout, laws, mc_dropout
from reproduction.claims import Claim, slope
from reproduction.drawing import BLUE, GREEN, GREY, RED, Figure, Mark, curves, panels, state
from reproduction.grid.cells import Cell, Row, sweep
from reproduction.grid.settings import PRESETS, count_parameters
from reproduction.rows import Frame, Rows, where
from reproduction.training import batch_ensemble

BATCH_ENSEMBLE, MC_DROPOUT = "BatchEnsemble", "MC dropout"
LAST_LAYER, SEPARATE = "last-layer dropout", "independent"
COLOURS = {BATCH_ENSEMBLE: BLUE, MC_DROPOUT: GREEN, LAST_LAYER: RED, SEPARATE: GREY}
MEMBERS = {"quick": (1, 2, 4), "cpu": (1, 2, 4, 8, 16), "paper": (1, 2, 5, 10, 20, 50)}
LAST_LAYER_MEMBERS = {
    "quick": (1, 2, 4, 8, 20, 50),
    "cpu": (1, 2, 4, 8, 16, 50),
    "paper": (1, 2, 5, 10, 20, 50),
}
BATCH = {"quick": 32, "cpu": 32, "paper": 128}
TURNS = {"quick": 3, "cpu": 5, "paper": 10}
SEEDS = {"quick": 4, "cpu": 5, "paper": 5}

SWEEP = [
    sweep(
        family=[BATCH_ENSEMBLE, MC_DROPOUT, SEPARATE],
        members=MEMBERS,
        width=1.0,
        batch=BATCH,
        turns=TURNS,
    ),
    sweep(family=LAST_LAYER, members=LAST_LAYER_MEMBERS, width=1.0, batch=BATCH, turns=TURNS),
]


def estimate_cost(cell: Cell) -> float:
    """Return the rough cost of a cell: its passes through the network."""
    networks = 1 if cell["family"] == LAST_LAYER else cell["members"]
    return (2 + networks) * cell["turns"]


def build_family(cell: Cell, network: nn.Module, generator: torch.Generator) -> EmbeddedEnsemble:
    """Return the ensemble of a cell."""
    members = cell["members"]
    if cell["family"] == BATCH_ENSEMBLE:
        return batch_ensemble(network, members, generator=generator)
    if cell["family"] == MC_DROPOUT:
        return mc_dropout(network, members, law=laws.Normal(), fresh=False, generator=generator)
    if cell["family"] == LAST_LAYER:
        return last_layer_dropout(network, members, law=laws.Normal(), generator=generator)
    return independent(network, members, generator=generator)


def measure(cell: Cell) -> Row:
    """Time one ensemble and the reference network alternately."""
    device = cell.setting.device
    network, generator = replace(cell, setting=PRESETS["paper"]).build_reference()
    network = network.to(device)
    ensemble = build_family(cell, network, generator).to(device)
    inputs = torch.randn(cell["batch"], 3, 32, 32, generator=generator).to(device)
    target = torch.randint(100, (cell["batch"],), generator=generator).to(device)
    served = ensemble.collapse() if cell["family"] == LAST_LAYER else ensemble

    def network_loss() -> Tensor:
        return nn.functional.cross_entropy(network(inputs), target)

    def ensemble_loss() -> Tensor:
        return ensemble.objective(ensemble(inputs), target)

    network_step = partial(train_step, sgd(network), network_loss)
    ensemble_step = partial(train_step, sgd(ensemble), ensemble_loss)
    network_pass = partial(infer, network, inputs)
    ensemble_pass = partial(infer, served, inputs)
    return {
        "step": time_ratio(network_step, ensemble_step, cell["turns"], device),
        "inference": time_ratio(network_pass, ensemble_pass, cell["turns"], device),
        "parameters": count_parameters(ensemble) / count_parameters(network),
        "memory": memory(ensemble, ensemble_loss) / memory(network, network_loss),
    }


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with momentum and a rate that hardly changes the weights."""
    return torch.optim.SGD(module.parameters(), lr=1e-6, momentum=0.9)


def train_step(optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> None:
    """Make one training step."""
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()


@torch.no_grad()
def infer(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return the outputs without a graph."""
    return module(inputs)


def time_ratio(
    reference: Callable[[], object], other: Callable[[], object], turns: int, device: str
) -> float:
    """Return the time of one function relative to that of a reference.

    Args:
        reference: The reference.
        other: The function that is compared with it.
        turns: Number of timed calls of each; one more call of each warms up.
        device: The device they run on.

    Returns:
        The ratio of the fastest calls.
    """
    reference()
    other()
    reference_time = other_time = math.inf
    for _ in range(turns):
        reference_time = min(reference_time, seconds(reference, device))
        other_time = min(other_time, seconds(other, device))
    return other_time / reference_time


def seconds(function: Callable[[], object], device: str) -> float:
    """Return the duration of one call."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    started = time.perf_counter()
    function()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - started


def memory(module: nn.Module, loss: Callable[[], Tensor]) -> float:
    """Return the bytes of parameters, buffers and tensors saved for the backward pass."""
    bytes_of_storage: dict[int, int] = {}

    def record(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        bytes_of_storage[storage.data_ptr()] = storage.nbytes()
        return tensor

    for tensor in (*module.parameters(), *module.buffers()):
        record(tensor.detach())
    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        loss()
    return float(sum(bytes_of_storage.values()))


last_layer_of_fifty = where(family=LAST_LAYER, members=50)


def largest_common_batch_ensemble(rows: Rows) -> Rows:
    """Return the BatchEnsembles with the largest M that all families have."""
    largest = min(int(rows_of_family["members"].max()) for _, rows_of_family in rows.by("family"))
    return rows.where(family=BATCH_ENSEMBLE, members=largest)


PAPER_COST = Mark("paper: 1.1 × at M=50", y=1.1)
CHEAP = "about 10 % more computation time at M=50"
CLAIMS = [
    Claim(
        statement="a training step costs at most 1.1 × that of one network at M=50",
        measure="last-layer dropout, ratio of times",
        statistic=lambda rows: last_layer_of_fifty(rows).mean("step"),
        below=1.1,
        paper=CHEAP,
    ),
    Claim(
        statement="inference costs at most 1.1 × that of one network at M=50",
        measure="last-layer dropout, ratio of times, collapsed",
        statistic=lambda rows: last_layer_of_fifty(rows).mean("inference"),
        below=1.1,
        paper=CHEAP,
    ),
    Claim(
        statement="a BatchEnsemble has hardly more parameters than one network (1.1 ×)",
        measure="ratio of parameters at the largest M that all families have",
        statistic=lambda rows: largest_common_batch_ensemble(rows).mean("parameters"),
        below=1.1,
        paper="approximately the same as in the reference model",
    ),
    Claim(
        statement="the time of a BatchEnsemble's step grows in proportion to M",
        measure="exponent of the time in M",
        statistic=slope(where(family=BATCH_ENSEMBLE), "step", log_y=True),
        above=0.7,
        below=1.2,
        paper="computations are reused only if modulations are in the last layers",
    ),
]


def plot(table: Frame) -> Figure:
    """Return a panel for each ratio."""
    draw = partial(curves, table, "members", by="family", colours=COLOURS, ends="not timed beyond")
    texts = {
        "step": "training step",
        "inference": "inference",
        "parameters": "parameters",
        "memory": "memory in training",
    }
    titles = {}
    for column, text in texts.items():
        titles[column] = state(partial(ratio_text, Rows(table), column, text), text)
    marks = {"step": [PAPER_COST], "inference": [PAPER_COST]}
    all_panels = []
    for panel in panels(draw, titles, y_log=10, marks=marks):
        all_panels.append(replace(panel, y_label="ratio to one network"))
    return Figure(all_panels)


def ratio_text(rows: Rows, column: str, text: str) -> str:
    """Return a title with the ratios of the two families that share layers, at their largest M."""
    ratios = []
    for family in (LAST_LAYER, BATCH_ENSEMBLE):
        largest = rows.where(family=family).last("members")
        members = int(largest.mean("members"))
        ratios.append(f"{family} {largest.mean(column):.2f} × at M={members}")
    return f"{text}: {', '.join(ratios)}"
