"""Rows on ``torch.compile``: training steps of the folded graph, compiled and eager."""

from __future__ import annotations

import torch

import embens
from benchmarks.rows import Row
from benchmarks.tasks import Task, ensemble_step, gradient_clearer, mlp_task, transformer_task
from benchmarks.timing import Contestant, Step, compare


def compile_small(rounds: int) -> list[Row]:
    """A perceptron 3×64 with 16 members."""
    return _compile("compile-small", "MLP 3×64, batch 64", mlp_task(64, 64), 16, rounds)


def compile_mlp(rounds: int) -> list[Row]:
    """A perceptron 3×256 with 8 members."""
    return _compile("compile-mlp", "MLP 3×256, batch 256", mlp_task(256, 256), 8, rounds)


def compile_transformer(rounds: int) -> list[Row]:
    """A transformer with 8 members."""
    title = "transformer, 2 layers of 64, 20 tokens, batch 16"
    return _compile("compile-transformer", title, transformer_task(), 8, rounds)


def _compile(name: str, label: str, task: Task, members: int, rounds: int) -> list[Row]:
    """Return a row in units of eager references and a row in units of the eager ensemble."""
    ensemble = embens.batch_ensemble(task.reference, members)
    eager = ensemble_step(ensemble, task)
    eager()  # the folded graph is built outside of the compiler
    compiled = compiled_step(ensemble, task)
    title = f"torch.compile of a training step, BatchEnsemble M={members}, {label}, one thread"
    against_references = compare(
        task.step,
        [
            Contestant("embens, compiled", compiled, ours=True),
            Contestant("embens, eager", eager, ours=True),
        ],
        rounds=rounds,
        per=members,
    )
    against_eager = compare(
        eager, [Contestant("embens, compiled", compiled, ours=True)], rounds=rounds
    )
    rows = []
    units = {
        name: (f"{members} × eager reference", against_references),
        f"{name}-eager": ("the same step, eager", against_eager),
    }
    for row_name, (unit, comparison) in units.items():
        row = Row(row_name, title, unit, rounds=rounds)
        row.reference = comparison.reference
        row.results = comparison.results
        rows.append(row)
    return rows


def compiled_step(ensemble: embens.EmbeddedEnsemble, task: Task) -> Step:
    """Return a training step whose forward pass, loss and backward pass are compiled."""
    clear = gradient_clearer(ensemble)

    @torch.compile(dynamic=False)
    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return embens.objective(ensemble(x), y)

    def step() -> None:
        clear()
        loss(task.x, task.y).backward()

    return step
