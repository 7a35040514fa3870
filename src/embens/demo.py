"""The main job on data that everyone has: ensembles on handwritten digits, side by side.

One small network, trained alone, as independent copies, and as embedded ensembles in both regimes
and with last-layer dropout; every number is a mean over seeds, with its standard error. One run of
one ensemble is a :class:`Cell`; cells are spread over processes.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from embens import data, metrics, networks
from embens.embed import batch_ensemble, independent, last_layer_dropout
from embens.training.loop import fit

Row = dict[str, float | str | int]

FAMILIES: dict[str, Callable[[nn.Module, int, torch.Generator], nn.Module]] = {
    "separate networks": lambda r, m, g: independent(r, m, generator=g),
    "BatchEnsemble p=0": lambda r, m, g: batch_ensemble(r, m, p=0.0, generator=g),
    "BatchEnsemble p=0.9": lambda r, m, g: batch_ensemble(r, m, p=0.9, generator=g),
    "last-layer dropout": lambda r, m, g: last_layer_dropout(r, m, generator=g),
}
COLOURS = ("#555555", "#1f77b4", "#d62728", "#2ca02c")


@dataclass(frozen=True)
class Cell:
    """All that determines one run."""

    family: str
    members: int
    seed: int
    epochs: int
    width: int


def measure(cell: Cell) -> Row:
    """Train one ensemble and measure it on the test data."""
    torch.set_num_threads(1)
    digits = data.digits().standardise().flatten()
    generator = torch.Generator().manual_seed(cell.seed)
    reference = networks.mlp(
        64, cell.width, 3, 10, weight_std=math.sqrt(2), parametrization="standard",
        generator=generator,
    )  # fmt: skip
    ensemble = FAMILIES[cell.family](reference, cell.members, generator)
    started = time.perf_counter()
    fit(
        ensemble,  # type: ignore[arg-type]
        tuple(digits.train),
        epochs=cell.epochs,
        batch_size=64,
        lr=0.01,
        seed=cell.seed,
        progress=False,
    )
    seconds = time.perf_counter() - started
    inputs, target = digits.test
    with torch.no_grad():
        outputs = ensemble.eval()(inputs)
    several = cell.members > 1
    return {
        **asdict(cell),
        "accuracy": metrics.ensemble_accuracy(outputs, target).item(),
        "member accuracy": metrics.member_accuracy(outputs, target).mean().item(),
        "nll": metrics.nll(outputs, target).item(),
        "calibration error": metrics.expected_calibration_error(outputs, target).item(),
        "correlation": metrics.correctness_correlation(outputs, target).item()
        if several
        else math.nan,
        "parameters": sum(p.numel() for p in ensemble.parameters()),
        "seconds": seconds,
    }


def cells(seeds: int, epochs: int, members: list[int], width: int) -> list[Cell]:
    """Return the cells, the longest first."""
    found = [
        Cell(family, m, seed, epochs, width)
        for seed in range(seeds)
        for family in FAMILIES
        for m in members
    ]
    return sorted(found, key=lambda c: -c.members)


def _results(grid: list[Cell], workers: int | None) -> Iterator[Row]:
    workers = workers or max(1, os.cpu_count() or 1)
    if workers == 1:
        yield from map(measure, grid)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(grid)), mp_context=context) as pool:
        try:
            for future in as_completed([pool.submit(measure, cell) for cell in grid]):
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def summarise(rows: list[Row], family: str, members: int) -> dict[str, tuple[float, float]]:
    """Return the mean and its standard error over seeds of every quantity."""
    chosen = [r for r in rows if r["family"] == family and r["members"] == members]
    summary = {}
    for key in chosen[0]:
        if key in ("family", "members", "seed", "epochs", "width"):
            continue
        values = torch.tensor([float(r[key]) for r in chosen], dtype=torch.float64)
        error = values.std().item() / math.sqrt(len(values)) if len(values) > 1 else math.nan
        summary[key] = (values.mean().item(), error)
    return summary


def _table(rows: list[Row], members: list[int]):
    from rich import box
    from rich.table import Table

    most = max((m for m in members if m <= 8), default=members[0])
    title = f"test data, M={most} (± standard error of the mean over seeds)"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for name in ("ens. %", "member %", "NLL", "ECE", "corr.", "weights", "s"):
        table.add_column(name, justify="right", no_wrap=True)
    lines = [("one network", "separate networks", 1)] if 1 in members else []
    lines += [(family, family, most) for family in FAMILIES]
    for label, family, m in lines:
        values = summarise(rows, family, m)
        table.add_row(
            label,
            _shown(values["accuracy"], 100, 1),
            _shown(values["member accuracy"], 100, 1),
            f"{values['nll'][0]:.3f}",
            f"{values['calibration error'][0]:.3f}",
            "–" if math.isnan(values["correlation"][0]) else f"{values['correlation'][0]:.2f}",
            f"{values['parameters'][0] / 1000:.1f}k",
            f"{values['seconds'][0]:.1f}",
        )
    return table


def _shown(value: tuple[float, float], unit: float, digits: int) -> str:
    mean, error = (unit * v for v in value)
    return f"{mean:.{digits}f}" + ("" if math.isnan(error) else f"±{error:.{digits}f}")


def plot(rows: list[Row], members: list[int], path: Path) -> None:
    """Draw accuracy and correlation against the number of members."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 4), constrained_layout=True)
    panels = (
        ("accuracy", "ensemble accuracy"),
        ("member accuracy", "mean accuracy of a member"),
        ("correlation", "correlation of members' errors"),
    )
    for axis, (key, title) in zip(axes, panels, strict=True):
        for colour, family in zip(COLOURS, FAMILIES, strict=True):
            points = [(m, *summarise(rows, family, m)[key]) for m in members]
            points = [p for p in points if not math.isnan(p[1])]
            if points:
                x, y, error = zip(*points, strict=True)
                error = [0.0 if math.isnan(e) else e for e in error]
                axis.errorbar(x, y, error, color=colour, label=family, marker="o", capsize=2, ms=4)
        axis.set(xscale="log", xlabel="members M", title=title)
        axis.set_xticks(members, labels=[str(m) for m in members])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``embens demo``."""
    parser.add_argument("--out", type=Path, default=Path("embens-demo"), help="folder for results")
    parser.add_argument("--seeds", type=int, default=3, help="runs to average (default 3)")
    parser.add_argument("--epochs", type=int, default=30, help="epochs of each run (default 30)")
    parser.add_argument("--members", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--width", type=int, default=64, help="width of the network (default 64)")
    parser.add_argument("--workers", type=int, default=None, help="processes (default: cores)")


def run(options: argparse.Namespace) -> int:
    """Run ``embens demo``; return its exit code."""
    if min([options.seeds, options.epochs, options.width, *options.members]) < 1:
        options.parser.error("seeds, epochs, width and members must be at least 1")
    compare(
        out=options.out,
        seeds=options.seeds,
        epochs=options.epochs,
        members=sorted(set(options.members)),
        width=options.width,
        workers=options.workers,
    )
    return 0


def compare(
    *, out: Path, seeds: int, epochs: int, members: list[int], width: int, workers: int | None
) -> Path:
    """Train the families and show them; return the path of the picture."""
    import matplotlib  # noqa: F401 - missing extras are reported before anything is spent
    import sklearn  # noqa: F401
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console()
    out.mkdir(parents=True, exist_ok=True)
    grid = cells(seeds, epochs, members, width)
    console.print(
        f"embens demo: an MLP 3×{width} on handwritten digits, alone and as ensembles of up to "
        f"{max(members)} members; {len(grid)} runs of {epochs} epochs."
    )
    rows: list[Row] = []
    bar = Progress(
        TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        TextColumn("{task.description}"), console=console,
    )  # fmt: skip
    with bar:
        task = bar.add_task("", total=len(grid))
        for count, row in enumerate(_results(grid, workers), 1):
            rows.append(row)
            latest = f"{row['family']}, M={row['members']}: {row['accuracy']:.3f}"
            bar.update(task, advance=1, description=latest)
            if not console.is_terminal and count % max(1, len(grid) // 10) == 0:
                console.print(f"{count}/{len(grid)} {latest}")
    (out / "demo.json").write_text(json.dumps(rows, indent=1))
    console.print(_table(rows, members))
    console.print(
        "p=0: members are independent and their errors differ, as long as the network has room "
        "for them; p=0.9: perturbations of one model."
    )
    picture = out / "demo.png"
    plot(rows, members, picture)
    console.print(f"numbers: {out / 'demo.json'}\npicture: {picture}", soft_wrap=True)
    return picture
