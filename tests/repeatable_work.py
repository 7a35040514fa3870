"""Functions that :mod:`interruption` kills and repeats: each must end with the same files."""

from __future__ import annotations

import functools
import json
from functools import partial
from pathlib import Path

import torch
from torch import optim
from torch.utils.data import DataLoader, TensorDataset
from training import problem

import embens
from embens import laws, networks, theory
from embens.ensemble import saving
from embens.files import Format, write_atomically, write_tree
from embens.training import (
    Accumulate,
    Autocast,
    Batches,
    Checkpoint,
    ClipGradients,
    CSVLog,
    EarlyStopping,
    KeepBest,
    Objective,
    ScheduleEveryStep,
    TimeLimit,
    WeightAveraging,
)

# Import everything now: children of a fork would repeat it.
torch.optim.SGD(embens.embed(problem.reference(), 2).parameter_groups(lr=0.1))


def kernel(folder: Path) -> None:
    """Write a large kernel block by block."""
    x = torch.randn(15, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ensemble = embens.embed(networks.mlp(5, 4, 2), 2, pre=laws.Normal(), post=laws.Shifted(0.5))
    theory.write_kernels(folder / "k.npz", ensemble, x, block=2)


def fit(folder: Path) -> None:
    """Train with checkpoints and validation, save the result and read it again."""
    options = {"epochs": 6, "validation": problem.data(20, 5)}
    ensemble = train(folder, WeightAveraging(1.0), **options)
    ensemble.save(folder / "ensemble.safetensors")
    assert embens.load(folder / "ensemble.safetensors", problem.reference()).members == 3


def train(
    folder: Path, *callbacks, make=embens.embed, every=1, **options
) -> embens.EmbeddedEnsemble:
    """Train with a checkpoint at every step; write weights and history without times."""
    run = folder.with_name(f"run-{folder.name}")
    ensemble = make(problem.reference(dropout=0.3), 3, generator=torch.Generator().manual_seed(1))
    options = {"epochs": 2, "batch_size": 16, "lr": 0.05, "train": problem.data(), **options}
    history = embens.fit(ensemble, callbacks=[*callbacks, Checkpoint(run, every)], **options)
    assert not [path for path in run.iterdir() if path.name.startswith(".")]
    rows = []
    for record in history.epochs:
        rows.append([value for name, value in record.items() if name != "seconds"])
    write_atomically(folder / "rows.json", json.dumps(rows))
    write_tree(folder / "weights", Format("weights", 1), dict(ensemble.state_dict()))
    return ensemble


def loader() -> DataLoader:
    generator = torch.Generator().manual_seed(3)
    return DataLoader(TensorDataset(*problem.data()), 16, shuffle=True, generator=generator)


CYCLE = partial(optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=8)
FITS = {
    "batch_ensemble": {"make": embens.batch_ensemble},
    "mc_dropout": {"make": embens.mc_dropout},
    "last_layer_dropout": {"make": embens.last_layer_dropout},
    "masksembles": {"make": embens.masksembles},
    "low_rank": {"make": partial(embens.low_rank, rank=2)},
    "lora": {"make": partial(embens.low_rank, rank=2, kind="additive", shared="frozen")},
    "adapt": {"make": embens.adapt},
    "independent": {"make": embens.independent},
    "adam": {"optimizer": optim.Adam, "lr": 1e-3},
    "accumulate": {"callbacks": lambda: [Accumulate(2), ClipGradients(0.5)]},
    "average": {"callbacks": lambda: [WeightAveraging(0.5)], "validation": problem.data(20, 5)},
    "bfloat16": {"callbacks": lambda: [Autocast(torch.bfloat16)]},
    "float16": {"callbacks": lambda: [Autocast(torch.float16)]},
    "own_batches": {"callbacks": lambda: [Batches("own")]},
    "split_batches": {"callbacks": lambda: [Batches("split")]},
    "schedule_by_step": {"callbacks": lambda: [ScheduleEveryStep()], "scheduler": CYCLE},
    "plateau": {
        "scheduler": partial(optim.lr_scheduler.ReduceLROnPlateau, patience=0),
        "validation": problem.data(20, 5),
        "callbacks": lambda: [KeepBest(), EarlyStopping(1)],
    },
    "loader": {"train": loader},
    "data_set": {"train": lambda: problem.Pairs(*problem.data(), noise=True)},
    "state": {"make": lambda _, m, **o: embens.batch_ensemble(problem.Remembering(), m, **o)},
    "state_and_draws": {
        "make": lambda _, m, **o: embens.low_rank(problem.Remembering(draws=True), m, rank=2, **o)
    },
    "every_third": {"every": 3, "epochs": 3, "callbacks": lambda: [Accumulate(3)]},
    "sequential": {
        "epochs": 3,
        "scheduler": lambda o: optim.lr_scheduler.SequentialLR(
            o,
            [
                optim.lr_scheduler.LinearLR(o, total_iters=1),
                optim.lr_scheduler.CosineAnnealingLR(o, 3),
            ],
            milestones=[1],
        ),
    },
    "adafactor": {"optimizer": optim.Adafactor, "lr": 1e-2},
    "named_inputs": {
        "train": lambda: ({"input": problem.data()[0]}, problem.data()[1]),
        "make": embens.batch_ensemble,
    },
    "batch_norm": {
        "make": lambda _, m, **o: embens.batch_ensemble(problem.Normalised(), m, **o),
        "callbacks": lambda: [WeightAveraging(0.9), ClipGradients(1.0)],
    },
    "batch_norm_of_members": {
        "make": lambda _, m, **o: embens.independent(problem.Normalised(), m, **o),
        "callbacks": lambda: [Autocast(torch.bfloat16), Accumulate(2)],
        "optimizer": optim.AdamW,
        "lr": 1e-3,
        "scheduler": partial(optim.lr_scheduler.CosineAnnealingLR, T_max=2),
    },
    "fresh_masks_stopped_early": {
        "make": lambda _, m, **o: embens.mc_dropout(problem.Normalised(), m, **o),
        "train": lambda: loader(),
        "validation": problem.data(20, 5),
        "optimizer": optim.RMSprop,
        "lr": 1e-3,
        "epochs": 4,
        "callbacks": lambda: [KeepBest(), EarlyStopping(1)],
    },
    "nadam": {"optimizer": optim.NAdam, "lr": 1e-3, "callbacks": lambda: [TimeLimit(1e6)]},
    "chunks": {"callbacks": lambda: [Objective(chunk=2)], "make": embens.batch_ensemble},
}
"""Configurations of a run; functions are called in every process anew."""


def train_as(name: str, folder: Path) -> None:
    """Train one of the configurations."""
    options = dict(FITS[name])
    callbacks = options.pop("callbacks", list)()
    if callable(options.get("train")):
        options["train"] = options["train"]()
    train(folder, *callbacks, **options)


WORKS = {name: partial(train_as, name) for name in FITS}
"""All that is killed; see the end of the file for the other functions."""


def pretrained(folder: Path) -> None:
    """Write a folder of several files twice: an old or a new one is always there."""
    place = folder.with_name(f"run-{folder.name}")
    place.mkdir(exist_ok=True)
    ensembles = []
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        ensembles.append(embens.batch_ensemble(problem.reference(), 2, generator=generator))
    is_repeated = (place / "started").exists()
    (place / "started").touch()
    if is_repeated and (place / "done").exists():
        # The process was killed after the first folder was complete.
        values = embens.load(place / "members", problem.reference()).state_dict()
        candidates = [ensemble.state_dict() for ensemble in ensembles]
        assert any(all(torch.equal(values[k], c[k]) for k in values) for c in candidates)
        names = {path.name for path in (place / "members").iterdir()}
        assert names == {saving.FILE, saving.CARD}
    ensembles[0].save_pretrained(place / "members")
    (place / "done").touch()
    ensembles[1].save_pretrained(place / "members", results={"log loss": 0.5})
    assert not [path for path in place.iterdir() if path.name.startswith(".")]
    for name in (saving.FILE, saving.CARD):
        write_atomically(folder / name, (place / "members" / name).read_bytes())


def estimator(folder: Path) -> None:
    """Write a saved estimator and its card twice."""
    for _ in range(2):
        fitted_estimator().save(folder / "model.safetensors")
        fitted_estimator().model_card(folder / "card.md")
        type(fitted_estimator()).load(folder / "model.safetensors")
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


@functools.cache
def fitted_estimator():
    from embens.tabular import EmbeddedEnsembleClassifier

    x, y = problem.data(60)
    model = EmbeddedEnsembleClassifier(members=2, max_epochs=1, tune=False, random_state=0)
    return model.fit(x.numpy(), y.numpy())


def comparison(folder: Path) -> None:
    """Compare two candidates at two rates; times differ."""
    run = folder.with_name(f"run-{folder.name}")
    generator = torch.Generator().manual_seed(1)
    masks = embens.mc_dropout(problem.reference(), 2, generator=generator)
    candidates = {"one": problem.reference(dropout=0.3), "masks": masks}
    parts = [problem.data(rows, seed) for seed, rows in enumerate((40, 20, 20))]
    options = {"lr": (0.1, 0.3), "seeds": 2, "epochs": 2, "batch_size": 16, "progress": False}
    result = embens.compare(candidates, *parts, folder=run, **options)
    scores = {}
    for name, values in result.scores.items():
        scores[name] = {key: value for key, value in values.items() if "seconds" not in key}
    differences = [repr(difference) for difference in result.differences]
    write_atomically(folder / "scores.json", json.dumps([scores, differences]))
    assert not [path for path in run.rglob(".*") if path.is_file()]


def history(folder: Path) -> None:
    """Train with a log of each epoch, which is shorter than the checkpoints after a kill."""
    run = folder.with_name(f"run-{folder.name}")
    callbacks = [CSVLog(run.with_suffix(".csv")), Checkpoint(run, 1)]
    ensemble = embens.mc_dropout(problem.reference(), 2, generator=torch.Generator().manual_seed(1))
    embens.fit(ensemble, problem.data(), epochs=4, batch_size=16, callbacks=callbacks)
    rows = [line.split(",") for line in run.with_suffix(".csv").read_text().splitlines()]
    seconds = rows[0].index("seconds")
    rows = [row[:seconds] + row[seconds + 1 :] for row in rows]
    write_atomically(folder / "rows.json", json.dumps(rows))


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


OTHERS = (kernel, fit, pretrained, estimator, grid, comparison, history)
WORKS |= {work.__name__: work for work in OTHERS}
