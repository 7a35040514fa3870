"""Time contestants as ratios within one round.

The speed of a shared machine drifts, so absolute times are not comparable. The reference runs
before and after every contestant, and the ratio is taken to the mean of these two times. On Linux a
measurement is repeated if other processes used the processor meanwhile, for a limited time. Results
are medians over rounds.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rows import Result

PATIENCE = 60.0
"""Seconds that a row may spend on repeating disturbed measurements."""
DISTURBED = 0.1
"""Fraction of a core in use by other processes above which a measurement is disturbed."""

Step = Callable[[], object]


@dataclass(frozen=True)
class Contestant:
    """Something to measure.

    Attributes:
        name: of the contestant.
        step: does the whole work once.
        ours: whether it is embens.
        bar: largest ratio that we accept; None: no bar.
    """

    name: str
    step: Step
    ours: bool = False
    bar: float | None = None


@dataclass(frozen=True)
class Comparison:
    """Results of :func:`compare`.

    Attributes:
        results: one entry for each contestant, in their order.
        reference: time of the reference and its noise, in words.
    """

    results: list[Result]
    reference: str


def compare(
    reference: Step,
    contestants: Sequence[Contestant],
    *,
    rounds: int,
    per: int = 1,
    seconds: float = 0.3,
) -> Comparison:
    """Time contestants against ``per`` steps of a reference.

    Args:
        reference: one step of the reference.
        contestants: what to time.
        rounds: number of measurements of each contestant.
        per: number of reference steps in the unit.
        seconds: approximate duration of one measurement.
    """
    repeat = max(per, count_repetitions(reference, seconds))
    repeats = {c.name: count_repetitions(c.step, seconds) for c in contestants}
    ratios: dict[str, list[float]] = {c.name: [] for c in contestants}
    reference_times: list[float] = []
    disturbed, patience = 0, PATIENCE
    order = list(contestants)
    for _ in range(rounds):
        random.shuffle(order)
        gc.collect()
        for contestant in order:
            while True:
                with Disturbance() as disturbance:
                    before = time_step(reference, repeat)
                    taken = time_step(contestant.step, repeats[contestant.name])
                    after = time_step(reference, repeat)
                if disturbance.fraction < DISTURBED or patience <= 0:
                    break
                patience -= 2 * repeat * (before + after)
                time.sleep(min(1.0, max(0.0, patience)))
            if disturbance.fraction >= DISTURBED:
                disturbed += 1
            reference_times += [before, after]
            ratios[contestant.name].append(taken / (per * (before + after) / 2))
    results = [summarise(c.name, ratios[c.name], ours=c.ours, bar=c.bar) for c in contestants]
    noise = describe_noise(reference_times)
    share = 100 * disturbed / (rounds * len(order))
    return Comparison(results, f"{noise}; {rounds} rounds, {share:.0f} % disturbed")


def summarise(
    name: str, ratios: Sequence[float], *, ours: bool = True, bar: float | None = None
) -> Result:
    """Return the median and the quartiles of the ratios of one contestant."""
    return Result(name, ours, statistics.median(ratios), quartiles(ratios), bar)


def describe_noise(times: Sequence[float]) -> str:
    """Return the median of the times of a reference and their spread, in words."""
    low, high = quartiles(times)
    median = statistics.median(times)
    spread = 100 * (high - low) / median
    return f"reference {1e3 * median:.3g} ms, quartiles {spread:.0f} % apart"


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the first and the third quartile."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def time_step(step: Step, repeat: int = 1) -> float:
    """Return the seconds of one step, averaged over ``repeat`` steps."""
    start = time.perf_counter()
    for _ in range(repeat):
        step()
    return (time.perf_counter() - start) / repeat


def count_repetitions(step: Step, seconds: float) -> int:
    """Return how many steps take about so many seconds; at least one."""
    step()  # the first step may compile or allocate
    fastest = min(time_step(step) for _ in range(3))
    return max(1, round(seconds / max(1e-9, fastest)))


class Disturbance:
    """Measures how much of a core other processes use while the context is open.

    Attributes:
        fraction: processor time of others divided by wall time, after the context has closed.
    """

    def __enter__(self) -> Disturbance:
        self.others = _seconds_of_others()
        self.start = time.perf_counter()
        return self

    def __exit__(self, *exception: object) -> None:
        taken = time.perf_counter() - self.start
        self.fraction = (_seconds_of_others() - self.others) / taken


def _seconds_of_others() -> float:
    """Return the processor time of all other processes since the system started."""
    statistics_file = Path("/proc/stat")
    if not statistics_file.exists():
        return 0.0
    total_line = statistics_file.read_text().split("\n", 1)[0]
    fields = [int(number) for number in total_line.split()[1:9]]
    idle, waiting = fields[3], fields[4]
    busy = sum(fields) - idle - waiting
    return busy / os.sysconf("SC_CLK_TCK") - time.process_time()
