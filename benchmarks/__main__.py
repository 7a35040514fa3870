"""Run all benchmarks of speed and memory: `make bench`, or `make bench ARGS=--short`."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from benchmarks import page

SUITES = {  # rounds of the whole run, and of the short one
    "embed": (9, 2),
    "fit": (7, 2),
    "imports": (15, 3),
    "theory": (7, 2),
    "finite": (3, 1),
}


def main() -> None:
    """Run the suites one after another, each in a process of its own, and make the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="few rounds")
    parser.add_argument("--only", nargs="+", choices=SUITES, default=list(SUITES))
    options = parser.parse_args()
    failed = []
    for name in options.only:
        begun = time.perf_counter()
        rounds = SUITES[name][options.short]
        command = [sys.executable, "-m", f"benchmarks.{name}", "--rounds", str(rounds)]
        if name in ("embed", "finite"):
            command += ["--patience", "5" if options.short else "30"]
        print(f"== {name}, {rounds} rounds", flush=True)
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
        print(f"== {name}: {time.perf_counter() - begun:.0f} s", flush=True)
    page.main()
    if failed:
        sys.exit(f"these suites failed: {', '.join(failed)}")


main()
