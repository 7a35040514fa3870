"""Fine-tuning into an ensemble, on a real transfer with few images.

A small network with BatchNorm is pretrained on 60 classes of CIFAR-100 at 16×16 pixels. It is
fine-tuned on 20 other classes with 20 training and 10 validation images each; their other images
are the test set. Images of the last 20 classes are out of distribution. All systems use the same
images, AdamW, the same number of epochs and the same grid of learning rates; the log loss on the
validation images selects rate and epoch. Runs resume::

    python -m benchmarks.transfer run --data DIR       # a row for each system and seed
    python -m benchmarks.transfer table                # means and standard deviations
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import embens
from embens import laws, metrics
from embens.files import write_atomically
from embens.training import Batches, Divergence, KeepBest
from reproduction.datasets import cifar100

RESULTS = Path(__file__).parent / "results" / "transfer.csv"
PRETRAINING_CLASSES, NEW_CLASSES = range(60), range(60, 80)
TRAIN, VALIDATION = 20, 10  # images of each new class
MEMBERS, EPOCHS, RATES = 4, 12, (1e-3, 3e-3, 1e-2)
PRETRAINING = {"epochs": 8, "batch_size": 64, "lr": 2e-3, "optimizer": torch.optim.AdamW}
CHANNELS = (16, 32, 64, 64)
SINGLE_NETWORKS = ("one network, all trained", "one network, head alone")
COLUMNS = ("accuracy", "log loss", "calibration", "auroc, entropy", "auroc, mutual information")

Data = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Parts:
    """Images and labels of the new classes, and images of classes that no network has seen."""

    train: Data
    validation: Data
    test: Data
    unseen: Tensor


# Networks and data


def network(classes: int) -> nn.Sequential:
    """Return four convolutions with BatchNorm, a mean over pixels and a Linear layer."""
    layers: list[nn.Module] = []
    inputs = 3
    for i, outputs in enumerate(CHANNELS):
        layers.append(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False))
        layers += [nn.BatchNorm2d(outputs), nn.ReLU()]
        if i < 3:
            layers.append(nn.MaxPool2d(2))
        inputs = outputs
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
    return nn.Sequential(*layers)


@lru_cache(1)
def images(folder: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images and labels of the training data and of the test data."""
    data = cifar100(folder).downsample(16).standardise()
    return (*data.train, *data.test)


def pretrain(folder: str, seed: int, cache: Path) -> nn.Module:
    """Return the pretrained network, from the cache if it is there."""
    path = cache / f"pretrained-{seed}.safetensors"
    classes = len(PRETRAINING_CLASSES)
    if path.exists():
        return embens.load(path, network(classes)).member(0)
    torch.manual_seed(seed)
    single = embens.independent(network(classes), 1)
    x, y, x_test, y_test = images(folder)
    rows, test_rows = y < classes, y_test < classes
    embens.fit(single, (x[rows], y[rows]), seed=seed, progress=True, **PRETRAINING)
    outputs = embens.predict(single, x_test[test_rows]).members
    accuracy = metrics.ensemble_accuracy(outputs, y_test[test_rows])
    print(f"seed {seed}: accuracy {accuracy:.3f} on the classes of the pretraining")
    single.save(path)
    return single.member(0)


def split(folder: str, seed: int) -> Parts:
    """Return the data of the fine-tuning."""
    x, y, x_test, y_test = images(folder)
    generator = torch.Generator().manual_seed(seed)
    train, validation, rest = [], [], []
    for label in NEW_CLASSES:
        rows = (y == label).nonzero().squeeze(1)
        rows = rows[torch.randperm(len(rows), generator=generator)]
        train.append(rows[:TRAIN])
        validation.append(rows[TRAIN : TRAIN + VALIDATION])
        rest.append(rows[TRAIN + VALIDATION :])

    def take(chunks: list[Tensor]) -> Data:
        rows = torch.cat(chunks)
        return x[rows], y[rows] - NEW_CLASSES.start

    x_rest, y_rest = take(rest)
    is_new = (y_test >= NEW_CLASSES.start) & (y_test < NEW_CLASSES.stop)
    test = (
        torch.cat([x_rest, x_test[is_new]]),
        torch.cat([y_rest, y_test[is_new] - NEW_CLASSES.start]),
    )
    return Parts(take(train), take(validation), test, x_test[y_test >= NEW_CLASSES.stop])


def with_new_head(trained: nn.Module) -> nn.Module:
    """Return the trained network with a last layer for the new classes."""
    return nn.Sequential(*list(trained)[:-1], nn.Linear(CHANNELS[-1], len(NEW_CLASSES)))


# Systems


def separate(reference: nn.Module, members: int) -> embens.EmbeddedEnsemble:
    """Return separate networks that start from the same trunk with new last layers."""

    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.reset_parameters()

    return embens.independent(reference, members, initialise=initialise)


def head_alone(reference: nn.Module) -> embens.EmbeddedEnsemble:
    """Return one network of which only the last layer is trained."""
    return embens.adapt(reference, 1, by="head", trunk="frozen")


System = Callable[[nn.Module], embens.EmbeddedEnsemble]
adapt = partial(embens.adapt, members=MEMBERS)
SYSTEMS: dict[str, System] = {
    "one network, all trained": partial(separate, members=1),
    "low rank, frozen trunk": partial(adapt, by="low_rank", trunk="frozen"),
    "separate heads, all trained": partial(adapt, by="head", trunk="trained"),
    "BatchEnsemble near 1, all trained": partial(adapt, by="modulations", trunk="trained"),
    "BatchEnsemble near 1, frozen trunk": partial(adapt, by="modulations", trunk="frozen"),
    "separate heads, frozen trunk": partial(adapt, by="head", trunk="frozen"),
    "separate fine-tunings": partial(separate, members=MEMBERS),
    "BatchEnsemble p=0": partial(embens.batch_ensemble, members=MEMBERS, p=0.0),
    "last-layer dropout": partial(
        embens.last_layer_dropout, members=MEMBERS, law=laws.Bernoulli(0.5, 2.0)
    ),
    "one network, head alone": head_alone,
}


# Training and evaluation


@dataclass(frozen=True)
class FineTuning:
    """The best fine-tuned ensemble.

    Attributes:
        ensemble: at its best learning rate and epoch.
        rate: that learning rate.
        loss: its log loss on the validation images.
    """

    ensemble: embens.EmbeddedEnsemble
    rate: float
    loss: float


def fine_tune(make: System, reference: nn.Module, parts: Parts, seed: int) -> FineTuning:
    """Return the best fine-tuning over the learning rates."""
    best: FineTuning | None = None
    x, y = parts.validation
    for rate in RATES:
        torch.manual_seed(seed)
        ensemble = make(reference)
        callbacks: list[Any] = [KeepBest(metrics.nll)]
        if ensemble.spec.separate and ensemble.members > 1:
            callbacks.append(Batches("own"))
        try:
            embens.fit(
                ensemble,
                parts.train,
                parts.validation,
                epochs=EPOCHS,
                batch_size=40,
                lr=rate,
                optimizer=torch.optim.AdamW,
                callbacks=callbacks,
                seed=seed,
                progress=False,
            )
        except Divergence:
            continue
        loss = float(metrics.nll(embens.predict(ensemble, x).members, y))
        if best is None or loss < best.loss:
            best = FineTuning(ensemble, rate, loss)
    if best is None:
        raise RuntimeError(f"training diverged at all learning rates {RATES}.")
    return best


def evaluate(ensemble: embens.EmbeddedEnsemble, parts: Parts) -> dict[str, float]:
    """Return quality on the test images, detection of unseen classes, and size."""
    x, y = parts.test
    outputs = embens.predict(ensemble, x).members
    unseen = embens.predict(ensemble, parts.unseen).members
    by_information = metrics.ood_auroc(outputs, unseen, score=metrics.mutual_information)
    by_entropy = metrics.ood_auroc(outputs, unseen, score=metrics.predictive_entropy)
    disagreement = 0.0
    if ensemble.members > 1:
        disagreement = float(metrics.disagreement(outputs))
    return {
        "accuracy": float(metrics.ensemble_accuracy(outputs, y)),
        "member accuracy": float(metrics.member_accuracy(outputs, y).mean()),
        "log loss": float(metrics.nll(outputs, y)),
        "calibration": float(metrics.expected_calibration_error(outputs, y)),
        "disagreement": disagreement,
        "auroc, mutual information": float(by_information),
        "auroc, entropy": float(by_entropy),
        "trained": sum(p.numel() for p in ensemble.parameters() if p.requires_grad),
        "parameters": sum(p.numel() for p in ensemble.parameters()),
    }


def diagnose(make: System, reference: nn.Module, parts: Parts, seed: int) -> dict[str, Any]:
    """Return the diagnosis of a system before training; nothing for a single network."""
    torch.manual_seed(seed)
    ensemble = make(reference)
    if ensemble.members == 1:
        return {}
    x = torch.cat([parts.train[0], parts.validation[0]])
    y = torch.cat([parts.train[1], parts.validation[1]])
    report = embens.diagnose(ensemble, x, y, optimizer=torch.optim.AdamW)
    return {
        "verdict": report.verdict,
        "one model": report.one_model,
        "warnings": " ".join(finding.code for finding in report.warnings),
    }


def run(folder: str, seeds: list[int], systems: list[str], out: Path, cache: Path) -> None:
    """Measure every system and seed that the file does not contain yet."""
    out.parent.mkdir(parents=True, exist_ok=True)
    cache.mkdir(parents=True, exist_ok=True)
    rows = read(out)
    finished = {(row["system"], int(row["seed"])) for row in rows}
    for seed in seeds:
        parts = split(folder, seed)
        trained = pretrain(folder, seed, cache)
        for name in systems:
            if (name, seed) in finished:
                continue
            torch.manual_seed(seed)
            reference = with_new_head(trained)
            diagnosis = diagnose(SYSTEMS[name], reference, parts, seed)
            start = time.process_time()
            best = fine_tune(SYSTEMS[name], reference, parts, seed)
            seconds = (time.process_time() - start) / len(RATES)
            row = {"system": name, "seed": seed, "rate": best.rate}
            row |= evaluate(best.ensemble, parts)
            row |= {"seconds": seconds, **diagnosis}
            rows.append(row)
            write(out, rows)
            print(json.dumps(row), flush=True)


# Files and tables


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a CSV file; none if it does not exist."""
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows to a CSV file."""
    columns: dict[str, None] = {}
    for row in rows:
        columns.update(dict.fromkeys(row))
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns))
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue())


def print_table(path: Path) -> None:
    """Print means and standard deviations over seeds.

    The last column is the number of seeds with a lower log loss than one network that is trained
    as a whole, and than both kinds of single networks.
    """
    rows = read(path)
    losses = {(row["system"], row["seed"]): float(row["log loss"]) for row in rows}
    titles = ["system", *COLUMNS, "trained parameters", "seconds", "better than one network"]
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}\n")
    print(f"| {' | '.join(titles)} |")
    print("|---" * len(titles) + "|")
    for name in SYSTEMS:
        system_rows = [row for row in rows if row["system"] == name]
        if not system_rows:
            continue
        cells = [name]
        for column in COLUMNS:
            cells.append(mean_and_spread([float(row[column]) for row in system_rows]))
        seconds = [float(row["seconds"]) for row in system_rows if row.get("seconds")]
        cells.append(f"{int(system_rows[0]['trained']):,}")
        cells.append(f"{statistics.mean(seconds):.1f}")
        than_one = count_better(system_rows, losses, SINGLE_NETWORKS[:1])
        than_both = count_better(system_rows, losses, SINGLE_NETWORKS)
        cells.append(f"{than_one}, {than_both} of {len(system_rows)}")
        print(f"| {' | '.join(cells)} |")


def mean_and_spread(values: list[float]) -> str:
    """Return the mean and, for several values, the standard deviation."""
    text = f"{statistics.mean(values):.3f}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values):.3f}"
    return text


def count_better(
    rows: list[dict[str, Any]], losses: dict[tuple[str, str], float], others: tuple[str, ...]
) -> int:
    """Return on how many seeds a system has a lower log loss than all the others."""
    count = 0
    for row in rows:
        other_losses = [losses.get((name, row["seed"]), math.inf) for name in others]
        if float(row["log loss"]) < min(other_losses):
            count += 1
    return count


def main() -> None:
    """Run the benchmark or print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", choices=("run", "table"))
    parser.add_argument("--data", default=None, help="folder with CIFAR-100's binary files")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--cache", type=Path, default=Path("embens-results") / "transfer")
    options = parser.parse_args()
    if options.work == "table":
        print_table(options.out)
        return
    torch.set_num_threads(1)
    run(options.data, options.seeds, options.systems, options.out, options.cache)


if __name__ == "__main__":
    main()
