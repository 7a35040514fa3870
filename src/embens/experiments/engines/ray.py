"""A Ray cluster: this machine's cores by default, or a cluster by its address.

A job asks for the CPUs and the GPU of its cell. Ray runs it again where its worker or its node
is lost; an error inside a measurement is a result like any other and is not tried again. Results
come back to this process, which writes them, so that nodes need no common disk, save for the data:
``EMBENS_DATA`` is passed on and must mean a folder on every node.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from typing import Any

from embens.experiments.job import Done, Job, perform

RETRIES = 3
_ENVIRONMENT = ("EMBENS_DATA", "PYTHONPATH")


class Ray:
    """Jobs on a Ray cluster.

    Args:
        address: of a cluster, as for ``ray.init``; None: one that is started here.
        workers: how many CPUs one that is started here offers; None: all.
        gpus_per_cell: the part of a GPU that a cell on a GPU takes.
    """

    def __init__(
        self, address: str | None = None, workers: int | None = None, gpus_per_cell: float = 1.0
    ):
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import ray

            self.ray = ray
            passed_on = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
            if not ray.is_initialized():
                local = {} if address else {"num_cpus": workers, "include_dashboard": False}
                ray.init(
                    address=address or "local",
                    runtime_env={"env_vars": {**passed_on, "OMP_NUM_THREADS": "1"}},
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    **local,
                )
        self.gpus_per_cell = gpus_per_cell
        self._remote = ray.remote(max_retries=RETRIES)(perform)
        self._flying: dict[Any, tuple[Job, float]] = {}

    @property
    def slots(self) -> int:
        """Twice the CPUs there are now, so that no node waits; clusters grow and shrink."""
        return max(2, 2 * int(self.ray.cluster_resources().get("CPU", 1)))

    def submit(self, job: Job) -> None:
        resources = {"num_cpus": job.threads, "num_gpus": job.gpus * self.gpus_per_cell}
        self._flying[self._remote.options(**resources).remote(job)] = (job, time.perf_counter())

    def wait(self, seconds: float) -> list[Done]:
        from ray.exceptions import RayError

        ready, _ = self.ray.wait(list(self._flying), num_returns=1, timeout=seconds)
        if ready:  # and whatever else is there by now
            ready, _ = self.ray.wait(list(self._flying), num_returns=len(self._flying), timeout=0)
        done = []
        for reference in ready:
            job, started = self._flying.pop(reference)
            try:
                done.append(self.ray.get(reference))
            except RayError as error:
                text = f"Ray gave up after {RETRIES + 1} attempts: {error}"
                done.append(Done(job.key, None, text, time.perf_counter() - started))
        return done

    def close(self) -> None:
        """Cancel what runs, and leave the cluster, or end the one that was started here."""
        for reference in self._flying:
            self.ray.cancel(reference, force=True)
        self._flying.clear()
        self.ray.shutdown()
