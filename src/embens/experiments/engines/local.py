"""Processes on this machine, one thread each unless a cell says otherwise.

A worker is a process of its own with a pipe. If it dies (out of memory, killed) only its job is
touched: it is tried once more in a new worker, then it counts as failed. (The pools of
``concurrent.futures`` and ``multiprocessing`` give up all jobs, or wait for ever.) If this process
dies the workers end as well.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from embens.experiments.job import Done, Job, perform

ATTEMPTS = 2
_PASSED_ON = ("EMBENS_DATA",)
_PRELOAD = ["embens.experiments.training", "embens.embedding.families", "sklearn.datasets"]
"""Imported once, in the process that workers are forked from; what is missing is skipped."""


@dataclass(eq=False)
class _Worker:
    process: Any
    pipe: Connection
    job: Job | None = None
    started: float = 0.0

    def end(self) -> None:
        self.process.terminate()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.pipe.close()


@dataclass
class Local:
    """As many processes as asked for; see the module."""

    workers: int
    _pool: list[_Worker] = field(default_factory=list, init=False)
    _waiting: list[Job] = field(default_factory=list, init=False)
    _deaths: Counter[str] = field(default_factory=Counter, init=False)

    @property
    def slots(self) -> int:
        """One job for each worker, and one to go on with at once."""
        return self.workers + 1

    def submit(self, job: Job) -> None:
        self._waiting.append(job)
        self._distribute()

    def _distribute(self) -> None:
        while self._waiting:
            idle = next((w for w in self._pool if w.job is None), None)
            if idle is None:
                if len(self._pool) >= self.workers:
                    return
                idle = _start()
                self._pool.append(idle)
            idle.job, idle.started = self._waiting.pop(0), time.perf_counter()
            with contextlib.suppress(OSError):  # it is dead; wait() sees that
                idle.pipe.send(idle.job)

    def wait(self, seconds: float) -> list[Done]:
        """Return what is done; replace workers that died."""
        handles = {w.pipe: w for w in self._pool} | {w.process.sentinel: w for w in self._pool}
        ready = {handles[h] for h in wait(list(handles), seconds)}  # type: ignore[index]
        done = [self._receive(worker) for worker in ready]
        self._distribute()
        return [result for result in done if result is not None]

    def _receive(self, worker: _Worker) -> Done | None:
        job = worker.job
        with contextlib.suppress(EOFError, OSError):
            if worker.pipe.poll():
                result = worker.pipe.recv()
                worker.job = None
                return result
        worker.process.join(5)
        self._pool.remove(worker)
        worker.end()
        if job is None:
            return None
        self._deaths[job.key] += 1
        if self._deaths[job.key] < ATTEMPTS:
            self._waiting.insert(0, job)
            return None
        text = (
            f"the worker died with exit code {worker.process.exitcode}, "
            f"{self._deaths[job.key]} times (killed, out of memory, or a crash)"
        )
        return Done(job.key, None, text, time.perf_counter() - worker.started)

    def close(self) -> None:
        self._waiting.clear()
        for worker in self._pool:
            worker.end()
        self._pool.clear()


def _start() -> _Worker:
    method = "spawn" if sys.platform == "win32" else "forkserver"
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(_PRELOAD)
    pipe, theirs = context.Pipe()
    environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    process = context.Process(target=_work, args=(theirs, environment), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, pipe)


def _work(pipe: Connection, environment: dict[str, str]) -> None:
    os.environ.update(environment)  # the process that forks may be older than these
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            pipe.send(perform(pipe.recv()))
        except (EOFError, OSError):
            return


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)
