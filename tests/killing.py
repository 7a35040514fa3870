"""Kill a process at its n-th write, rename or removal, for every n in turn, or at any moment.

A worker process imports what is needed, works once, and forks a child for each run.
In the child every function that changes a disk counts, and the n-th call ends the process: a write
after half its bytes, everything else before it happens.
"""

from __future__ import annotations

import builtins
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
from collections.abc import Callable
from pathlib import Path

SCRIPT = "import sys, killing; killing.work(*sys.argv[1:])"
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


def work(folder: str, plans: str) -> None:
    """Print how often each function was killed, and ended the same when it was run again.

    A plan is the name of a function of :mod:`killed`, and how: at every so many calls that change
    the disk, and at so many moments spread evenly over its time.
    """
    import killed

    counts = {}
    for name, (step, moments) in json.loads(plans).items():
        place = Path(folder, name)
        place.mkdir()
        counts[name] = kill_often(getattr(killed, name), place, step, moments)
    print(json.dumps(counts))


def kill_often(function: Callable[[Path], object], folder: Path, step: int, moments: int) -> int:
    function(Path(tempfile.mkdtemp(dir=folder)))  # imports what every child would
    begun = time.monotonic()
    reference, kills = outcome(function, folder / "whole"), 0
    seconds = time.monotonic() - begun
    assert reference[0] == 0, reference
    plans = [{"last": last} for last in range(step, 10**6 if step else 0, step or 1)]
    moment = [{"after": seconds * (k + 0.5) / moments} for k in range(moments)]
    for number, plan in enumerate([*moment, *plans]):
        place = folder / str(number)
        code, _ = outcome(function, place, **plan)
        if code == 0 and "last" in plan:
            break  # it was done before
        assert code in (0, 9, -9), (plan, code)
        kills += code != 0
        again = outcome(function, place)
        assert again == reference, f"killed at {plan}: {again} is not {reference}"
        for path in folder.glob(f"*{number}"):
            shutil.rmtree(path)
    return kills


def outcome(
    function: Callable[[Path], object], folder: Path, last: int = 0, after: float = 0.0
) -> tuple[int, dict]:
    """Return the exit code of a child, and what is in its folder afterwards if it was not killed.

    It ends at the ``last`` call that changes the disk, or ``after`` so many seconds.
    """
    folder.mkdir(exist_ok=True)
    process = os.fork()
    if process == 0:
        try:
            signal.alarm(300)
            sys.stdout = io.StringIO()
            if last:
                Deadly(last)
            function(folder)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if after:
        time.sleep(after)
        os.kill(process, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if code in (9, -9):
        return code, {}
    files = [path for path in folder.rglob("*") if path.is_file()]
    sums = {str(p.relative_to(folder)): hashlib.md5(p.read_bytes()).hexdigest() for p in files}
    return code, sums


def kills(folder: Path, **plans: tuple[int, int]) -> dict[str, int]:
    """Return how often functions were killed in a process of their own; see :func:`work`."""
    paths = [
        str(Path(__file__).parent),
        str(Path(__file__).parents[1]),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", SCRIPT, str(folder), json.dumps(plans)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
