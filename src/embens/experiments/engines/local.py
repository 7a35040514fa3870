"""Processes on this machine, one thread each unless a cell says otherwise.

A worker is a process of its own with a pipe. If it dies (out of memory, killed) only its task is
touched: it is tried once more in a new worker, then it counts as failed. If this process dies the
workers notice that their pipe is closed and end as well.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from embens.experiments.task import Done, Task, perform

ATTEMPTS = 2
_PASSED_ON = ("EMBENS_DATA",)
_PRELOAD = ["embens.experiments.engines.preload"]


@dataclass(eq=False)
class _Worker:
    process: Any
    pipe: Connection
    alive: Connection  # closing it ends the process
    task: Task | None = None
    started: float = 0.0


@dataclass
class Local:
    """As many processes as asked for; see the module.

    Args:
        workers: how many.
    """

    workers: int
    _pool: list[_Worker] = field(default_factory=list, init=False)
    _waiting: list[Task] = field(default_factory=list, init=False)
    _attempts: dict[str, int] = field(default_factory=dict, init=False)

    @property
    def slots(self) -> int:
        """One task for each worker, and one to go on with at once."""
        return self.workers + 1

    def submit(self, task: Task) -> None:
        """Send a task to an idle worker, started if need be; or keep it until there is one."""
        self._waiting.append(task)
        self._distribute()

    def _distribute(self) -> None:
        while self._waiting:
            idle = next((w for w in self._pool if w.task is None), None)
            if idle is None:
                if len(self._pool) >= self.workers:
                    return
                idle = _start()
                self._pool.append(idle)
            task = self._waiting.pop(0)
            idle.task, idle.started = task, time.perf_counter()
            with contextlib.suppress(OSError):  # it is dead; wait() sees that
                idle.pipe.send(task)

    def wait(self, seconds: float) -> list[Done]:
        """Return what is done; replace workers that died."""
        handles = {w.pipe: w for w in self._pool} | {w.process.sentinel: w for w in self._pool}
        ready = {handles[h] for h in wait(list(handles), seconds)}  # type: ignore[index]
        done = []
        for worker in ready:
            result = self._receive(worker)
            if result is not None:
                done.append(result)
        self._distribute()
        return done

    def _receive(self, worker: _Worker) -> Done | None:
        task = worker.task
        try:
            if worker.pipe.poll():
                result = worker.pipe.recv()
                worker.task = None
                return result
        except (EOFError, OSError):
            pass
        worker.process.join(5)
        self._pool.remove(worker)
        _end(worker)
        if task is None:
            return None
        self._attempts[task.key] = self._attempts.get(task.key, 0) + 1
        if self._attempts[task.key] < ATTEMPTS:
            self._waiting.insert(0, task)
            return None
        text = (
            f"the worker died with exit code {worker.process.exitcode}, "
            f"{self._attempts[task.key]} times (killed, out of memory, or a crash)"
        )
        return Done(task.key, None, text, time.perf_counter() - worker.started)

    def close(self) -> None:
        """End the workers at once."""
        self._waiting.clear()
        for worker in self._pool:
            worker.process.terminate()
        for worker in self._pool:
            worker.process.join(5)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            _end(worker)
        self._pool.clear()


def _start() -> _Worker:
    method = "spawn" if sys.platform == "win32" else "forkserver"
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(_PRELOAD)
    pipe, theirs = context.Pipe()
    alive, watched = context.Pipe()
    environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    process = context.Process(target=_work, args=(theirs, watched, environment), daemon=True)
    process.start()
    theirs.close()
    watched.close()
    return _Worker(process, pipe, alive)


def _end(worker: _Worker) -> None:
    worker.pipe.close()
    worker.alive.close()


def _work(pipe: Connection, alive: Connection, environment: dict[str, str]) -> None:
    os.environ.update(environment)  # the process that forks may be older than these
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=_end_with_parent, args=(alive,), daemon=True).start()
    while True:
        try:
            task = pipe.recv()
            pipe.send(perform(task))
        except (EOFError, OSError):
            return


def _end_with_parent(alive: Connection) -> None:
    wait([alive])
    os._exit(1)
