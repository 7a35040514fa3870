"""Tables: our estimators beside TabM, RealMLP, boosting, a forest and separate networks.

    python -m benchmarks.tables develop          # fits on the tables that defaults are chosen by
    python -m benchmarks.tables run              # fits on the blind tables, then the report
    python -m benchmarks.tables list             # the blind tables and their sizes, without a fit
    python -m benchmarks.tables report           # what is measured so far, as text and a figure
    python -m benchmarks.tables run --rows 1000 --splits 1 --only tabm lightgbm --tables ames

The protocol is TabArena's as far as it goes without its data: three folds, repeated ten times on
tables of less than 2,500 rows and three times on others (`--splits` takes the first of them), and
a fifth of the fitted rows held out inside, the same for all that want one. `--rows` limits the rows
to fit, so that a table is drawn smaller and every contestant still finishes; a fit that takes more
than `--limit` seconds of CPU time is ended and noted, and loses to all that finished.

A fit is a process of its own with one thread, forked from one that has imported everything, so that
its memory can be told. Every fit appends one row to `results/tables/{develop,blind}.csv`; running
again does what is missing. The tables and contestants are in `tables_data` and
`tables_contestants`, the reading of results in `tables_report`.
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
    """One fit: all that determines its scores."""

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
    """What is kept of a fit; None where it has no meaning. Time is CPU time, memory in MB."""

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
    """Return repeats and folds, as many as TabArena has for a table of so many rows."""
    return [(r, f) for r in range(10 if rows < 2500 else 3) for f in range(FOLDS)]


def split(y: np.ndarray, repeat: int, fold: int, rows: int) -> tuple[np.ndarray, ...]:
    """Return the rows to fit, which of them to hold out, and the rows to test."""
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
    if kind == "classes":  # a class that was not drawn to be fitted cannot be asked for
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
    said = model.say(X.iloc[test])
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
    scores = score_classes if kind == "classes" else score_number
    for name, value in scores(said, model, X.iloc[test], y[test], part).items():
        setattr(row, name, value)
    return row


def score_classes(said, model: Model, X, y, part: Part) -> dict[str, float]:
    """Return log loss, accuracy, calibration error in 15 bins of equal size, members' mean loss."""
    known = part.classes
    assert known is not None
    place = np.searchsorted(known.astype(str), y.astype(str))
    chance = np.clip(said, 1e-7, 1.0)
    chance = chance / chance.sum(1, keepdims=True)
    right = chance.argmax(1) == place
    sure = chance.max(1)
    bins = np.array_split(np.argsort(sure), 15)
    gaps = [abs(right[b].mean() - sure[b].mean()) * len(b) for b in bins if len(b)]
    found = {
        "log_loss": -np.log(chance[np.arange(len(y)), place]).mean(),
        "accuracy": right.mean(),
        "calibration": sum(gaps) / len(y),
    }
    if model.members is not None:
        members = np.clip(model.members(X)[:, np.arange(len(y)), place], 1e-7, 1.0)
        found["member_loss"] = -np.log(members).mean()
    return {name: float(value) for name, value in found.items()}


def score_number(said, model: Model, X, y, part: Part) -> dict[str, float]:
    """Return CRPS, RMSE, coverage and mean width of 90 % intervals, members' mean CRPS."""
    found = {
        "crps": np.mean(said.crps(y)),
        "rmse": np.sqrt(np.mean((said.mean - y) ** 2)),
        "coverage": np.mean((said.low <= y) & (y <= said.high)),
        "width": np.mean(said.high - said.low),
    }
    if model.members is not None:
        found["member_loss"] = np.mean(crps_of_normal(y, *model.members(X)))
    return {name: float(value) for name, value in found.items()}


def version() -> str:
    """Return the commit, and whether the source differs from it."""
    root = Path(__file__).parents[1]
    said = [["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "src"]]
    head, changed = (
        subprocess.run(["git", *words], capture_output=True, text=True, cwd=root).stdout.strip()
        for words in said
    )
    return f"{head}-dirty" if changed else head


# Many fits


def perform(cell: Cell) -> Row:
    """Measure, with an error as a row like any other."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return measure(cell)
    except Exception as error:
        traceback.print_exc()
        text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return Row(**asdict(cell), problem=text)


def in_process(cell: Cell) -> Row:
    """Perform in a process of its own; one that died was over the limit, or out of memory."""
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
        flying = {pool.submit(in_process, cell) for cell in cells}
        while flying:
            done, flying = wait(flying, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)


def run_ray(cells: Iterable[Cell], workers: int | None) -> Iterator[Row]:
    """Perform on a Ray cluster (`RAY_ADDRESS`), or one that is started here."""
    import ray

    here = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": workers}
    ray.init(log_to_driver=False, **here)
    remote = ray.remote(num_cpus=1)(in_process)
    flying = {remote.remote(cell): cell for cell in cells}
    while flying:
        done, _ = ray.wait(list(flying), num_returns=1)
        cell = flying.pop(done[0])
        try:
            yield ray.get(done[0])
        except ray.exceptions.RayError as error:
            yield Row(**asdict(cell), problem=f"lost: {' '.join(str(error).split())[:100]}")


# Results


def read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def keys(rows: list[dict[str, str]]) -> set[tuple]:
    return {
        (r["table"], r["contestant"], int(r["repeat"]), int(r["fold"]), int(r["rows"]))
        for r in rows
    }


def append(path: Path, row: Row) -> None:
    names = [field.name for field in fields(Row)]
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    values = {
        n: "" if v is None else f"{v:.6g}" if isinstance(v, float) else v
        for n, v in asdict(row).items()
    }
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        if new:
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
