"""Engines: where jobs run. They know nothing of experiments, and change no number.

An engine has ``slots``, the number of jobs to keep in it at a time; ``submit(job)``;
``wait(seconds)``, which returns what is done; and ``close()``, which drops what is not.
"""

from __future__ import annotations

from typing import Protocol

from embens.experiments.job import Done, Job, perform


class Engine(Protocol):
    """What the grid needs of an engine."""

    @property
    def slots(self) -> int:
        """How many jobs to keep in it."""
        ...

    def submit(self, job: Job) -> None:
        """Start a job."""
        ...

    def wait(self, seconds: float) -> list[Done]:
        """Return jobs that are done, after at most so long."""
        ...

    def close(self) -> None:
        """End all workers, whatever they do."""
        ...


class Inline:
    """Runs jobs in this process, one after another; for debugging and for tests."""

    @property
    def slots(self) -> int:
        """One at a time."""
        return 1

    def __init__(self) -> None:
        self._jobs: list[Job] = []

    def submit(self, job: Job) -> None:
        """Remember a job."""
        self._jobs.append(job)

    def wait(self, seconds: float) -> list[Done]:
        """Run the jobs."""
        jobs, self._jobs = self._jobs, []
        return [perform(job) for job in jobs]

    def close(self) -> None:
        """Forget the jobs."""
        self._jobs = []
