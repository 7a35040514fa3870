"""Kill a process at its n-th write, rename or removal; for every n in turn.

A worker process imports what is needed and forks a child for each run, before anything computes.
In the child every function that changes a disk counts, and the n-th call ends the process: a write
after half its bytes, everything else before it happens.
"""

from __future__ import annotations

import builtins
import hashlib
import io
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

SCRIPT = "import sys, killing, {module}; killing.work({module}.{function}, *sys.argv[1:])"
FUNCTIONS = "replace rename unlink remove rmdir mkdir fsync truncate chmod".split()


class Deadly:
    """Counts what changes the disk; ends the process at the call with a number."""

    def __init__(self, last: int):
        self.left, self.calls = last, 0
        for name in FUNCTIONS:
            setattr(os, name, self.counted(getattr(os, name)))
        whole = io.open

        def opened(file, mode="r", *arguments, **options):
            found = whole(file, mode, *arguments, **options)
            return _Wrapper(found, self) if set(mode) & set("wax+") else found

        io.open = builtins.open = opened

    def counted(self, function: Callable) -> Callable:
        def call(*arguments, **options):
            self.tick()
            return function(*arguments, **options)

        return call

    def tick(self, before: Callable = lambda: None) -> None:
        self.calls += 1
        if self.calls == self.left:
            before()
            os._exit(9)


class _Wrapper:
    """A file whose writes count."""

    def __init__(self, file, deadly: Deadly):
        self._file, self._deadly = file, deadly

    def write(self, content):
        def half():
            self._file.write(content[: len(content) // 2])
            self._file.flush()

        self._deadly.tick(half)
        return self._file.write(content)

    def __enter__(self):
        self._file.__enter__()
        return self

    def __exit__(self, *error):
        return self._file.__exit__(*error)

    def __iter__(self):
        return iter(self._file)

    def __getattr__(self, name):
        return getattr(self._file, name)


def work(function: Callable[[Path], object], folder: str, step: str, most: str) -> None:
    """Run a function in a new folder: whole, then killed at each step and run again."""
    if getattr(function, "warm", False):
        function(Path(tempfile.mkdtemp(dir=folder)))  # imports what every child would
    reference, kills, last = outcome(function, Path(folder, "whole"), 0), 0, 0
    assert reference[0] == 0, reference
    while kills < int(most):
        last += int(step)
        place = Path(folder, str(last))
        code, _ = outcome(function, place, last)
        if code == 0:
            break  # it was done before
        assert code == 9, (last, code)
        kills += 1
        again = outcome(function, place, 0)
        assert again == reference, f"killed at call {last}: {again} is not {reference}"
    print(kills)


def outcome(function: Callable[[Path], object], folder: Path, last: int) -> tuple[int, dict]:
    """Return the exit code of a child, and what is in its folder afterwards."""
    folder.mkdir(exist_ok=True)
    process = os.fork()
    if process == 0:
        try:
            signal.alarm(120)
            if last:
                Deadly(last)
            function(folder)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if last and code:
        return code, {}
    files = [path for path in folder.rglob("*") if path.is_file()]
    sums = {str(p.relative_to(folder)): hashlib.md5(p.read_bytes()).hexdigest() for p in files}
    return code, sums


def kills(module: str, function: str, folder: Path, step: int, most: int = 10**6) -> int:
    """Return how many times a function of a module of tests was killed and ended the same."""
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    script = SCRIPT.format(module=module, function=function)
    command = [sys.executable, "-c", script, str(folder), str(step), str(most)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return int(done.stdout)
