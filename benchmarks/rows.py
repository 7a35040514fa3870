"""Rows of the benchmark: a title, a unit, and the ratio that each contestant reached."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from embens.files import write_atomically

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("embens", "torch", "tabm", "torch-uncertainty", "jax", "neural-tangents")


@dataclass(frozen=True)
class Result:
    """Ratio of one contestant to the unit of its row.

    Attributes:
        name: the contestant.
        ours: whether it is embens.
        ratio: median over rounds; smaller is better.
        quartiles: first and third quartile over rounds; None for a single measurement.
        bar: largest ratio that we accept; None: no bar.
    """

    name: str
    ours: bool
    ratio: float
    quartiles: tuple[float, float] | None = None
    bar: float | None = None

    @property
    def verdict(self) -> str:
        """Whether the bar is met; "" without a bar."""
        if self.bar is None:
            return ""
        return "met" if self.ratio <= self.bar else "missed"


@dataclass
class Row:
    """One comparison.

    Attributes:
        name: key of the row and name of its file.
        title: what is measured.
        unit: what the ratios are multiples of.
        limit: best ratio that arithmetic or memory allow; None: unknown.
        limit_reason: where the limit comes from.
        rounds: number of rounds.
        reference: size and noise of the unit.
        results: one entry for each contestant.
    """

    name: str
    title: str
    unit: str
    limit: float | None = None
    limit_reason: str = ""
    rounds: int = 0
    reference: str = ""
    results: list[Result] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [self.title, f"  as multiples of {self.unit} ({self.reference})"]
        for result in self.results:
            mark = "*" if result.ours else " "
            line = f"  {mark} {result.name:<40} {result.ratio:7.3f}"
            if result.quartiles is not None:
                low, high = result.quartiles
                line += f"   quartiles {low:.3f} to {high:.3f}"
            if result.bar is not None:
                line += f"   bar {result.bar:.3f} {result.verdict}"
            lines.append(line)
        if self.limit is not None:
            lines.append(f"    {'limit':<40} {self.limit:7.3f}   {self.limit_reason}")
        return "\n".join(lines)

    def write(self) -> None:
        """Write the row as JSON, with a description of the machine."""
        RESULTS.mkdir(exist_ok=True)
        content = {"machine": describe_machine(), **asdict(self)}
        text = json.dumps(content, indent=2, ensure_ascii=False)
        write_atomically(RESULTS / f"{self.name}.json", text + "\n")


def describe_machine() -> dict[str, object]:
    """Return everything that the numbers depend on: processor, threads, commit, versions."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
        "versions": versions,
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    """Return the commit that was measured; ``+`` marks uncommitted changes."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
