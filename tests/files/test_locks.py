"""Locks between processes."""

import os

import pytest
from forkserver import call_in_process

from embens.files import (
    locked,
)


def lock_and_die(path):
    try:
        with locked(path, "this"):
            os._exit(1)
    except BlockingIOError:
        os._exit(7)


class TestLocks:
    def test_have_one_owner_and_name_it(self, path):
        with locked(path, "this"):
            message = f"^this is in use by process {os.getpid()} on"
            with pytest.raises(BlockingIOError, match=message), locked(path, "this"):
                pass
            _, exit_code = call_in_process(lock_and_die, path)
            assert exit_code == 7
        assert not path.exists()

    def test_of_a_dead_process_are_free(self, path):
        process, code = call_in_process(lock_and_die, path)
        assert code == 1
        assert path.read_text().startswith(f"process {process} on")
        with locked(path, "this"):
            assert path.read_text().startswith(f"process {os.getpid()} on")

    def test_do_not_follow_links(self, path):
        target = path.with_name("target")
        target.write_text("process of the user")
        path.symlink_to(target)

        with pytest.raises(FileExistsError, match="not a lock file"), locked(path, "this"):
            pass
        assert target.read_text() == "process of the user"
