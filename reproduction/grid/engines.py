"""Engines: where cells are measured. They know nothing of experiments, and change no number.

An engine is a generator that takes cells and yields what became of each, as it comes. To close it
is to end its workers, and to drop what is not done.
"""

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Generator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from reproduction.grid.cells import Cell
from reproduction.grid.runs import Record, perform

ATTEMPTS = 2  # at a cell whose worker dies
RETRIES = 3  # of a cell whose worker or node is lost, on Ray
_PASSED_ON = ("EMBENS_DATA", "PYTHONPATH")
_PRELOAD = ["reproduction.grid.cells", "sklearn.datasets"]
"""Imported once, in the process that workers are forked from; what is missing is skipped."""


def inline(cells: Sequence[Cell]) -> Generator[tuple[Cell, Record]]:
    """Measure cells in this process, one after another; for debugging and for tests."""
    yield from ((cell, perform(cell)) for cell in cells)


def local(cells: Sequence[Cell], *, workers: int) -> Generator[tuple[Cell, Record]]:
    """Measure cells in processes on this machine, one thread each unless a cell says otherwise.

    A worker is a process of its own with a pipe. If it dies (out of memory, killed) only its cell
    is touched: it is tried once more in a new worker, then it counts as failed. (The pools of
    ``concurrent.futures`` and ``multiprocessing`` give up everything, or wait for ever.) If this
    process dies the workers end as well.
    """
    waiting = deque((cell, 1) for cell in cells)  # with the number of the attempt
    busy, idle = dict[Any, _Worker](), list[_Worker]()
    try:
        done: list[tuple[Cell, Record]] = []
        while waiting or busy or done:
            while waiting and len(busy) < workers:  # before anyone looks at what is done
                worker = idle.pop() if idle else _Worker()
                worker.give(*waiting.popleft())
                busy[worker.pipe] = worker
            yield from done
            done = []
            for pipe in wait(list(busy)) if busy else ():
                worker = busy.pop(pipe)
                try:
                    done.append((worker.cell, worker.pipe.recv()))
                    idle.append(worker)
                except (EOFError, OSError):
                    code = worker.end()
                    if worker.attempt < ATTEMPTS:
                        waiting.appendleft((worker.cell, worker.attempt + 1))
                        continue
                    text = f"the worker died with exit code {code}, {worker.attempt} times"
                    text += " (killed, out of memory, or a crash)"
                    passed = time.perf_counter() - worker.started
                    done.append((worker.cell, {"error": text, "seconds": passed}))
    finally:
        for worker in (*idle, *busy.values()):
            worker.end()


class _Worker:
    def __init__(self) -> None:
        method = "spawn" if sys.platform == "win32" else "forkserver"
        context = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload(_PRELOAD)
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, _environment()), daemon=True)
        self.process.start()
        theirs.close()

    def give(self, cell: Cell, attempt: int) -> None:
        self.cell, self.attempt, self.started = cell, attempt, time.perf_counter()
        with contextlib.suppress(OSError):  # it is dead, which is seen when its pipe is read
            self.pipe.send(cell)

    def end(self) -> int | None:
        self.process.kill()
        self.process.join()
        self.pipe.close()
        return self.process.exitcode


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in _PASSED_ON if name in os.environ}


def _work(pipe: Connection, environment: dict[str, str]) -> None:
    os.environ.update(environment)  # the process that forks may be older than these
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, OSError):
        while True:
            pipe.send(perform(pipe.recv()))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def ray(
    cells: Sequence[Cell],
    *,
    address: str | None = None,
    workers: int | None = None,
    gpus_per_cell: float = 1.0,
) -> Generator[tuple[Cell, Record]]:
    """Measure cells on the Ray cluster of an address, or on one that is started here.

    That has as many CPUs as ``workers``. A cell asks for its CPUs and its part of a GPU. Ray runs
    it again where its worker or its node is lost; an error inside a measurement is a result like
    any other. Results come back to this process, so that nodes need no common disk, save for the
    data: ``EMBENS_DATA`` is passed on and must mean a folder on every node.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray
        from ray.exceptions import RayError

        here = {} if address else {"num_cpus": workers, "include_dashboard": False}
        ray.init(
            address=address or "local",
            runtime_env={"env_vars": {**_environment(), "OMP_NUM_THREADS": "1"}},
            log_to_driver=False,
            logging_level=logging.ERROR,
            ignore_reinit_error=True,
            **here,
        )
    waiting, flying = deque(cells), dict[Any, tuple[Cell, float]]()
    remote = ray.remote(max_retries=RETRIES)(perform)
    try:
        while waiting or flying:
            # Twice the CPUs there are now, so that no node waits; clusters grow and shrink.
            room = max(2, 2 * int(ray.cluster_resources().get("CPU", 1)))
            while waiting and len(flying) < room:
                cell, started = waiting.popleft(), time.perf_counter()
                setting = cell.setting
                gpus = gpus_per_cell * setting.device.startswith("cuda")
                task = remote.options(num_cpus=setting.threads, num_gpus=gpus)
                flying[task.remote(cell)] = (cell, started)
            ready, _ = ray.wait(list(flying), timeout=0.5)
            for reference in ready:
                cell, started = flying.pop(reference)
                try:
                    yield cell, ray.get(reference)
                except RayError as error:
                    text = f"Ray gave up after {RETRIES + 1} attempts: {error}"
                    yield cell, {"error": text, "seconds": time.perf_counter() - started}
    finally:
        for reference in flying:
            ray.cancel(reference, force=True)
        ray.shutdown()
