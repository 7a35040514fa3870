"""Work that is killed in :mod:`killing`: each function ends with the same files, or goes on."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from training import problem

import embens
from embens import laws, networks, theory
from embens.files import write_atomically

torch.optim.SGD(embens.embed(problem.reference(), 2).parameter_groups(lr=0.1))  # imports a lot


def kernel(folder: Path) -> None:
    x = torch.randn(15, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ensemble = embens.embed(networks.mlp(5, 4, 2), 2, pre=laws.Normal(), post=laws.Shifted(0.5))
    theory.write_kernels(folder / "k.npz", ensemble, x, block=2)


def fit(folder: Path) -> None:
    """Train with checkpoints; what counts is the end, as times differ."""
    run = folder.with_name(f"run-{folder.name}")
    generator = torch.Generator().manual_seed(1)
    ensemble = embens.embed(problem.reference(dropout=0.3), 3, generator=generator)
    options = {"epochs": 6, "batch_size": 16, "lr": 0.05, "checkpoint": run, "every": 1}
    history = embens.fit(ensemble, problem.data(), problem.data(20, 5), **options)
    assert not [path for path in run.iterdir() if path.name.startswith(".")]
    ensemble.save(folder / "ensemble.safetensors")
    rows = [[r["loss"], r["validation_loss"], r["correlation"]] for r in history.epochs]
    write_atomically(folder / "rows.json", json.dumps(rows))
    assert embens.load(folder / "ensemble.safetensors", problem.reference()).members == 3


def grid(folder: Path) -> None:
    """Run a grid in this process, and report; what counts are its cells, as times differ."""
    from tests.reproduction import problem as cells

    from reproduction.grid import runs as grids
    from reproduction.grid import results as table
    from reproduction.grid.engines import inline
    from reproduction.grid.results import Results
    from reproduction.report import page

    run = folder.with_name(f"run-{folder.name}")
    table.draw = lambda _, path: write_atomically(path, b"a picture takes a second")
    results = Results(run)
    grids.run("transition", cells.cells(3), results, inline)
    table.write(
        results, "transition", cells.SETTING, table.tidy(results, "transition", cells.SETTING)
    )
    rows = {key: record["rows"] for key, record in sorted(Results(run).records.items())}
    (entry,) = page.collect(run)
    write_atomically(folder / "rows.json", json.dumps([rows, entry["claims"], entry["figure"]]))


def stream(folder: Path) -> None:
    """Fit to a file in parts; the model has times in it, so what counts is what it predicts."""
    from embens import cli
    from embens.estimators import load

    run, data = folder.with_name(f"run-{folder.name}"), folder.with_name("data.csv")
    if not data.exists():
        rows = [f"{i % 7},{i * i % 11},{'yes' if i % 7 > 3 else 'no'}" for i in range(90)]
        data.write_text("\n".join(["a,b,kind", *rows]))
    arguments = ("--target", "kind", "--stream", "--members", "2", "--epochs", "2", "--quiet")
    cli.main(["fit", str(data), *arguments, "--out", str(run)])
    assert {p.name for p in run.iterdir()} == {
        "card.md",
        "model.safetensors",
        "scores.json",
        "predictions.csv",
    }
    for name in ("scores.json", "predictions.csv"):
        write_atomically(folder / name, (run / name).read_bytes())
    chance = load(run / "model.safetensors").predict_proba([[1.0, 2.0], [6.0, 3.0]])
    write_atomically(folder / "chance.json", json.dumps(chance.tolist()))
