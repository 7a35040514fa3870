"""Engines: where cells are measured.

An engine is a generator that takes cells and yields each with its outcome. Closing it ends its
workers and drops unfinished cells. All engines give the same results.
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

import torch

from reproduction.grid.cells import Cell
from reproduction.grid.runs import Record, measure

ATTEMPTS = 2  # at a cell whose local worker dies
RAY_RETRIES = 3  # of a cell whose worker or node is lost
_PASSED_VARIABLES = ("EMBENS_DATA", "PYTHONPATH")
# Imported once, in the process that workers are forked from.
_PRELOADED_MODULES = ["reproduction.training", "sklearn.datasets"]


def inline(cells: Sequence[Cell]) -> Generator[tuple[Cell, Record]]:
    """Measure cells in this process, one after another.

    Args:
        cells: The cells.

    Yields:
        Each cell with its outcome.
    """
    for cell in cells:
        yield cell, measure(cell)


def visible_gpus() -> list[str]:
    """Return the names of the GPUs of this process, as ``CUDA_VISIBLE_DEVICES`` spells them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name for name in chosen.split(",") if name]
    return [str(index) for index in range(torch.cuda.device_count())]


def local(
    cells: Sequence[Cell], *, workers: int, gpus: Sequence[str] = ()
) -> Generator[tuple[Cell, Record]]:
    """Measure cells in processes on this machine.

    If a worker dies (out of memory, killed), only its cell is affected: it is tried once more in a
    new worker, then it counts as failed. The pools of ``concurrent.futures`` and
    ``multiprocessing`` would give up all cells, or wait forever. If this process dies, the workers
    end as well.

    Args:
        cells: The cells.
        workers: Number of processes.
        gpus: GPUs that the workers share evenly; each worker sees one of them.

    Yields:
        Each cell with its outcome, as it is measured.
    """
    waiting = deque((cell, 1) for cell in cells)
    free_slots = list(reversed(range(workers)))
    busy: dict[Any, _Worker] = {}
    idle: list[_Worker] = []
    outcomes: list[tuple[Cell, Record]] = []
    try:
        while waiting or busy or outcomes:
            # Keep all workers busy before the caller handles finished cells.
            while waiting and len(busy) < workers:
                worker = idle.pop() if idle else _Worker(free_slots.pop(), gpus)
                cell, attempt = waiting.popleft()
                worker.start(cell, attempt)
                busy[worker.pipe] = worker
            yield from outcomes
            outcomes = []
            if not busy:
                continue
            for pipe in wait(list(busy)):
                worker = busy.pop(pipe)
                try:
                    outcomes.append((worker.cell, worker.pipe.recv()))
                    idle.append(worker)
                except (EOFError, OSError):
                    exit_code = worker.end()
                    free_slots.append(worker.slot)
                    if worker.attempt < ATTEMPTS:
                        waiting.appendleft((worker.cell, worker.attempt + 1))
                    else:
                        outcomes.append((worker.cell, worker.failure(exit_code)))
    finally:
        for worker in (*idle, *busy.values()):
            worker.end()


class _Worker:
    """A process with a pipe that measures one cell at a time.

    Args:
        slot: Number of the worker among those that run at the same time.
        gpus: GPUs of all workers.
    """

    def __init__(self, slot: int, gpus: Sequence[str]) -> None:
        self.slot = slot
        environment = _passed_environment()
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
        if sys.platform == "win32":
            context = multiprocessing.get_context("spawn")
        else:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(_PRELOADED_MODULES)
        self.pipe, worker_pipe = context.Pipe()
        arguments = (worker_pipe, environment)
        self.process = context.Process(target=_work, args=arguments, daemon=True)
        self.process.start()
        worker_pipe.close()

    def start(self, cell: Cell, attempt: int) -> None:
        self.cell = cell
        self.attempt = attempt
        self.started = time.perf_counter()
        # A dead worker is noticed when its pipe is read.
        with contextlib.suppress(OSError):
            self.pipe.send(cell)

    def end(self) -> int | None:
        self.process.kill()
        self.process.join()
        self.pipe.close()
        return self.process.exitcode

    def failure(self, exit_code: int | None) -> Record:
        error = (
            f"the worker died with exit code {exit_code}, {self.attempt} times "
            "(killed, out of memory, or a crash)"
        )
        return {"error": error, "seconds": time.perf_counter() - self.started}


def _passed_environment() -> dict[str, str]:
    return {name: os.environ[name] for name in _PASSED_VARIABLES if name in os.environ}


def _work(pipe: Connection, environment: dict[str, str]) -> None:
    # The fork server may have started before these variables were set.
    os.environ.update(environment)
    # On Ctrl-C the parent decides when workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, OSError):
        while True:
            pipe.send(measure(pipe.recv()))


def _exit_with_parent() -> None:
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
    """Measure cells on a Ray cluster.

    Ray measures a cell again if its worker or node is lost. Outcomes come back to this process, so
    nodes need no shared disk except for the data: ``EMBENS_DATA`` must be valid on every node.

    Args:
        cells: The cells. Each requests its threads as CPUs and, on CUDA, its share of a GPU.
        address: Address of a cluster; None starts one on this machine.
        workers: Number of CPUs of the cluster that is started here.
        gpus_per_cell: Share of a GPU per cell.

    Yields:
        Each cell with its outcome, as it is measured.
    """
    _start_ray(address, workers)
    import ray
    from ray.exceptions import RayError

    waiting = deque(cells)
    running: dict[Any, tuple[Cell, float]] = {}
    remote_measure = ray.remote(max_retries=RAY_RETRIES)(measure)
    try:
        while waiting or running:
            # Submit twice as many cells as CPUs so that no node idles; clusters grow and shrink.
            capacity = max(2, 2 * int(ray.cluster_resources().get("CPU", 1)))
            while waiting and len(running) < capacity:
                cell = waiting.popleft()
                gpus = gpus_per_cell if cell.setting.device.startswith("cuda") else 0
                task = remote_measure.options(num_cpus=cell.setting.threads, num_gpus=gpus)
                running[task.remote(cell)] = (cell, time.perf_counter())
            ready, _ = ray.wait(list(running), timeout=0.5)
            for reference in ready:
                cell, started = running.pop(reference)
                try:
                    yield cell, ray.get(reference)
                except RayError as error:
                    text = f"Ray gave up after {RAY_RETRIES + 1} attempts: {error}"
                    yield cell, {"error": text, "seconds": time.perf_counter() - started}
    finally:
        for reference in running:
            ray.cancel(reference, force=True)
        ray.shutdown()


def _start_ray(address: str | None, workers: int | None) -> None:
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    options: dict[str, Any] = {"address": address}
    if address is None:
        options = {"address": "local", "num_cpus": workers, "include_dashboard": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray

        ray.init(
            runtime_env={"env_vars": {**_passed_environment(), "OMP_NUM_THREADS": "1"}},
            log_to_driver=False,
            logging_level=logging.ERROR,
            ignore_reinit_error=True,
            **options,
        )
