"""Measure contestants side by side: time as ratios within one round, memory kept for backward.

A shared machine drifts, so a time alone says little. The reference runs before and after every
contestant, and a contestant's ratio is to the mean of those two neighbours. Where the system tells
(Linux), a measurement during which other processes took a core is made again, for a while. Rounds
go through all contestants; the median over rounds is the result, the quartiles say how far to
trust it.
"""

from __future__ import annotations

import datetime
import gc
import importlib.metadata
import json
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("embens", "torch", "tabm", "torch-uncertainty", "jax", "neural-tangents")

PATIENCE = 60.0  # seconds that a comparison may spend on measuring again what others disturbed

Step = Callable[[], object]


@dataclass(frozen=True)
class Contestant:
    """Something to measure: ``step`` does the whole work once."""

    name: str
    step: Step
    ours: bool = False


@dataclass(frozen=True)
class Result:
    """What one contestant reached, as multiples of the reference."""

    name: str
    ours: bool
    ratio: float
    quartiles: tuple[float, float] | None = None


@dataclass
class Row:
    """One line of the bars: who reached what, and what could be reached at all."""

    name: str
    title: str
    unit: str
    bar: float
    limit: float
    limit_reason: str
    rounds: int = 0
    reference: str = ""
    results: list[Result] = field(default_factory=list)

    @property
    def reached(self) -> bool:
        """Whether the first of ours (the default way) meets the bar."""
        return next(r for r in self.results if r.ours).ratio <= self.bar

    def __str__(self) -> str:
        lines = [f"{self.title}", f"  as multiples of {self.unit} ({self.reference})"]
        for result in self.results:
            mark = "*" if result.ours else " "
            spread = ""
            if result.quartiles is not None:
                low, high = result.quartiles
                spread = f"   quartiles {low:.3f} to {high:.3f}"
            lines.append(f"  {mark} {result.name:<42} {result.ratio:7.3f}{spread}")
        lines.append(f"    {'bar':<42} {self.bar:7.3f}   {'met' if self.reached else 'MISSED'}")
        lines.append(f"    {'limit':<42} {self.limit:7.3f}   {self.limit_reason}")
        return "\n".join(lines)


def time_step(step: Step, repeat: int = 1) -> float:
    """Return the seconds that one step takes, over ``repeat`` of them."""
    start = time.perf_counter()
    for _ in range(repeat):
        step()
    return (time.perf_counter() - start) / repeat


def repetitions(step: Step, seconds: float) -> int:
    """Return how many steps fill this time."""
    step()
    return max(1, round(seconds / max(1e-9, min(time_step(step) for _ in range(3)))))


class Disturbance:
    """How much of a core other processes took since the start of this context, as a fraction."""

    def __enter__(self) -> Disturbance:
        self.others, self.start = self._others(), time.perf_counter()
        return self

    def __exit__(self, *exception: object) -> None:
        self.fraction = (self._others() - self.others) / (time.perf_counter() - self.start)

    @staticmethod
    def _others() -> float:
        statistics_file = Path("/proc/stat")
        if not statistics_file.exists():
            return 0.0
        fields = [int(n) for n in statistics_file.read_text().split("\n", 1)[0].split()[1:9]]
        busy = sum(fields) - fields[3] - fields[4]  # all but idle and waiting
        return busy / os.sysconf("SC_CLK_TCK") - time.process_time()


def compare(
    reference: Step,
    contestants: Sequence[Contestant],
    *,
    rounds: int,
    per: int = 1,
    seconds: float = 0.3,
) -> tuple[list[Result], str]:
    """Time contestants against ``per`` steps of the reference.

    Args:
        reference: one step of the reference network.
        contestants: what to time.
        rounds: how often every contestant runs.
        per: how many steps of the reference are the unit.
        seconds: about how long one measurement of the reference and of a contestant takes at least.

    Returns:
        The results in the order of the contestants, and a line on the reference and the noise.
    """
    repeat = max(per, repetitions(reference, seconds))
    repeats = {c.name: repetitions(c.step, seconds) for c in contestants}
    ratios: dict[str, list[float]] = {c.name: [] for c in contestants}
    references: list[float] = []
    disturbed, patience = 0, PATIENCE
    order = list(contestants)
    for _ in range(rounds):
        random.shuffle(order)
        gc.collect()
        for contestant in order:
            while True:
                with Disturbance() as others:
                    before = time_step(reference, repeat)
                    taken = time_step(contestant.step, repeats[contestant.name])
                    after = time_step(reference, repeat)
                if others.fraction < 0.1 or patience <= 0:
                    break
                patience -= 2 * repeat * (before + after)
                time.sleep(min(1.0, max(0.0, patience)))
            disturbed += others.fraction >= 0.1
            references += [before, after]
            ratios[contestant.name].append(taken / (per * (before + after) / 2))
    results = [
        Result(c.name, c.ours, statistics.median(ratios[c.name]), quartiles(ratios[c.name]))
        for c in contestants
    ]
    low, high = quartiles(references)
    middle = statistics.median(references)
    spread = 100 * (high - low) / middle
    note = (
        f"reference {1e3 * middle:.3g} ms, its quartiles {spread:.0f} % apart; "
        f"{rounds} rounds, {100 * disturbed / (rounds * len(order)):.0f} % disturbed by others"
    )
    return results, note


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the first and the third quartile."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


class KeptMemory:
    """The largest number of bytes that autograd holds at once for the backward pass.

    Every storage counts once, however many nodes save it; parameters don't count.
    """

    def __init__(self, parameters: Iterable[Tensor]):
        self.excluded = {p.untyped_storage().data_ptr() for p in parameters}
        self.uses: dict[int, int] = {}
        self.now = self.peak = 0

    def __enter__(self) -> KeptMemory:
        self.hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: _Saved(self, tensor), lambda saved: saved.tensor
        )
        self.hooks.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.hooks.__exit__(*exception)


class _Saved:
    """A saved tensor that tells when it is let go."""

    def __init__(self, memory: KeptMemory, tensor: Tensor):
        self.memory, self.tensor = memory, tensor
        storage = tensor.untyped_storage()
        self.key, self.size = storage.data_ptr(), storage.nbytes()
        if self.key in memory.excluded:
            self.size = 0
        if memory.uses.get(self.key, 0) == 0:
            memory.now += self.size
            memory.peak = max(memory.peak, memory.now)
        memory.uses[self.key] = memory.uses.get(self.key, 0) + 1

    def __del__(self) -> None:
        self.memory.uses[self.key] -= 1
        if self.memory.uses[self.key] == 0:
            self.memory.now -= self.size


def kept_bytes(step: Step, parameters: Iterable[Tensor]) -> int:
    """Return the most bytes that a step of forward and backward keeps at once for the latter."""
    gc.collect()
    with KeptMemory(parameters) as memory:
        step()
    return memory.peak


def flops(step: Step) -> int:
    """Return the arithmetic of the products and convolutions of a step."""
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


def forgetting(*modules: nn.Module) -> Step:
    """Return what an optimiser's ``zero_grad`` does to these modules, without a walk over them."""
    parameters = [p for module in modules for p in module.parameters()]

    def forget() -> None:
        for parameter in parameters:
            parameter.grad = None

    return forget


def commit() -> str:
    """Return the commit that was measured; ``+`` marks changes on top of it."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine() -> dict[str, object]:
    """Return what the numbers depend on: processor, threads, versions."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        model = next(
            (s.partition(":")[2].strip() for s in lines if s.startswith("model name")), model
        )
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "versions": versions,
    }


def write(row: Row) -> None:
    """Keep a row as JSON, with the machine that it ran on."""
    RESULTS.mkdir(exist_ok=True)
    content = {"machine": machine(), "reached": row.reached, **asdict(row)}
    text = json.dumps(content, indent=2, ensure_ascii=False)
    (RESULTS / f"{row.name}.json").write_text(text + "\n")
