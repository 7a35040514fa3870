"""Progress of a run: all cells, the time left, and a line of the latest result.

The time left goes by the weights of cells, since large ones cost more than small ones. Without a
terminal a line is printed now and then instead of a bar.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from embens.experiments.grid import Watcher
from embens.experiments.job import Done, Job

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_LINES = 10  # without a terminal


class Progress(Watcher):
    """Shows a run on a console; a context."""

    def __init__(self, console: Console, title: str):
        from rich.live import Live

        self.console, self.title = console, title
        self.total = self.done = self.before = 0.0
        self.cells = self.finished = self.failed = self.printed = 0
        self.latest = ""
        self.began = time.perf_counter()
        self.live = Live(get_renderable=self.frame, console=console, transient=True)

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.live.stop()

    def start(self, total: float, done: float, cells: int, finished: int) -> None:
        self.total, self.done, self.cells, self.finished = total, done, cells, finished
        self.before, self.began = done, time.perf_counter()
        if finished:
            self._print(f"{self.title}: {finished} of {cells} cells are there already")

    def update(self, job: Job, done: Done) -> None:
        self.failed += done.error is not None
        self.latest = describe(job, done)
        self.skip(job.cell.weight)

    def skip(self, weight: float) -> None:
        self.finished += 1
        self.done += weight
        part = _LINES * self.finished // max(1, self.cells)
        if not self.console.is_terminal and part > self.printed:
            self.printed = part
            left = duration(self.time_left())
            latest = self.latest or "by another run"
            self._print(f"{self.title} {self._count()}, {left} left: {latest}")

    def time_left(self) -> float:
        passed, work = time.perf_counter() - self.began, self.done - self.before
        return (self.total - self.done) * passed / work if work > 0 else float("nan")

    def frame(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        bar = ProgressBar(total=self.total or 1.0, completed=self.done, width=20)
        times = duration(time.perf_counter() - self.began)
        if self.done > self.before:
            times += f", {duration(self.time_left())} left"
        line = Table.grid(padding=(0, 1))
        line.add_row(Text(self.title, style="bold"), bar, Text(self._count()), Text(times))
        return Group(line, Text(self.latest, no_wrap=True, overflow="ellipsis", style="dim"))

    def _count(self) -> str:
        return f"{self.finished}/{self.cells}" + (f" ({self.failed} failed)" * bool(self.failed))

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def describe(job: Job, done: Done) -> str:
    """Return a cell and its result in a few words."""
    swept = job.cell.swept().items()
    cell = " ".join(f"{name}={_short(value)}" for name, value in swept if value is not None)
    if done.rows is None:
        return f"{cell}: failed, {(done.error or '').strip().splitlines()[-1][:80]}"
    numbers = list((done.rows[-1] if done.rows else {}).items())[:3]
    return f"{cell}: " + ", ".join(f"{k} {_short(v)}" for k, v in numbers)


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def duration(seconds: float) -> str:
    """Return a time in words.

    Example:
        >>> duration(0.25), duration(5), duration(150), duration(9000)
        ('0.25 s', '5 s', '2.5 min', '2.5 h')
    """
    if seconds != seconds:
        return "?"
    if seconds < 1:
        return f"{seconds:.1g} s" if seconds < 0.1 else f"{seconds:.2f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
