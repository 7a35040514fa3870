"""`import embens` against `import torch`, each in a fresh process.

    python -m benchmarks.imports [--rounds 15]

Processes take turns; the ratio is the median over rounds of two neighbours. Time is that of the
import alone, without the interpreter's start; CPU time is the steadier one on a shared machine.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

from benchmarks.timing import Result, Row, quartiles, write

BAR = 1.1
PROGRAM = """
import time
wall, cpu = time.perf_counter(), time.process_time()
import {}
print(time.perf_counter() - wall, time.process_time() - cpu)
"""


def seconds(module: str) -> tuple[float, float]:
    """Return the wall time and the CPU time of an import in a new process."""
    command = [sys.executable, "-c", PROGRAM.format(module)]
    wall, cpu = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return float(wall), float(cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    for module in ("torch", "embens"):  # once for the files' cache and the byte code
        seconds(module)
    times: dict[str, list[tuple[float, float]]] = {"torch": [], "embens": []}
    for turn in range(rounds):
        for module in ("torch", "embens") if turn % 2 else ("embens", "torch"):
            times[module].append(seconds(module))
    row = Row(
        name="imports",
        title="`import embens`, each time in a new process",
        unit="`import torch`",
        bar=BAR,
        limit=1.0,
        limit_reason="embens imports torch",
        rounds=rounds,
    )
    for i, kind in enumerate(("wall time", "CPU time")):
        torch, embens = ([pair[i] for pair in times[module]] for module in ("torch", "embens"))
        ratios = [b / a for a, b in zip(torch, embens, strict=True)]
        row.results.append(Result(kind, True, statistics.median(ratios), quartiles(ratios)))
        row.reference = f"torch alone took {1e3 * statistics.median(torch):.0f} ms of {kind}"
    print(row)
    write(row)


if __name__ == "__main__":
    main()
