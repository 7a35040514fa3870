"""Count the calls that change the disk; let one of them end the process, or fill the disk.

A write that ends the process has written half of its bytes; any other call has no effect. A disk
that is full stays full: all later writes fail too, but files can still be removed.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

WRITING = ("replace", "rename", "mkdir", "fsync", "truncate")
NEVER = 10**9
"""A number of calls that is never reached, to count the calls."""
REMOVING = ("unlink", "remove", "rmdir", "chmod")


class Counter:
    """Count the calls that change the disk."""

    def __init__(self):
        self.calls = 0

    def before(self, name: str, write_half: Callable = lambda: None) -> None:
        """Count a call; subclasses may raise."""
        self.calls += 1


class Killer(Counter):
    """End the process at the call with a given number."""

    def __init__(self, last_call: int):
        super().__init__()
        self.last_call = last_call

    def before(self, name: str, write_half: Callable = lambda: None) -> None:
        super().before(name)
        if self.calls == self.last_call:
            write_half()
            os._exit(9)


class FullDisk(Counter):
    """Raise at all writes from a given number on."""

    def __init__(self, first_failure: int):
        super().__init__()
        self.first_failure = first_failure

    def before(self, name: str, write_half: Callable = lambda: None) -> None:
        if name in REMOVING:
            return
        super().before(name)
        if self.calls >= self.first_failure:
            write_half()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class CountedFile:
    """A file whose writes are counted."""

    def __init__(self, file, counter: Counter):
        self._file = file
        self._counter = counter

    def write(self, content):
        def write_half():
            self._file.write(content[: len(content) // 2])
            self._file.flush()

        self._counter.before("write", write_half)
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


def install(counter: Counter) -> Callable[[], None]:
    """Let a counter see all calls that change the disk; return a function that undoes it."""
    originals = {name: getattr(os, name) for name in (*WRITING, *REMOVING)}
    original_open = io.open

    def counted(name: str, function: Callable) -> Callable:
        def call(*arguments, **options):
            counter.before(name)
            return function(*arguments, **options)

        return call

    def counting_open(file, mode="r", *arguments, **options):
        opened = original_open(file, mode, *arguments, **options)
        if set(mode) & set("wax+"):
            return CountedFile(opened, counter)
        return opened

    def undo() -> None:
        for name, function in originals.items():
            setattr(os, name, function)
        io.open = builtins.open = original_open

    for name, function in originals.items():
        setattr(os, name, counted(name, function))
    io.open = builtins.open = counting_open
    return undo


@contextmanager
def watched(counter: Counter) -> Iterator[Counter]:
    """Let a counter see all calls within a block."""
    undo = install(counter)
    try:
        yield counter
    finally:
        undo()


def die_while_writing(path: Path) -> None:
    """End the process when half of a file is written."""
    from embens.files import write_atomically

    def write_half(temporary: Path) -> None:
        temporary.write_text("half")
        os._exit(1)

    write_atomically(path, write_half)
