"""Fine-tuning into an ensemble, on a real transfer: few images of classes that were never seen.

A small network with BatchNorm is trained on 60 classes of CIFAR-100 at 16 × 16 pixels. Of 20 other
classes there are 20 images each to fine-tune on and 10 to choose by; the rest of their images are
the test. Images of the last 20 classes are what nobody has seen. Every system gets the same images,
optimizer (AdamW) and number of epochs, and of the same rates, and of all epochs, the best by the
log loss of its own mean probability on the images to choose by. Runs resume::

    python -m benchmarks.transfer run --data DIR       # a row for each system and seed
    python -m benchmarks.transfer table                # means and spreads, as in docs
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import time
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

import embens
from embens import laws, metrics
from embens.training import Divergence
from reproduction.datasets import cifar100

RESULTS = Path(__file__).parent / "results" / "transfer.csv"
SEEN, NEW = range(60), range(60, 80)  # the others are never seen
TRAIN, CHOOSE = 20, 10  # images of each new class
MEMBERS, EPOCHS, RATES = 4, 12, (1e-3, 3e-3, 1e-2)
PRETRAINING = {"epochs": 8, "batch_size": 64, "lr": 2e-3, "optimizer": torch.optim.AdamW}
CHANNELS = (16, 32, 64, 64)


def network(classes: int) -> nn.Module:
    """Return the network: four convolutions with BatchNorm, a mean over pixels, a last layer."""
    layers: list[nn.Module] = []
    for i, (takes, gives) in enumerate(zip((3, *CHANNELS), CHANNELS, strict=False)):
        layers += [nn.Conv2d(takes, gives, 3, padding=1, bias=False), nn.BatchNorm2d(gives)]
        layers += [nn.ReLU(), *([nn.MaxPool2d(2)] if i in (0, 1, 2) else [])]
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, *pool, nn.Linear(CHANNELS[-1], classes))


@lru_cache(1)
def images(folder: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return all images and classes: of the train part, and of the test part."""
    data = cifar100(folder).downsample(16).standardise()
    return (*data.train, *data.test)


def seed_everything(seed: int) -> torch.Generator:
    torch.manual_seed(seed)
    return torch.Generator().manual_seed(seed)


def pretrained(folder: str, seed: int, cache: Path) -> nn.Module:
    """Return the network that was trained on the seen classes."""
    path = cache / f"pretrained-{seed}.safetensors"
    seed_everything(seed)
    one = embens.join([network(len(SEEN))])
    if path.exists():
        return embens.load(path, network(len(SEEN))).member(0)
    x, y, x_test, y_test = images(folder)
    rows, held = y < len(SEEN), y_test < len(SEEN)
    embens.fit(one, (x[rows], y[rows]), seed=seed, progress=True, **PRETRAINING)
    found = embens.predict(one, x_test[held]).members
    print(f"seed {seed}: {metrics.ensemble_accuracy(found, y_test[held]):.3f} on the seen classes")
    one.save(path)
    return one.member(0)


def parts(folder: str, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the images of the new classes: to train on, to choose by, to test; and unseen ones."""
    x, y, x_test, y_test = images(folder)
    generator, rows = torch.Generator().manual_seed(seed), {"train": [], "choose": [], "rest": []}
    for kind in NEW:
        mine = (y == kind).nonzero().squeeze(1)
        mine = mine[torch.randperm(len(mine), generator=generator)]
        for name, some in zip(rows, mine.tensor_split([TRAIN, TRAIN + CHOOSE]), strict=True):
            rows[name].append(some)
    found = {name: torch.cat(some) for name, some in rows.items()}
    part = {name: (x[some], y[some] - NEW.start) for name, some in found.items()}
    held = (y_test >= NEW.start) & (y_test < NEW.stop)
    rest = part.pop("rest")
    test = (x_test[held], y_test[held] - NEW.start)
    part["test"] = tuple(torch.cat(pair) for pair in zip(rest, test, strict=True))
    unseen = y_test >= NEW.stop
    return part | {"unseen": (x_test[unseen], y_test[unseen])}


def start(trained: nn.Module) -> nn.Module:
    """Return the trained network with a last layer for the new classes."""
    return nn.Sequential(*list(trained)[:-1], nn.Linear(CHANNELS[-1], len(NEW)))


def separate(reference: nn.Module, members: int) -> embens.EmbeddedEnsemble:
    """Return networks to fine-tune separately: one trunk, last layers of their own."""
    return embens.join([start(reference) for _ in range(members)])


def head_alone(reference: nn.Module) -> embens.EmbeddedEnsemble:
    """Return one network of which the last layer alone is trained."""
    return embens.adapt(reference, 1, by="head", trunk="frozen")


near = partial(embens.adapt, members=MEMBERS, by="modulations")
SYSTEMS: dict[str, Callable[[nn.Module], embens.EmbeddedEnsemble]] = {
    "one network, all trained": partial(separate, members=1),
    "low rank, frozen trunk": partial(near, by="low_rank", trunk="frozen"),
    "separate heads, all trained": partial(near, by="head", trunk="trained"),
    "BatchEnsemble near 1, all trained": partial(near, trunk="trained"),
    "BatchEnsemble near 1, frozen trunk": partial(near, trunk="frozen"),
    "separate heads, frozen trunk": partial(near, by="head", trunk="frozen"),
    "separate fine-tunings": partial(separate, members=MEMBERS),
    "BatchEnsemble p=0": partial(embens.batch_ensemble, members=MEMBERS, p=0.0),
    "last-layer dropout": partial(
        embens.last_layer_dropout, members=MEMBERS, law=laws.Bernoulli(0.5, 2.0)
    ),
    "one network, head alone": head_alone,
}


def fine_tune(
    make: Callable[[nn.Module], embens.EmbeddedEnsemble],
    reference: nn.Module,
    part: dict[str, tuple[Tensor, Tensor]],
    seed: int,
    rates=RATES,
) -> tuple[embens.EmbeddedEnsemble, float, float]:
    """Return the ensemble at its best rate and epoch, that rate, and the seconds of a run."""
    best, seconds = (float("inf"), None, 0.0), 0.0
    for lr in rates:
        seed_everything(seed)
        ensemble = make(reference)
        began = time.process_time()
        try:
            embens.fit(
                *(ensemble, part["train"], part["choose"]),
                epochs=EPOCHS,
                batch_size=40,
                lr=lr,
                optimizer=torch.optim.AdamW,
                batch="own" if ensemble.plan.separate and ensemble.members > 1 else "same",
                metric=metrics.nll,
                maximise=False,
                seed=seed,
                progress=False,
            )
        except Divergence:
            continue
        seconds += (time.process_time() - began) / len(rates)
        x, y = part["choose"]
        loss = float(metrics.nll(embens.predict(ensemble, x).members, y))
        best = min(best, (loss, ensemble, lr), key=lambda found: found[0])
    assert best[1] is not None, "every rate diverged"
    return best[1], best[2], seconds


def judge(ensemble: embens.EmbeddedEnsemble, part: dict) -> dict[str, float]:
    """Return what counts, on the test images and on those of classes that nobody has seen."""
    (x, y), (unseen, _) = part["test"], part["unseen"]
    outputs, other = (embens.predict(ensemble, rows).members for rows in (x, unseen))
    scores = {"mutual information": metrics.mutual_information}
    scores["entropy"] = metrics.predictive_entropy
    areas = {
        f"auroc, {n}": float(metrics.ood_auroc(outputs, other, score=s)) for n, s in scores.items()
    }
    trained = sum(p.numel() for p in ensemble.parameters() if p.requires_grad)
    several = ensemble.members > 1
    return {
        "accuracy": float(metrics.ensemble_accuracy(outputs, y)),
        "member accuracy": float(metrics.member_accuracy(outputs, y).mean()),
        "log loss": float(metrics.nll(outputs, y)),
        "calibration": float(metrics.expected_calibration_error(outputs, y)),
        "disagreement": float(metrics.disagreement(outputs)) if several else 0.0,
        **areas,
        "trained": trained,
        "parameters": sum(p.numel() for p in ensemble.parameters()),
    }


def told(make: Callable, reference: nn.Module, part: dict, seed: int) -> dict[str, float | str]:
    """Return what ``diagnose`` says of a system before it is trained."""
    seed_everything(seed)
    x, y = (torch.cat(rows) for rows in zip(part["train"], part["choose"], strict=True))
    ensemble = make(reference)
    if ensemble.members == 1:
        return {}
    report = embens.diagnose(ensemble, x, y, optimizer=torch.optim.AdamW)
    return {
        "verdict": report.verdict,
        "one model": report.one_model,
        "warnings": " ".join(finding.code for finding in report.warnings),
    }


def run(folder: str, seeds: range, systems: list[str], out: Path, cache: Path) -> None:
    """Measure what is not in the file yet."""
    out.parent.mkdir(parents=True, exist_ok=True)
    cache.mkdir(parents=True, exist_ok=True)
    done = read(out)
    for seed in seeds:
        part = parts(folder, seed)
        trained = pretrained(folder, seed, cache)
        for name in systems:
            if any(r["system"] == name and int(r["seed"]) == seed for r in done):
                continue
            seed_everything(seed)
            reference = start(trained)
            beforehand = told(SYSTEMS[name], reference, part, seed)
            ensemble, lr, seconds = fine_tune(SYSTEMS[name], reference, part, seed)
            row = {"system": name, "seed": seed, "rate": lr, **judge(ensemble, part)}
            row |= {"seconds": seconds, **beforehand}
            done.append(row)
            columns = list(dict.fromkeys(key for r in done for key in r))
            with out.open("w", newline="") as file:
                writer = csv.DictWriter(file, columns)
                writer.writeheader()
                writer.writerows(done)
            print(json.dumps(row), flush=True)


def read(out: Path) -> list[dict]:
    if not out.exists():
        return []
    with out.open() as file:
        return list(csv.DictReader(file))


ONE = ("one network, all trained", "one network, head alone")


def table(out: Path) -> None:
    """Print means over seeds with standard deviations, and on how many seeds a system is better.

    Better than one network in log loss: than that which was trained whole, and than both kinds.
    """
    rows = read(out)
    columns = ("accuracy", "log loss", "calibration", "auroc, entropy", "auroc, mutual information")
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}\n")
    names = [*columns, "numbers trained", "seconds", "better on"]
    print("| system | " + " | ".join(names) + " |\n|" + "---|" * (len(names) + 1))
    losses = {(r["system"], r["seed"]): float(r["log loss"]) for r in rows}
    for name in SYSTEMS:
        mine = [r for r in rows if r["system"] == name]
        if not mine:
            continue
        cells = []
        for column in columns:
            values = torch.tensor([float(r[column]) for r in mine])
            spread = f" ± {values.std():.3f}" if len(values) > 1 else ""
            cells.append(f"{values.mean():.3f}{spread}")
        beaten = [
            sum(
                float(r["log loss"]) < min(losses.get((o, r["seed"]), float("inf")) for o in others)
                for r in mine
            )
            for others in (ONE[:1], ONE)
        ]
        seconds = [float(r["seconds"]) for r in mine if r.get("seconds")]
        cells += [f"{int(mine[0]['trained']):,}", f"{sum(seconds) / len(seconds):.1f}"]
        cells += [f"{beaten[0]}, {beaten[1]} of {len(mine)}"]
        print(f"| {name} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", choices=("run", "table"))
    parser.add_argument("--data", default=None, help="the folder with CIFAR-100's binary files")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--cache", type=Path, default=Path("embens-results") / "transfer")
    given = parser.parse_args()
    if given.work == "table":
        return table(given.out)
    torch.set_num_threads(1)
    return run(given.data, given.seeds, given.systems, given.out, given.cache)


if __name__ == "__main__":
    main()
