"""``embens reproduce``: run experiments, from their cells to tables, pictures and verdicts."""

import os
import time
from argparse import Namespace
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import AcquireReturnProxy, FileLock, Timeout

from reproduction import datasets as data
from embens.checks import check_whole, closest
from reproduction.figures import NAMES
from reproduction.grid import cells as contract
from reproduction.grid import engines
from reproduction.grid import runs as grid
from reproduction.grid import results
from reproduction.grid.cells import Cell
from reproduction.grid.runs import Engine, Record, perform
from reproduction.grid.results import Results
from reproduction.grid.settings import PRESETS, fingerprint

if TYPE_CHECKING:
    from rich.console import Console


def add_arguments(add: Callable[..., object]) -> None:
    """Add the options of ``embens reproduce``."""
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
    add("--only", nargs="+", default=[], metavar="FIELD=VALUE[,VALUE]", help="only these cells")
    add("--epochs", type=int, help="another number of epochs (results kept apart)")
    add("--retry-failed", action="store_true", help="try failed cells again")
    add("--dry-run", action="store_true", help="say what would be done and how long it would take")


def run(options: Namespace) -> int:
    """Run ``embens reproduce``; return its exit code."""
    names = _check(options)
    import matplotlib  # noqa: F401 - missing extras are reported before anything is spent
    import pandas  # noqa: F401
    import scipy  # noqa: F401
    from rich.console import Console

    options.console = Console(highlight=False, soft_wrap=True)
    if options.data is not None:
        os.environ["EMBENS_DATA"] = str(options.data.expanduser().resolve())  # for workers as well
    here = options.preset == "paper" and torch.cuda.is_available()
    preset, device = PRESETS[options.preset], options.device or ("cuda" if here else "cpu")
    setting = replace(preset, epochs=options.epochs or preset.epochs, device=device)
    if options.download and setting.data == "cifar100":
        data.cifar100(download=True)
    try:
        options.setting = fingerprint(setting)
    except FileNotFoundError as problem:
        raise ValueError(f"{problem}. Here: --data DIR, or --download.") from None
    sweeps = {name: _cells(options, name) for name in names}  # errors before any work
    swept = {name for cells in sweeps.values() for name in cells[0].swept}
    for item in options.only:
        if item.partition("=")[0] not in swept:
            raise ValueError(f"--only {item}: nothing sweeps it; there are {sorted(swept)}")
    work = _estimate if options.dry_run else _reproduce
    return min(1, sum(work(options, name, cells) for name, cells in sweeps.items()))


def _check(options: Namespace) -> list[str]:
    if options.all == (options.name is not None):
        raise ValueError("give the NAME of an experiment, or --all; there are: " + ", ".join(NAMES))
    if options.name not in (None, *NAMES):
        raise ValueError(f"unknown experiment {options.name!r}{closest(options.name, NAMES)}")
    for name, least in {"seeds": 1, "epochs": 1, "workers": 0, "first_seed": 0}.items():
        if getattr(options, name) is not None:
            check_whole(f"--{name.replace('_', '-')}", getattr(options, name), least)
    if options.engine == "ray" and options.workers == 0:
        raise ValueError("--workers 0 is for the local engine; with Ray it must be at least 1")
    for item in options.only:
        if "=" not in item:
            raise ValueError(f"--only expects FIELD=VALUE, for example p=0,0.9; got {item!r}")
    return list(NAMES) if options.all else [str(options.name)]


def _cells(options: Namespace, name: str) -> list[Cell]:
    sweep, first = partial(contract.cells, name, options.setting), options.first_seed
    count = options.seeds or len({cell.seed for cell in sweep()})
    cells = sweep(range(first, first + count))
    wanted: dict[str, Any] = {"members": options.members, "width": options.widths}
    for item in options.only:
        field, _, values = item.partition("=")
        wanted[field] = values.split(",")
    known = wanted if options.name else cells[0].swept  # others may sweep the rest
    return grid.narrow(cells, **{f: v for f, v in wanted.items() if v and f in known})


def _engine(options: Namespace) -> Engine:
    if options.engine == "ray":
        cluster = {"address": options.address, "gpus_per_cell": options.gpus_per_cell}
        return partial(engines.ray, workers=options.workers, **cluster)
    workers = os.cpu_count() or 1 if options.workers is None else options.workers
    return partial(engines.local, workers=workers) if workers else engines.inline


def _reproduce(options: Namespace, name: str, cells: list[Cell]) -> int:
    console, folder = options.console, options.out / name / options.preset
    try:
        with _alone(console, folder):
            found, began = Results(folder), time.perf_counter()
            try:
                engine = watched(_engine(options), console, name)
                count, failed = grid.run(name, cells, found, engine, options.retry_failed)
            except KeyboardInterrupt:
                _summarise(options, name, found)
                console.print(f"{name}: stopped; the same command goes on from here.")
                raise
            seconds = time.perf_counter() - began
            _summarise(options, name, found, seconds)
    except OSError as problem:
        console.print(
            f"{name}: could not write to {folder} ({problem}). Results that were written are safe; "
            "make room there, or choose another folder with --out, and run the same command again.",
            style="red",
            markup=False,
        )
        return 1
    text = f"{count} cells measured in {_time(seconds)}, {len(cells) - count} known"
    console.print(f"{name}: {text} before; results in {folder}")
    if others := results.count_others(found, name):
        text = f"{others} results there are of other code, or another version of embens or torch"
        console.print(f"{name}: {text}; they are kept, and left out")
    for cell in failed[:5]:
        text = describe(cell, found.records[grid.key_of(cell)])
        console.print(text, style="red", markup=False)
    if failed:
        console.print(f"{len(failed)} cells failed; --retry-failed tries them again")
    return len(failed)


def _alone(console: "Console", folder: Path) -> AcquireReturnProxy:
    """Wait until no other run works in a folder; return what keeps it for this one."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".results.lock")
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        console.print(f"{folder}: another run is at work here; this one waits for it to end")
        return lock.acquire()


def watched(engine: Engine, console: "Console", title: str) -> Engine:
    """Return the engine with its progress shown: a line that changes, or ten lines.

    The time left goes by the weights of cells, since large ones cost more than small ones.
    """
    from rich.text import Text

    def show(cells: Sequence[Cell]) -> Generator[tuple[Cell, Record]]:
        began, count = time.perf_counter(), len(cells)
        total, passed, failed = sum(cell.weight for cell in cells), 0.0, 0
        with console.status(title) as status, closing(engine(cells)) as found:
            for number, (cell, record) in enumerate(found, 1):
                passed, failed = passed + cell.weight, failed + ("error" in record)
                left = _time((time.perf_counter() - began) * (total / passed - 1))
                state = f"{title} {number}/{count}" + f" ({failed} failed)" * bool(failed)
                text = f"{state}, {left} left: {describe(cell, record)}"
                status.update(Text(text, no_wrap=True, overflow="ellipsis"))
                tenth = 10 * number // count > 10 * (number - 1) // count
                if tenth and not console.is_terminal:
                    console.print(text, markup=False)
                yield cell, record

    return show


def describe(cell: Cell, record: Record) -> str:
    """Return a cell and its result in a few words."""
    words = " ".join(f"{name}={value}" for name, value in cell.swept.items())
    if "error" in record:
        return f"{words}: failed, {record['error'].strip().splitlines()[-1][:80]}"
    numbers = list((record["rows"] or [{}])[-1].items())[:3]
    return f"{words}: " + ", ".join(f"{name} {value:.3g}" for name, value in numbers)


def _summarise(options: Namespace, name: str, found: Results, seconds: float | None = None) -> None:
    """Write table, picture, claims and manifest of what is there; print the claims."""
    from rich.markup import escape

    say, table = options.console.print, results.tidy(found, name, options.setting)
    if not len(table):
        return
    styles = {"holds": "green", "does not hold": "red", "undecided": "yellow"}
    say(f"\n[bold]{name}[/]: claims of the paper, seeds: {table['seed'].nunique()}")
    for claim in results.write(found, name, options.setting, table, seconds):
        number = f"{claim.value:.3g}, 95 % [{claim.low:.3g}, {claim.high:.3g}]"
        number = escape(claim.note or f"{number}, holds if {claim.region}")
        say(
            f"[{styles[claim.verdict]}]{claim.verdict:>13}[/]  {escape(claim.statement)}\n"
            f"{'':15}{escape(claim.measure)}: {number}\n"
            f"{'':15}[dim]the paper: {escape(claim.paper)}[/]"
        )


def _estimate(options: Namespace, name: str, cells: list[Cell]) -> int:
    folder, left = options.out / name / options.preset, cells
    if folder.exists():
        left = grid.unknown(cells, Results(folder), retry_failed=options.retry_failed)
    cheapest = min(cells, key=lambda cell: cell.weight)
    trials = [cheapest.shortened(epochs=epochs) for epochs in (1, 9)]
    perform(trials[0])  # loads data, warms up
    timed = [perform(trial) for trial in trials]
    if "error" in timed[0]:
        raise RuntimeError(f"{name}: the cell that was timed failed:\n{timed[0]['error']}")
    less, more = (trial.weight for trial in trials)
    short, long = (result["seconds"] for result in timed)
    epochs = more > less and long > short  # else nothing is trained, or it takes no time
    unit = (long - short) / (more - less) if epochs else short / less
    once = max(0.0, short - unit * less)  # what a cell does whatever its weight
    costs, todo = ([once + unit * cell.weight for cell in some] for some in (cells, left))
    workers = max(1, os.cpu_count() or 1 if options.workers is None else options.workers)
    wall = max(sum(todo) / workers, *todo, 0.0)
    options.console.print(
        f"{name} ({options.preset}): {len(cells)} cells, {len(left)} to do; about "
        f"{min(costs):.3g} to {max(costs):.3g} s each (from a timed one), "
        f"{_time(sum(todo))} of work, {_time(wall)} on {workers} workers (hours:minutes:seconds)"
    )
    return 0


def _time(seconds: float) -> timedelta:
    return timedelta(seconds=round(seconds))
