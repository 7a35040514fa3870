"""Engines: where tasks run. They know nothing of experiments, and change no number.

An engine has ``slots``, the number of tasks to keep in it at a time; ``submit(task)``;
``wait(seconds)``, which returns what is done; and ``close()``, which drops what is not.
"""

from __future__ import annotations

from typing import Protocol

from embens.experiments.task import Done, Task, perform


class Engine(Protocol):
    """What the grid needs of an engine."""

    @property
    def slots(self) -> int:
        """How many tasks to keep in it."""
        ...

    def submit(self, task: Task) -> None:
        """Start a task."""
        ...

    def wait(self, seconds: float) -> list[Done]:
        """Return tasks that are done, after at most so long."""
        ...

    def close(self) -> None:
        """End all workers, whatever they do."""
        ...


class Inline:
    """Runs tasks in this process, one after another; for debugging and for tests."""

    @property
    def slots(self) -> int:
        """One at a time."""
        return 1

    def __init__(self) -> None:
        self._tasks: list[Task] = []

    def submit(self, task: Task) -> None:
        """Remember a task."""
        self._tasks.append(task)

    def wait(self, seconds: float) -> list[Done]:
        """Run the tasks."""
        tasks, self._tasks = self._tasks, []
        return [perform(task) for task in tasks]

    def close(self) -> None:
        """Forget the tasks."""
        self._tasks = []
