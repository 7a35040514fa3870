"""Progress of a run: all cells, the time left, and a line of the latest result.

The time left goes by the weights of cells, since large ones cost more than small ones. Without a
terminal a line is printed now and then instead of a bar.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

from embens.experiments.task import Done, Task

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_LINES = 10  # without a terminal


class Progress:
    """Shows a run on a console; a context."""

    def __init__(self, console: Console, title: str):
        from rich.live import Live
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bars

        self.console, self.title = console, title
        self.bars = Bars(
            TextColumn("[bold]{task.description}"), BarColumn(bar_width=20),
            TextColumn("{task.fields[count]}"), TextColumn("{task.fields[times]}"),
        )  # fmt: skip
        self.bar = self.bars.add_task(title, count="", times="")
        self.total = self.done = self.before = 0.0
        self.began = time.perf_counter()
        self.cells = self.finished = self.printed = self.failed = 0
        self.latest = ""
        self.live = Live(
            get_renderable=self._frame, console=console, transient=True, refresh_per_second=4
        )

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.console.is_terminal:
            self.live.stop()

    def start(self, total: float, done: float, cells: int, finished: int) -> None:
        """Begin; see :class:`embens.experiments.grid.Watcher`."""
        self.total, self.done, self.cells, self.finished = total, done, cells, finished
        self.before, self.began = done, time.perf_counter()
        if finished:
            self.console.print(
                f"{self.title}: {finished} of {cells} cells are there already",
                highlight=False,
                soft_wrap=True,
            )

    def update(self, task: Task, done: Done, weight: float) -> None:
        """Count a cell."""
        self.failed += done.error is not None
        self.latest = describe(task, done)
        self.skip(weight)

    def skip(self, weight: float) -> None:
        """Count a cell that another run has measured: it is done, whoever did it."""
        self.finished += 1
        self.done += weight
        if self.console.is_terminal:
            return
        part = int(_LINES * self.finished / max(1, self.cells))
        if part > self.printed or self.finished == self.cells:
            self.printed = part
            left = f"{duration(self.time_left())} left"
            self.console.print(
                f"{self.title} {self._count()}, {left}: {self.latest or 'by another run'}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )

    def time_left(self) -> float:
        """Return the seconds that the remaining weight will take at the pace so far."""
        passed, work = time.perf_counter() - self.began, self.done - self.before
        return (self.total - self.done) * passed / work if work > 0 else float("nan")

    def _count(self) -> str:
        return f"{self.finished}/{self.cells}" + (f" ({self.failed} failed)" * bool(self.failed))

    def _frame(self) -> RenderableType:
        """Return what is shown now: the bar, and the latest result on a line of its own."""
        from rich.console import Group
        from rich.text import Text

        times = duration(time.perf_counter() - self.began)
        if self.done > self.before:
            times += f", {duration(self.time_left())} left"
        self.bars.update(
            self.bar,
            total=self.total or None,
            completed=self.done,
            count=self._count() if self.cells else "",
            times=times,
        )
        return Group(self.bars, Text(self.latest, no_wrap=True, overflow="ellipsis", style="dim"))


def describe(task: Task, done: Done) -> str:
    """Return a cell and its result in a few words."""
    swept = {
        f.name: getattr(task.cell, f.name)
        for f in dataclasses.fields(task.cell)
        if f.name != "setting"
    }
    cell = " ".join(f"{name}={_short(value)}" for name, value in swept.items() if value is not None)
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
