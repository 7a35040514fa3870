"""Call functions in processes of their own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable

PRELOADED_MODULES = ["embens.files", "pytest", "reproduction.training", "sklearn.datasets"]
"""Modules that the server imports once. Engines of the experiments share the server."""


def call_in_process(function: Callable, *arguments: object) -> tuple[int | None, int | None]:
    """Call a function in a new process; return the number of the process and its exit code."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED_MODULES)
    process = context.Process(target=function, args=arguments)
    process.start()
    process.join()
    return process.pid, process.exitcode
