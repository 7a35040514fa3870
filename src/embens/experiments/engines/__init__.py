"""Engines: where jobs run. They know nothing of experiments, and change no number."""

from __future__ import annotations

from typing import Protocol

from embens.experiments.job import Done, Job, perform


class Engine(Protocol):
    """What the grid needs of an engine.

    ``slots`` is the number of jobs to keep in it at a time; ``wait`` returns what is done, after at
    most so long; ``close`` ends all workers and drops what is not done.
    """

    @property
    def slots(self) -> int: ...
    def submit(self, job: Job) -> None: ...
    def wait(self, seconds: float) -> list[Done]: ...
    def close(self) -> None: ...


class Inline:
    """Runs jobs in this process, one after another; for debugging and for tests."""

    slots = 1

    def __init__(self) -> None:
        self._jobs: list[Job] = []

    def submit(self, job: Job) -> None:
        self._jobs.append(job)

    def wait(self, seconds: float) -> list[Done]:
        jobs, self._jobs = self._jobs, []
        return [perform(job) for job in jobs]

    def close(self) -> None:
        self._jobs = []
