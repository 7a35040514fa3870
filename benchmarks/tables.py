"""Benchmark on tables: our estimators, TabM, RealMLP, boosting, a forest, separate networks.

    python -m benchmarks.tables develop          # fits on the tables that defaults are chosen by
    python -m benchmarks.tables run              # fits on the blind tables, then the report
    python -m benchmarks.tables list             # the blind tables and their sizes, without a fit
    python -m benchmarks.tables report           # the results so far, as text and a figure
    python -m benchmarks.tables run --rows 1000 --splits 1 --only tabm lightgbm --tables ames

The protocol follows TabArena, on other tables: three folds, repeated ten times on tables with fewer
than 2,500 rows and three times on others (`--splits` takes the first of them). A fifth of the
fitted rows is held out, the same rows for all contestants that take a validation set. `--rows`
limits the rows to fit. A fit that takes more than `--limit` seconds of CPU time is ended and loses
to all that finished.

Each fit runs in a separate process with one thread, so that its memory can be measured. The process
is forked from one that has imported all libraries. Every fit appends one row to
`results/tables/{develop,blind}.csv`; a second run adds the missing fits. `tables_data` has the
tables, `tables_contestants` the methods, `tables_report` the evaluation of the results.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import multiprocessing
import os
import resource
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from benchmarks import tables_data
from benchmarks.tables_contestants import (
    CONTESTANTS,
    OURS,
    PRELOAD,
    Model,
    Part,
    crps_of_normal,
)

RESULTS = Path(__file__).parent / "results" / "tables"
CPU = resource.RLIMIT_CPU
FOLDS = 3
TEST_ROWS = 5000  # at most: enough for a standard error of half a point of accuracy


@dataclass(frozen=True)
class Cell:
    """One fit: everything that determines its scores."""

    table: str
    contestant: str
    repeat: int
    fold: int
    rows: int  # to fit, at most
    limit: float = 600.0

    @property
    def key(self) -> tuple:
        return self.table, self.contestant, self.repeat, self.fold, self.rows


@dataclass
class Row:
    """Results of a fit; None where a result is not defined. Time is CPU time, memory in MB."""

    table: str
    contestant: str
    repeat: int
    fold: int
    rows: int
    limit: float
    kind: str = ""
    fitted: int | None = None
    tested: int | None = None
    log_loss: float | None = None
    accuracy: float | None = None
    calibration: float | None = None
    crps: float | None = None
    rmse: float | None = None
    coverage: float | None = None
    width: float | None = None
    member_loss: float | None = None
    fit_seconds: float | None = None
    wall_seconds: float | None = None
    predict_seconds: float | None = None
    memory: float | None = None
    parameters: int | None = None
    code: str = ""
    problem: str = ""


# One fit


def splits(rows: int) -> list[tuple[int, int]]:
    """Return the repeats and folds of TabArena for a number of rows."""
    repeats = 3
    if rows < 2500:
        repeats = 10
    return [(repeat, fold) for repeat in range(repeats) for fold in range(FOLDS)]


def split(y: np.ndarray, repeat: int, fold: int, rows: int) -> tuple[np.ndarray, ...]:
    """Return the rows to fit, a mask of those to hold out, and the rows to test."""
    from sklearn.model_selection import KFold, StratifiedKFold, train_test_split

    classes = y.dtype.kind == "O"
    kind = StratifiedKFold if classes else KFold
    folds = kind(FOLDS, shuffle=True, random_state=repeat).split(np.zeros(len(y)), y)
    fit, test = list(folds)[fold]
    draw = np.random.default_rng([repeat, fold])
    fit, test = draw.permutation(fit)[:rows], draw.permutation(test)[:TEST_ROWS]
    several = classes and np.unique(y[fit], return_counts=True)[1].min() > 1
    _, held = train_test_split(
        np.arange(len(fit)),
        test_size=0.2,
        random_state=repeat,
        stratify=y[fit] if several else None,
    )
    return fit, np.isin(np.arange(len(fit)), held), test


def measure(cell: Cell, load: Callable = tables_data.load) -> Row:
    """Fit one contestant to one split, and score it."""
    import torch

    torch.set_num_threads(1)
    X, y = load(cell.table)
    fit, held, test = split(y, cell.repeat, cell.fold, cell.rows)
    kind = "classes" if y.dtype.kind == "O" else "number"
    if kind == "classes":  # classes without a fitted row are neither tested nor held out
        test = test[np.isin(y[test].astype(str), np.unique(y[fit].astype(str)))]
        held &= ~np.isin(y[fit].astype(str), sorted(set(y[fit]) - set(y[fit][~held])))
    part = Part(X.iloc[fit].reset_index(drop=True), y[fit], held)
    before, limits = resource.getrusage(resource.RUSAGE_SELF), resource.getrlimit(CPU)
    resource.setrlimit(CPU, (int(time.process_time() + cell.limit) + 1, limits[1]))
    cpu, wall = time.process_time(), time.perf_counter()
    model = CONTESTANTS[cell.contestant](part, 100 * cell.repeat + cell.fold)
    took = time.process_time() - cpu, time.perf_counter() - wall
    resource.setrlimit(CPU, limits)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before.ru_maxrss
    cpu = time.process_time()
    prediction = model.predict(X.iloc[test])
    row = Row(
        **asdict(cell),
        kind=kind,
        fitted=len(fit),
        tested=len(test),
        fit_seconds=took[0],
        wall_seconds=took[1],
        predict_seconds=time.process_time() - cpu,
        memory=memory / 1024,
        parameters=model.parameters,
        code=version() if cell.contestant in OURS else "",
    )
    score = score_classes if kind == "classes" else score_number
    for name, value in score(prediction, model, X.iloc[test], y[test], part).items():
        setattr(row, name, value)
    return row


def score_classes(probabilities, model: Model, X, y, part: Part) -> dict[str, float]:
    """Return log loss, accuracy, calibration error in 15 bins of equal size, members' mean loss."""
    classes = part.classes
    assert classes is not None
    codes = np.searchsorted(classes.astype(str), y.astype(str))
    probabilities = np.clip(probabilities, 1e-7, 1.0)
    probabilities = probabilities / probabilities.sum(1, keepdims=True)
    correct = probabilities.argmax(1) == codes
    confidence = probabilities.max(1)
    bins = np.array_split(np.argsort(confidence), 15)
    gaps = [abs(correct[b].mean() - confidence[b].mean()) * len(b) for b in bins if len(b)]
    scores = {
        "log_loss": -np.log(probabilities[np.arange(len(y)), codes]).mean(),
        "accuracy": correct.mean(),
        "calibration": sum(gaps) / len(y),
    }
    if model.members is not None:
        members = np.clip(model.members(X)[:, np.arange(len(y)), codes], 1e-7, 1.0)
        scores["member_loss"] = -np.log(members).mean()
    return {name: float(value) for name, value in scores.items()}


def score_number(forecast, model: Model, X, y, part: Part) -> dict[str, float]:
    """Return CRPS, RMSE, coverage and mean width of 90 % intervals, members' mean CRPS."""
    scores = {
        "crps": np.mean(forecast.crps(y)),
        "rmse": np.sqrt(np.mean((forecast.mean - y) ** 2)),
        "coverage": np.mean((forecast.low <= y) & (y <= forecast.high)),
        "width": np.mean(forecast.high - forecast.low),
    }
    if model.members is not None:
        scores["member_loss"] = np.mean(crps_of_normal(y, *model.members(X)))
    return {name: float(value) for name, value in scores.items()}


def version() -> str:
    """Return the commit, with ``-dirty`` if the source differs from it."""
    head = _git("rev-parse", "--short", "HEAD")
    if _git("status", "--porcelain", "src"):
        return f"{head}-dirty"
    return head


def _git(*arguments: str) -> str:
    root = Path(__file__).parents[1]
    result = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=root)
    return result.stdout.strip()


# Many fits


def perform(cell: Cell) -> Row:
    """Measure a fit; an error becomes the row's ``problem``."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return measure(cell)
    except Exception as error:
        traceback.print_exc()
        text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return Row(**asdict(cell), problem=text)


def in_process(cell: Cell) -> Row:
    """Perform in a separate process, which ends if it exceeds the limit or the memory."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, "benchmarks.tables", "embens.tabular"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(theirs, cell))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        process.join()
        text = f"ended by signal {-(process.exitcode or 0)}"
        return Row(**asdict(cell), problem="over the limit" if process.exitcode == -24 else text)
    finally:
        process.join()


def _send(pipe, cell: Cell) -> None:
    pipe.send(perform(cell))


def run_local(cells: Iterable[Cell], workers: int) -> Iterator[Row]:
    with ThreadPoolExecutor(workers) as pool:
        running = {pool.submit(in_process, cell) for cell in cells}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)


def run_ray(cells: Iterable[Cell], workers: int | None) -> Iterator[Row]:
    """Perform on a Ray cluster (`RAY_ADDRESS`), or one that is started here."""
    import ray

    here = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": workers}
    ray.init(log_to_driver=False, **here)
    remote = ray.remote(num_cpus=1)(in_process)
    running = {remote.remote(cell): cell for cell in cells}
    while running:
        done, _ = ray.wait(list(running), num_returns=1)
        cell = running.pop(done[0])
        try:
            yield ray.get(done[0])
        except ray.exceptions.RayError as error:
            yield Row(**asdict(cell), problem=f"lost: {' '.join(str(error).split())[:100]}")


# Results


def read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    return list(csv.DictReader(whole_lines(path)))


def whole_lines(path: Path) -> list[str]:
    """Return the lines of a file without the last one if its writer was killed."""
    lines = path.read_bytes().decode().splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n")]


def keys(rows: list[dict[str, str]]) -> set[tuple]:
    return {
        (r["table"], r["contestant"], int(r["repeat"]), int(r["fold"]), int(r["rows"]))
        for r in rows
    }


def append(path: Path, row: Row) -> None:
    # Imported here: the memory of the processes that fit is measured.
    from embens.files import write_atomically

    names = [field.name for field in fields(Row)]
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = whole_lines(path) if path.exists() else []
    if lines and sum(len(line.encode()) for line in lines) < path.stat().st_size:
        write_atomically(path, "".join(lines))
    values = {
        n: "" if v is None else f"{v:.6g}" if isinstance(v, float) else v
        for n, v in asdict(row).items()
    }
    with path.open("a" if lines else "w", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        if not lines:
            writer.writeheader()
        writer.writerow(values)


def plan(tables: list[str], contestants: list[str], options: argparse.Namespace) -> list[Cell]:
    """Return all cells: the first split of all tables first, small tables first."""
    sizes = {name: len(tables_data.load(name)[1]) for name in tables}
    found = []
    for name in tables:
        # A number of rows that the table does not have would repeat the fits of a smaller one.
        available = sizes[name] * (FOLDS - 1) / FOLDS
        numbers = sorted(options.rows)
        numbers = [n for k, n in enumerate(numbers) if k == 0 or numbers[k - 1] < available]
        for turn, (repeat, fold) in enumerate(splits(sizes[name])[: options.splits]):
            for place, contestant in enumerate(contestants):
                for rows in numbers:
                    cell = Cell(name, contestant, repeat, fold, rows, options.limit)
                    found.append(((turn, rows, sizes[name], name, place), cell))
    return [cell for _, cell in sorted(found, key=lambda pair: pair[0])]


def run(path: Path, cells: list[Cell], options: argparse.Namespace) -> None:
    known = keys([r for r in read(path) if not (options.again and r["problem"])])
    todo = [cell for cell in cells if cell.key not in known]
    print(f"{len(cells)} fits, {len(cells) - len(todo)} known", flush=True)
    rows = run_ray(todo, options.workers) if options.ray else run_local(todo, options.workers)
    for count, row in enumerate(rows, 1):
        append(path, row)
        loss = row.log_loss if row.kind == "classes" else row.crps
        result = row.problem or f"{loss:.4f} in {row.fit_seconds:.1f} s, {row.memory:.0f} MB"
        print(f"{count}/{len(todo)} {row.table} {row.contestant} {row.repeat}.{row.fold}: {result}")
        sys.stdout.flush()


def print_tables(names: list[str]) -> None:
    """Print kind and size of each table before anything is fitted."""
    for name in names:
        X, y = tables_data.load(name)
        kind = tables_data.TABLES[name].kind
        print(f"{name:>16}: {kind}, {len(y)} rows, {X.shape[1]} columns")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("develop", "run", "list", "report"))
    parser.add_argument("--tables", nargs="+", metavar="TABLE", help="some of the list")
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1000, 5000, 15_000], help="to fit")
    parser.add_argument("--splits", type=int, default=3, help="of a table, at most")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds of CPU for a fit")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--ray", action="store_true", help="on a Ray cluster")
    parser.add_argument("--again", action="store_true", help="fits that failed")
    options = parser.parse_args()
    listed = tables_data.DEVELOPMENT if options.what == "develop" else tables_data.BLIND
    tables = options.tables or list(listed)
    if unknown := sorted(set(tables) - set(listed)):
        parser.error(f"{', '.join(unknown)}: not in the list of `{options.what}`: {list(listed)}")
    print_tables(tables)
    if options.what == "list":
        return
    path = RESULTS / ("develop.csv" if options.what == "develop" else "blind.csv")
    if options.what != "report":
        run(path, plan(tables, options.only, options), options)
    from benchmarks import tables_report

    tables_report.report(path)


if __name__ == "__main__":
    from benchmarks import tables  # other processes find its classes by this name

    tables.main()
