"""Measure speed and memory: ``python -m benchmarks --only cnn small --rounds 9``.

Every row runs in a process of its own. ``--bars`` chooses the rows with a bar for releases. Results
are printed; ``--write`` stores them in ``benchmarks/results`` and updates ``docs/performance.md``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks import compiling, finite, page, steps, theory, timing, using
from benchmarks.rows import Row

SHORT_ROUNDS = 2


@dataclass(frozen=True)
class Benchmark:
    """A function that measures one or two rows.

    Attributes:
        measure: takes the number of rounds.
        rounds: default number of rounds.
        threads: number of threads of torch.
    """

    measure: Callable[[int], list[Row]]
    rounds: int = 9
    threads: int = 2


BENCHMARKS = {
    "cnn": Benchmark(steps.cnn),
    "cnn-channels-last": Benchmark(steps.cnn_channels_last),
    "mlp": Benchmark(steps.mlp),
    "small": Benchmark(steps.small, rounds=15, threads=1),
    "transformer": Benchmark(steps.transformer, threads=1),
    "transformer-autocast": Benchmark(steps.transformer_autocast, threads=1),
    "overhead": Benchmark(steps.overhead, rounds=15, threads=1),
    "last-layer": Benchmark(steps.last_layer),
    "last-layer-channels-last": Benchmark(steps.last_layer_channels_last),
    "masks": Benchmark(steps.masks),
    "low-rank": Benchmark(steps.low_rank),
    "collapse": Benchmark(steps.collapse),
    "compile-small": Benchmark(compiling.compile_small, threads=1),
    "compile-mlp": Benchmark(compiling.compile_mlp, threads=1),
    "compile-transformer": Benchmark(compiling.compile_transformer, threads=1),
    "fit-mlp": Benchmark(using.fit_mlp, threads=1),
    "fit-cnn": Benchmark(using.fit_cnn, threads=1),
    "predict": Benchmark(using.predict, rounds=25, threads=1),
    "memory": Benchmark(using.memory),
    "imports": Benchmark(using.imports, rounds=15),
    "theory-mlp": Benchmark(theory.theory_mlp, rounds=7),
    "theory-cnn": Benchmark(theory.theory_cnn, rounds=3),
    "theory-memory": Benchmark(theory.theory_memory),
    "finite-cnn": Benchmark(finite.finite_cnn, rounds=7, threads=1),
    "finite-mlp": Benchmark(finite.finite_mlp, rounds=3, threads=1),
    "finite-mlp-narrow": Benchmark(finite.finite_mlp_narrow, rounds=3, threads=1),
    "finite-cnn-one": Benchmark(finite.finite_cnn_one, rounds=3, threads=1),
    "finite-memory": Benchmark(finite.finite_memory, threads=1),
}

BARS = (
    *("cnn", "cnn-channels-last", "mlp", "small", "transformer", "overhead", "last-layer"),
    *("compile-small", "compile-mlp", "compile-transformer", "fit-mlp", "fit-cnn", "predict"),
    *("memory", "imports", "theory-mlp", "finite-cnn"),
)
"""Rows with a bar for releases, and those of torch.compile."""


def main() -> None:
    """Measure the chosen rows."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    parser.add_argument("--bars", action="store_true", help="only the rows of BARS")
    parser.add_argument("--rounds", type=int, help="instead of the default of each row")
    parser.add_argument("--short", action="store_true", help=f"{SHORT_ROUNDS} rounds")
    parser.add_argument("--threads", type=int, help="instead of the default of each row")
    parser.add_argument("--write", action="store_true", help="store the results")
    parser.add_argument(
        "--patience", type=float, default=60, help="seconds for repeating disturbed measurements"
    )
    options = parser.parse_args()
    if options.bars:
        options.only = list(BARS)
    if len(options.only) == 1:
        run(options.only[0], options)
        return
    failed = [name for name in options.only if not run_in_process(name, options)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def run(name: str, options: argparse.Namespace) -> None:
    """Measure one benchmark in this process."""
    benchmark = BENCHMARKS[name]
    rounds = benchmark.rounds
    if options.short:
        rounds = SHORT_ROUNDS
    if options.rounds is not None:
        rounds = options.rounds
    torch.set_num_threads(options.threads or benchmark.threads)
    torch.manual_seed(0)
    timing.PATIENCE = options.patience
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the peers
        rows = benchmark.measure(rounds)
    for row in rows:
        print(f"\n[{row.name}] {row}", flush=True)
        if options.write:
            row.write()
    if options.write:
        page.main()


def run_in_process(name: str, options: argparse.Namespace) -> bool:
    """Measure one benchmark in a new process; return whether it succeeded."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks", "--only", name]
    command += ["--patience", str(options.patience)]
    if options.rounds is not None:
        command += ["--rounds", str(options.rounds)]
    if options.threads is not None:
        command += ["--threads", str(options.threads)]
    if options.short:
        command.append("--short")
    if options.write:
        command.append("--write")
    is_successful = subprocess.run(command, check=False).returncode == 0
    print(f"[{name}] {time.perf_counter() - begin:.0f} s", flush=True)
    return is_successful


if __name__ == "__main__":
    main()
