"""Functions that :mod:`killing` kills and repeats: each must end with the same files."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from training import problem

import embens
from embens import laws, networks, theory
from embens.files import write_atomically
from embens.training import Checkpoint, WeightAveraging

# Import everything now: children of a fork would repeat it.
torch.optim.SGD(embens.embed(problem.reference(), 2).parameter_groups(lr=0.1))


def kernel(folder: Path) -> None:
    """Write a large kernel block by block."""
    x = torch.randn(15, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ensemble = embens.embed(networks.mlp(5, 4, 2), 2, pre=laws.Normal(), post=laws.Shifted(0.5))
    theory.write_kernels(folder / "k.npz", ensemble, x, block=2)


def fit(folder: Path) -> None:
    """Train with checkpoints; write the result without times, which differ."""
    run = folder.with_name(f"run-{folder.name}")
    generator = torch.Generator().manual_seed(1)
    ensemble = embens.embed(problem.reference(dropout=0.3), 3, generator=generator)
    callbacks = [Checkpoint(run, every=1), WeightAveraging(1.0)]
    options = {"epochs": 6, "batch_size": 16, "lr": 0.05, "callbacks": callbacks}
    history = embens.fit(ensemble, problem.data(), problem.data(20, 5), **options)
    assert not [path for path in run.iterdir() if path.name.startswith(".")]
    ensemble.save(folder / "ensemble.safetensors")
    rows = [[r["loss"], r["validation_loss"], r["correlation"]] for r in history.epochs]
    write_atomically(folder / "rows.json", json.dumps(rows))
    assert embens.load(folder / "ensemble.safetensors", problem.reference()).members == 3


def grid(folder: Path) -> None:
    """Run a grid in this process and report; only its cells are compared, as times differ."""
    from reproduction.grid import results as summaries
    from reproduction.grid import runs
    from reproduction.grid.engines import inline
    from reproduction.grid.results import Results
    from reproduction.report import page
    from tests.reproduction import problem as cells

    run = folder.with_name(f"run-{folder.name}")
    summaries.draw = lambda _, path: write_atomically(path, b"a picture takes a second")
    results = Results(run)
    runs.run("transition", cells.cells(3), results, inline)
    table = summaries.make_table(results, "transition", cells.SETTING)
    summaries.write_summary(results, "transition", cells.SETTING, table)
    rows = {key: record["rows"] for key, record in sorted(Results(run).records.items())}
    (entry,) = page.collect(run)
    write_atomically(folder / "rows.json", json.dumps([rows, entry["claims"], entry["figure"]]))
