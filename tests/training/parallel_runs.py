"""Runs that give the same in one process and in several.

`measure` takes the environment of torchrun; as a script, this file writes its results to a folder.
"""

import os
import sys
from pathlib import Path
from typing import Any

import cases
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training import problem

import embens
from embens.training import (
    Batches,
    Callback,
    Checkpoint,
    ClipGradients,
    KeepLast,
    Objective,
    TimeLimit,
    fit,
)

COLUMNS = (
    "loss",
    "ensemble_accuracy",
    "correlation",
    "validation_loss",
    "gradient_norm_shared",
    "gradient_norm_individual",
)
TOOLS = (DistributedDataParallel, fully_shard)


class Observer(Callback):
    """Record the losses of the steps, and the number of epochs at the end."""

    def __init__(self):
        self.values = []

    def on_step(self, run):
        self.values.append(run.loss)

    def on_end(self, run, history):
        self.values.append(len(history.epochs))


def make_families() -> dict[str, embens.EmbeddedEnsemble]:
    return {
        "independent regime": problem.ensemble(),
        "collective regime": problem.ensemble(p=0.9),
        "last layer": embens.last_layer_dropout(
            problem.reference(), 3, trainable=True, generator=torch.Generator().manual_seed(1)
        ),
        "networks": embens.independent(
            problem.reference(), 3, generator=torch.Generator().manual_seed(1)
        ),
    }


def measure(folder: Path, rank: int = 0, world: int = 1) -> dict[str, Any]:
    """Return weights and histories of runs by name, and facts of this process."""
    results: dict[str, Any] = {}
    checkpoint = Checkpoint(folder / f"checkpoints{world}", every=4)
    observer = Observer()
    results["same"] = train(rank, problem.ensemble())
    results["own"] = train(rank, problem.ensemble(), Batches("own"))
    results["chunk"] = train(rank, problem.ensemble(), Objective(chunk=2))
    results["callbacks"] = train(rank, problem.ensemble(), observer, ClipGradients(0.5))
    results["fresh"] = train(rank, embens.mc_dropout(problem.reference(), 3, fresh=True))
    results["checkpoint"] = train(rank, problem.ensemble(), checkpoint, progress=True)
    results["observed"] = observer.values

    limit = TimeLimit(0.3 * (1 + rank))  # clocks that do not agree
    history = fit(
        problem.ensemble(), problem.data(65), epochs=10**6, callbacks=[limit], progress=False
    )
    results["limited"] = history.stopped, len(history.epochs)
    assert dist.is_initialized() == (world > 1)

    for tool in TOOLS:
        for family, ensemble in make_families().items():
            name = f"{tool.__name__}, {family}"
            results[name] = take_steps(ensemble, tool, rank, world, optim.SGD, momentum=0.9)
        for family, ensemble in make_families().items():
            name = f"{tool.__name__}, {family}, AdamW"
            results[name] = take_steps(ensemble, tool, rank, world, optim.AdamW)
    for family in cases.FAMILIES:
        results[f"gradients, {family}"] = differentiate(family, rank, world)
    return results


def differentiate(family: str, rank: int, world: int) -> dict[str, Tensor]:
    """Return the gradients of a batch of which each process has a part."""
    ensemble = cases.FAMILIES[family](
        problem.reference(), members=3, generator=torch.Generator().manual_seed(1)
    )
    model: nn.Module = ensemble
    if world > 1:
        model = DistributedDataParallel(ensemble)
    x, y = problem.data(8)
    rows = slice(rank, None, world)
    ensemble.objective(model(x[rows]), y[rows]).backward()
    gradients = {}
    for name, parameter in ensemble.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad.clone()
    return gradients


def train(
    rank: int, ensemble: embens.EmbeddedEnsemble, *callbacks: Callback, progress: bool = False
) -> dict[str, Tensor]:
    """Return the weights after `fit`, and the rows of its history."""
    if rank:  # only the first process has the right weights to begin with
        with torch.no_grad():
            for parameter in ensemble.parameters():
                parameter.add_(1.0)
    history = fit(
        ensemble,
        problem.data(65),
        problem.data(20, 5),
        epochs=3,
        batch_size=16,
        lr=0.05,
        callbacks=[KeepLast(), *callbacks],
        progress=progress,
    )
    rows = torch.tensor([[row[column] for column in COLUMNS] for row in history.epochs])
    return {**ensemble.state_dict(), "rows": rows.nan_to_num(-9)}


def take_steps(
    ensemble: embens.EmbeddedEnsemble, tool, rank: int, world: int, kind, **options
) -> dict[str, Tensor]:
    """Return the weights after three steps of a plain loop on this process's rows."""
    model: nn.Module = ensemble
    if world > 1:
        model = tool(ensemble)
    x, y = problem.data(32)
    rows = slice(rank, None, world)
    groups = ensemble.parameter_groups(0.01, 0.02, gamma=2, optimizer=kind)
    optimizer = kind(groups, **options)
    for _ in range(3):
        optimizer.zero_grad()
        embens.objective(model(x[rows]), y[rows]).backward()
        optimizer.step()
    weights = {}
    for name, parameter in ensemble.named_parameters():
        if hasattr(parameter, "full_tensor"):
            parameter = parameter.full_tensor()
        weights[name] = parameter.detach()
    return weights


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.save(measure(folder, rank, world), folder / f"{world}-{rank}.pt")


if __name__ == "__main__":
    main()
