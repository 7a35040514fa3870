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
    print(f"{'':8} {'torch, ms':>10} {'embens, ms':>10} {'ratio':>7} {'bar':>6}")
    for i, kind in enumerate(("wall", "CPU")):
        torch, embens = ([pair[i] for pair in times[module]] for module in ("torch", "embens"))
        ratio = statistics.median(b / a for a, b in zip(torch, embens, strict=True))
        middle = [1e3 * statistics.median(values) for values in (torch, embens)]
        print(f"{kind:8} {middle[0]:10.0f} {middle[1]:10.0f} {ratio:7.3f} {BAR:6.2f}")


if __name__ == "__main__":
    main()
