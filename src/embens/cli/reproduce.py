"""``embens reproduce``: run experiments, from their cells to tables, pictures and verdicts."""

from __future__ import annotations

import argparse
import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embens.experiments import NAMES, contract, grid, table
from embens.experiments.engines import Engine, Inline
from embens.experiments.results import Results, folder_of
from embens.experiments.setting import PRESETS, Setting, fingerprint

if TYPE_CHECKING:
    from rich.console import Console

    from embens.experiments.claims import Claim


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``embens reproduce``."""
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help="one of " + ", ".join(NAMES))
    add("--all", action="store_true", help="all experiments, one after another")
    add("--preset", choices=PRESETS, default="quick")
    add("--data", type=Path, help="folder with CIFAR-100's binary files (default: the cache)")
    add("--download", action="store_true", help="get CIFAR-100 if it is missing")
    add("--out", type=Path, default=Path("embens-results"), help="results folder")
    add("--engine", choices=("local", "ray"), default="local")
    add("--workers", type=int, help="processes (default: as many as cores); 0: in this process")
    add("--address", help="of a Ray cluster; default: one that is started here")
    add("--gpus-per-cell", type=float, default=1.0, help="part of a GPU for a cell (Ray)")
    add("--device", help="cpu or cuda (default: cuda for the paper preset, if any)")
    add("--seeds", type=int, help="number of seeds, instead of the preset's")
    add("--first-seed", type=int, default=0, help="seeds from this one on")
    add("--members", type=int, nargs="+", help="only these numbers of members")
    add("--widths", type=float, nargs="+", help="only these relative widths")
    fields = "FIELD=VALUE[,VALUE]"
    add("--only", nargs="+", default=[], metavar=fields, help="only these cells")
    add("--epochs", type=int, help="another number of epochs (results kept apart)")
    add("--retry-failed", action="store_true", help="try failed cells again")
    add("--dry-run", action="store_true", help="say what would be done and how long it would take")


def run(options: argparse.Namespace) -> int:
    """Run ``embens reproduce``; return its exit code."""
    names = _check(options)
    import matplotlib  # noqa: F401 - missing extras are reported before anything is spent
    import pandas  # noqa: F401
    import scipy  # noqa: F401
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    if options.data is not None:
        os.environ["EMBENS_DATA"] = str(options.data.expanduser().resolve())  # for workers as well
    setting = _setting(options)
    sweeps = {name: _cells(options, name, setting) for name in names}  # errors before any work
    swept = {name for cells in sweeps.values() for name in cells[0].swept()}
    for item in options.only:
        if item.partition("=")[0] not in swept:
            raise ValueError(f"--only {item}: nothing sweeps it; there are {sorted(swept)}")
    if options.dry_run:
        for sweep in sweeps.items():
            _estimate(console, options, *sweep)
        return 0
    with closing(_engine(options)) as engine:
        failed = [_reproduce(console, options, *s, setting, engine) for s in sweeps.items()]
    return int(any(failed))


def _check(options: argparse.Namespace) -> list[str]:
    if options.all == (options.name is not None):
        raise ValueError("give the NAME of an experiment, or --all; there are: " + ", ".join(NAMES))
    if options.name is not None:
        contract.load(options.name)
    for name, least in {"seeds": 1, "epochs": 1, "workers": 0, "first_seed": 0}.items():
        value = getattr(options, name)
        if value is not None and value < least:
            words = f"be at least {least}" if least else "not be negative"
            raise ValueError(f"--{name.replace('_', '-')} must {words}; got {value}")
    if options.engine == "ray" and options.workers == 0:
        raise ValueError("--workers 0 is for the local engine; with Ray it must be at least 1")
    for item in options.only:
        if "=" not in item:
            raise ValueError(f"--only expects FIELD=VALUE, for example p=0,0.9; got {item!r}")
    return list(NAMES) if options.all else [str(options.name)]


def _setting(options: argparse.Namespace) -> Setting:
    import torch

    found = options.preset == "paper" and torch.cuda.is_available()
    preset, device = PRESETS[options.preset], options.device or ("cuda" if found else "cpu")
    setting = replace(preset, epochs=options.epochs or preset.epochs, device=device)
    if options.download and setting.data == "cifar100":
        from embens import data

        data.cifar100(download=True)
    try:
        return fingerprint(setting)
    except FileNotFoundError as problem:
        raise ValueError(f"{problem}. Here: --data DIR, or --download.") from None


def _cells(options: argparse.Namespace, name: str, setting: Setting) -> list[Any]:
    count = options.seeds or len({cell.seed for cell in contract.cells(name, setting)})
    seeds = range(options.first_seed, options.first_seed + count)
    cells = contract.cells(name, setting, seeds)
    wanted: dict[str, Any] = {"members": options.members, "width": options.widths}
    for item in options.only:
        field, _, values = item.partition("=")
        wanted[field] = values.split(",")
    known = wanted if options.name else cells[0].swept()  # others may sweep the rest
    return grid.narrow(cells, **{f: v for f, v in wanted.items() if v and f in known})


def _engine(options: argparse.Namespace) -> Engine:
    if options.engine == "ray":
        from embens.experiments.engines.ray import Ray

        return Ray(options.address, options.workers, options.gpus_per_cell)
    from embens.experiments.engines.local import Local

    return Inline() if options.workers == 0 else Local(options.workers or os.cpu_count() or 1)


def _reproduce(
    console: Console,
    options: argparse.Namespace,
    name: str,
    cells: list[Any],
    setting: Setting,
    engine: Engine,
) -> int:
    from embens.experiments.progress import Progress, duration

    folder = folder_of(options.out, name, setting.preset)
    try:
        results = Results(folder)
        try:
            with Progress(console, name) as progress:
                outcome = grid.run(
                    *(name, cells), results=results, engine=engine, watcher=progress,
                    retry_failed=options.retry_failed,
                )  # fmt: skip
        except KeyboardInterrupt:
            summarise(name, setting, results, console)
            console.print(f"{name}: stopped; the same command goes on from here.")
            raise
        summarise(name, setting, results, console, seconds=outcome.seconds)
    except OSError as problem:
        console.print(
            f"{name}: could not write to {folder} ({problem}). Results that were written are safe; "
            "make room there, or choose another folder with --out, and run the same command again.",
            style="red",
            markup=False,
        )
        return 1
    console.print(
        f"{name}: {outcome.measured} cells measured in {duration(outcome.seconds)}, "
        f"{outcome.known} known before; results in {folder}"
    )
    if others := table.count_others(results, name):
        console.print(
            f"{name}: {others} results in this folder are of other code, or another version of "
            "embens or torch; they are kept, and left out"
        )
    for key in outcome.failed[:5]:
        record = results.records[key]
        swept = {k: v for k, v in record["cell"].items() if k != "setting"}
        last = record["error"].strip().splitlines()[-1]
        console.print(f"failed: {swept}: {last}", style="red", markup=False)
    if outcome.failed:
        console.print(f"{len(outcome.failed)} cells failed; --retry-failed tries them again")
    return len(outcome.failed)


def summarise(
    name: str, setting: Setting, results: Results, console: Console, *, seconds: float | None = None
) -> None:
    """Write table, picture, claims and manifest of what is there; print the claims."""
    with results.alone():  # so that the last of several runs writes what all have measured
        results.refresh()
        rows = table.tidy(results, name, setting)
        if len(rows):
            claims = table.write(results, name, setting, rows, seconds)
            _show(console, name, claims, rows["seed"].nunique())


def _show(console: Console, name: str, claims: list[Claim], seeds: int) -> None:
    from rich.markup import escape

    styles = {"holds": "green", "does not hold": "red", "undecided": "yellow"}
    many = f"{seeds} seed" + "s" * (seeds != 1)
    console.print(f"\n[bold]{name}[/]: claims of the paper, {many}")
    for claim in claims:
        number = f"{claim.value:.3g}, 95 % [{claim.low:.3g}, {claim.high:.3g}]"
        number = escape(claim.note or f"{number}, holds if {claim.region}")
        console.print(
            f"[{styles[claim.verdict]}]{claim.verdict:>13}[/]  {escape(claim.statement)}\n"
            f"{'':15}{escape(claim.measure)}: {number}\n"
            f"{'':15}[dim]the paper: {escape(claim.paper)}[/]"
        )


def _estimate(console: Console, options: argparse.Namespace, name: str, cells: list[Any]) -> None:
    from embens.experiments.job import make_job, perform
    from embens.experiments.progress import duration

    folder, known = folder_of(options.out, name, options.preset), set()
    if folder.exists():
        records = Results(folder).records.items()
        known = {key for key, r in records if "rows" in r or not options.retry_failed}
    left = [cell for cell in cells if make_job(name, cell).key not in known]
    trial = min(cells, key=lambda cell: cell.weight).shortened()
    perform(make_job(name, trial))  # loads data, warms up
    result = perform(make_job(name, trial))
    if result.error:
        raise RuntimeError(f"{name}: the cell that was timed failed:\n{result.error}")
    unit = result.seconds / trial.weight
    costs, todo = ([unit * cell.weight for cell in some] for some in (cells, left))
    workers = max(1, options.workers if options.workers is not None else os.cpu_count() or 1)
    wall = max(sum(todo) / workers, *todo, 0.0)
    console.print(
        f"{name} ({options.preset}): {len(cells)} cells, {len(left)} to do; about "
        f"{duration(min(costs))} to {duration(max(costs))} each (from a timed one), "
        f"{duration(sum(todo))} of work, {duration(wall)} with {workers} "
        + ("worker" if workers == 1 else "workers")
    )
