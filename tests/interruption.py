"""Kill a process at its n-th write, rename or removal, for every n in turn, or at any moment.

A worker process imports all modules, runs the work once, and forks a child per kill. In the child,
every function that changes the disk is counted, and the n-th call ends the process (:mod:`disk`).
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import disk

SCRIPT = "import sys, interruption; interruption.work(*sys.argv[1:])"
KILLED = (9, -9)
"""Exit codes of a child that was killed: by itself, or by a signal."""

Work = Callable[[Path], object]


def work(folder: str, plans: str) -> None:
    """Kill functions of :mod:`repeatable_work` and repeat them; print the number of kills of each.

    Args:
        folder: for all files.
        plans: JSON: for each function a pair of the step between calls at which to kill (0: none),
            and the number of moments, spread evenly over its run time, at which to kill.
    """
    import repeatable_work

    counts = {}
    for name, (step, moments) in json.loads(plans).items():
        place = Path(folder, name)
        place.mkdir()
        counts[name] = kill_often(repeatable_work.WORKS[name], place, step, moments)
    print(json.dumps(counts))


def kill_often(function: Work, folder: Path, step: int, moments: int) -> int:
    """Return the number of kills; raise AssertionError if a repetition ends differently."""
    function(Path(tempfile.mkdtemp(dir=folder)))  # imports modules that every child would import
    start = time.monotonic()
    reference = outcome(function, folder / "whole")
    seconds = time.monotonic() - start
    assert reference[0] == 0, reference
    kills = 0
    for number in range(moments):
        delay = seconds * (number + 0.5) / moments
        kills += kill_and_repeat(function, folder, f"moment{number}", reference, delay=delay)
    if step == 0:
        return kills
    call = step
    while kill_and_repeat(function, folder, f"call{call}", reference, last_call=call):
        kills += 1
        call += step
    return kills


def kill_and_repeat(
    function: Work, folder: Path, name: str, reference: tuple[int, dict], **plan: float
) -> bool:
    """Return whether the function was killed; it may have ended before."""
    code, _ = outcome(function, folder / name, **plan)
    assert code == 0 or code in KILLED, (plan, code)
    repeated = outcome(function, folder / name)
    assert repeated == reference, f"killed at {plan}: {repeated} is not {reference}"
    for path in folder.glob(f"*{name}"):
        shutil.rmtree(path)
    return code in KILLED


def outcome(
    function: Work, folder: Path, last_call: int = 0, delay: float = 0.0
) -> tuple[int, dict]:
    """Run a function in a child; return its exit code and the checksums of its files.

    Args:
        function: called with the folder.
        folder: created if needed.
        last_call: number of the disk call at which the child is killed; 0: none.
        delay: seconds after which the child is killed; 0: never.
    """
    folder.mkdir(exist_ok=True)
    process = os.fork()
    if process == 0:
        run_child(function, folder, last_call)
    if delay > 0:
        time.sleep(delay)
        os.kill(process, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if code in KILLED:
        return code, {}
    checksums = {}
    for path in folder.rglob("*"):
        if path.is_file():
            checksums[str(path.relative_to(folder))] = hashlib.md5(path.read_bytes()).hexdigest()
    return code, checksums


def run_child(function: Work, folder: Path, last_call: int) -> None:
    """Run a function and end the process."""
    try:
        signal.alarm(300)
        sys.stdout = io.StringIO()
        # A run that starts again instead of continuing would end with the same files.
        warnings.filterwarnings("error", message="checkpoint refused")
        if last_call > 0:
            disk.install(disk.Killer(last_call))
        function(folder)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def count_kills(folder: Path, **plans: tuple[int, int]) -> dict[str, int]:
    """Run :func:`work` in a separate process; return the number of kills of each function."""
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", SCRIPT, str(folder), json.dumps(plans)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])
