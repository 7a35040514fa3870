"""Run experiments: from their cells to tables, pictures and verdicts."""

import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import AcquireReturnProxy, FileLock, Timeout

from reproduction.datasets import cifar100
from reproduction.figures import NAMES
from reproduction.grid import engines, runs
from reproduction.grid.cells import TUNINGS, Cell, cells_of
from reproduction.grid.estimates import time_cells
from reproduction.grid.keys import key_of
from reproduction.grid.results import (
    Results,
    count_outdated,
    make_table,
    open_results,
    write_summary,
)
from reproduction.grid.runs import Engine
from reproduction.grid.settings import PRESETS, UNTUNED, Setting, with_fingerprint
from reproduction.progress import describe_outcome, format_time, show_progress

if TYPE_CHECKING:
    from rich.console import Console

STYLES = {"holds": "green", "does not hold": "red", "undecided": "yellow"}
MINIMA = {"seeds": 1, "epochs": 1, "workers": 0, "first_seed": 0}
"""Smallest values of whole-number options."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of :func:`run_experiments` to a parser."""
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help="one of " + ", ".join((*NAMES, *TUNINGS)))
    add("--all", action="store_true", help="run all experiments, one after another")
    add("--preset", choices=PRESETS, default="quick")
    add("--data", type=Path, help="folder with CIFAR-100's binary files (default: the cache)")
    add("--download", action="store_true", help="download CIFAR-100 if it is missing")
    add("--out", type=Path, default=Path("embens-results"), help="results folder")
    add("--engine", choices=("local", "ray"), default="local")
    add("--workers", type=int, help="processes (default: one per core); 0: in this process")
    add("--address", help="address of a Ray cluster (default: start one here)")
    add("--gpus-per-cell", type=float, default=1.0, help="share of a GPU per cell (Ray)")
    add("--device", help="cpu or cuda (default: cuda for gpu and paper, if available)")
    add("--seeds", type=int, help="number of seeds (default: the preset's)")
    add("--first-seed", type=int, default=0, help="first seed")
    add("--members", type=int, nargs="+", help="only these numbers of members")
    add("--widths", type=float, nargs="+", help="only these relative widths")
    add(
        "--only",
        nargs="+",
        action="extend",
        default=[],
        metavar="AXIS=VALUE[,VALUE]",
        help="only these cells",
    )
    add("--epochs", type=int, help="another number of epochs (results are kept apart)")
    add("--retry-failed", action="store_true", help="measure failed cells again")
    add("--dry-run", action="store_true", help="estimate the duration without running")


@dataclass(frozen=True)
class Run:
    """A checked request to run experiments.

    Attributes:
        setting: Setting of the preset.
        out: Results folder.
        engine: Where cells are measured.
        workers: Number of processes, for estimates.
        retry_failed: Measure failed cells again.
        console: Where messages are printed.
    """

    setting: Setting
    out: Path
    engine: Engine
    workers: int
    retry_failed: bool
    console: "Console"

    def folder(self, name: str) -> Path:
        """Return the results folder of an experiment."""
        return self.out / name / self.setting.preset


def run_experiments(options: Namespace) -> int:
    """Run the experiments of a command line.

    Args:
        options: Options of :func:`add_arguments`.

    Returns:
        The exit code: 1 if cells failed or results could not be written.

    Raises:
        ValueError: If options are invalid.
    """
    names = _check_options(options)
    # Missing packages are reported before any work.
    import matplotlib  # noqa: F401
    import pandas  # noqa: F401
    import scipy  # noqa: F401
    from rich.console import Console

    if options.data is not None:
        # Workers read the same variable.
        os.environ["EMBENS_DATA"] = str(options.data.expanduser().resolve())
    run = _make_run(options, Console(highlight=False, soft_wrap=True))
    # All sweeps are checked before the first one runs.
    sweeps = {name: _select_cells(options, name, run.setting) for name in names}
    _check_axes(options.only, sweeps)
    needs_rates = options.preset == "cpu" and options.name not in ("compare", *TUNINGS)
    if needs_rates and not run.setting.rates:
        run.console.print(
            "The learning rates of this preset are not recorded yet: all families use "
            f"{run.setting.lr:g}. Run `tuning` and `record` first."
        )
    failures = 0
    for name, cells in sweeps.items():
        if options.dry_run:
            estimate(run, name, cells)
        else:
            failures += reproduce(run, name, cells)
    return 1 if failures else 0


def _check_options(options: Namespace) -> list[str]:
    """Return the names of the requested experiments."""
    if options.all == (options.name is not None):
        raise ValueError(
            f"give either the NAME of an experiment or --all. Experiments: {', '.join(NAMES)}."
        )
    if options.name is not None and options.name not in (*NAMES, *TUNINGS):
        matches = get_close_matches(options.name, (*NAMES, *TUNINGS), n=1)
        hint = f" Did you mean {matches[0]!r}?" if matches else ""
        raise ValueError(f"unknown experiment {options.name!r}.{hint}")
    for name, minimum in MINIMA.items():
        value = getattr(options, name)
        if value is not None and value < minimum:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {minimum}, got {value}.")
    if options.engine == "ray" and options.workers == 0:
        raise ValueError("--workers 0 needs the local engine; with Ray it must be at least 1.")
    _check_folders(options)
    for item in options.only:
        if "=" not in item:
            raise ValueError(f"--only needs AXIS=VALUE, for example p=0,0.9, got {item!r}.")
    if options.name is None:
        return list(NAMES)
    return [options.name]


def _check_folders(options: Namespace) -> None:
    """Raise if the results would be written to a file, or among the data."""
    out = options.out
    for place in (out, *out.parents):
        if place.exists() and not place.is_dir():
            raise ValueError(f"--out must be a folder, got {out}, but {place} is a file.")
    data = options.data
    if data is not None and out.exists() and data.exists() and os.path.samefile(out, data):
        raise ValueError(f"--out must be another folder than --data, got {out} for both.")


def _make_run(options: Namespace, console: "Console") -> Run:
    setting = _make_setting(options)
    workers = options.workers
    if workers is None:
        workers = _default_workers(setting)
    return Run(
        setting=setting,
        out=options.out,
        engine=_make_engine(options, workers, setting.device.startswith("cuda")),
        workers=max(1, workers),
        retry_failed=options.retry_failed,
        console=console,
    )


def _make_setting(options: Namespace) -> Setting:
    presets = UNTUNED if options.name == "tuning" else PRESETS
    setting = presets[options.preset]
    if options.epochs is not None:
        setting = replace(setting, epochs=options.epochs)
    device = options.device
    if device is None:
        use_cuda = options.preset in ("gpu", "paper") and torch.cuda.is_available()
        device = "cuda" if use_cuda else "cpu"
    setting = replace(setting, device=device)
    if options.download and setting.data == "cifar100":
        cifar100(download=True)
    try:
        return with_fingerprint(setting)
    except FileNotFoundError as error:
        raise ValueError(f"{error} Use --data DIR or --download.") from None


def _default_workers(setting: Setting) -> int:
    """Return one worker per GPU, or one per core."""
    if setting.device.startswith("cuda"):
        return max(1, torch.cuda.device_count())
    return os.cpu_count() or 1


def _make_engine(options: Namespace, workers: int, on_gpu: bool) -> Engine:
    if options.engine == "ray":
        return partial(
            engines.ray,
            address=options.address,
            workers=options.workers,
            gpus_per_cell=options.gpus_per_cell,
        )
    if workers == 0:
        return engines.inline
    gpus = engines.visible_gpus() if on_gpu else []
    return partial(engines.local, workers=workers, gpus=gpus)


def _select_cells(options: Namespace, name: str, setting: Setting) -> list[Cell]:
    count = options.seeds
    if count is None:
        count = len({cell.seed for cell in cells_of(name, setting)})
    seeds = range(options.first_seed, options.first_seed + count)
    cells = cells_of(name, setting, seeds)
    wanted: dict[str, list[Any]] = {}
    if options.members:
        wanted["members"] = list(options.members)
    if options.widths:
        wanted["width"] = list(options.widths)
    for item in options.only:
        axis, _, values = item.partition("=")
        wanted.setdefault(axis, []).extend(values.split(","))
    if options.all:
        # Each experiment uses the axes that it sweeps.
        wanted = {axis: values for axis, values in wanted.items() if axis in cells[0].values}
    return runs.select(cells, **wanted)


def _check_axes(only: list[str], sweeps: dict[str, list[Cell]]) -> None:
    axes = {axis for cells in sweeps.values() for axis in cells[0].values}
    for item in only:
        if item.partition("=")[0] not in axes:
            raise ValueError(f"--only {item}: no experiment sweeps it; axes: {sorted(axes)}.")


def reproduce(run: Run, name: str, cells: list[Cell]) -> int:
    """Run one experiment and write its summary.

    Args:
        run: The request.
        name: Name of the experiment.
        cells: Its cells.

    Returns:
        The number of failures.
    """
    console, folder = run.console, run.folder(name)
    started = time.perf_counter()
    try:
        with _lock(console, folder):
            results = open_results(folder, name, run.setting)
            engine = show_progress(run.engine, console, name)
            try:
                measured, failed = runs.run(name, cells, results, engine, run.retry_failed)
            except KeyboardInterrupt:
                summarise(run, name, results)
                console.print(f"{name}: stopped. The same command continues from here.")
                raise
            seconds = time.perf_counter() - started
            summarise(run, name, results, seconds)
    except OSError as error:
        console.print(
            f"{name}: could not write to {folder} ({error}). Results written so far are safe. Free "
            "some space, or choose another folder with --out, and run the same command again.",
            style="red",
            markup=False,
        )
        return 1
    known = len(cells) - measured
    console.print(
        f"{name}: {measured} cells measured in {format_time(seconds)}, {known} known before; "
        f"results in {folder}"
    )
    _print_problems(console, name, results, failed)
    return len(failed)


def _print_problems(
    console: "Console", name: str, results: Results, failed: Sequence[Cell]
) -> None:
    """Print the number of outdated results, and the errors of at most five failed cells."""
    outdated = count_outdated(results, name)
    if outdated:
        console.print(
            f"{name}: {outdated} results are of other code, or of other versions of embens or "
            "torch; they are kept but not used"
        )
    for cell in failed[:5]:
        text = describe_outcome(cell, results.records[key_of(cell)])
        console.print(text, style="red", markup=False)
    if failed:
        console.print(f"{len(failed)} cells failed; --retry-failed measures them again")


def _lock(console: "Console", folder: Path) -> AcquireReturnProxy:
    """Wait until no other run uses a folder; return the lock as a context."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".results.lock")
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        console.print(f"{folder}: another run uses this folder; waiting for it to end")
        return lock.acquire()


def summarise(run: Run, name: str, results: Results, seconds: float | None = None) -> None:
    """Write the table, picture, claims and manifest of an experiment, and print the claims.

    Args:
        run: The request.
        name: Name of the experiment.
        results: Its results.
        seconds: Duration of the run.
    """
    from rich.markup import escape

    table = make_table(results, name, run.setting)
    if not len(table):
        return
    echo = run.console.print
    echo(f"\n[bold]{name}[/]: claims of the paper, {table['seed'].nunique()} seeds")
    for claim in write_summary(results, name, run.setting, table, seconds):
        value = claim.note
        if not value:
            value = (
                f"{claim.value:.3g}, 95 % [{claim.low:.3g}, {claim.high:.3g}], "
                f"holds if {claim.region}"
            )
        style = STYLES[claim.verdict]
        echo(f"[{style}]{claim.verdict:>13}[/]  {escape(claim.statement)}")
        echo(f"{'':15}{escape(claim.measure)}: {escape(value)}")
        echo(f"{'':15}[dim]paper: {escape(claim.paper)}[/]")


def estimate(run: Run, name: str, cells: list[Cell]) -> None:
    """Print how long an experiment would take.

    Args:
        run: The request.
        name: Name of the experiment.
        cells: Its cells.
    """
    folder = run.folder(name)
    missing = cells
    if folder.exists():
        results = open_results(folder, name, run.setting)
        missing = runs.pending(cells, results, retry_failed=run.retry_failed)
    timing = time_cells(cells)
    durations = [timing.seconds(cell) for cell in cells]
    remaining = [timing.seconds(cell) for cell in missing]
    wall = max(sum(remaining) / run.workers, max(remaining, default=0.0))
    run.console.print(
        f"{name} ({run.setting.preset}): {len(cells)} cells, {len(missing)} to measure; about "
        f"{min(durations):.3g} to {max(durations):.3g} s each (from a timed cell), "
        f"{sum(remaining) * run.setting.threads / 3600:.3g} core hours, "
        f"{format_time(wall)} on {run.workers} workers (hours:minutes:seconds)"
    )
