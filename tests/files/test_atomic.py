"""Atomic writes, leftovers of killed writers, and work that is killed at any moment."""

import errno
import os
import stat
import threading

import disk
import interruption
import pytest
from forkserver import call_in_process
from repeatable_work import FITS

from embens.files import (
    Format,
    write_atomically,
    write_tensors,
)

KIND = Format("numbers", 1)
posix_only = pytest.mark.skipif(os.name != "posix", reason="needs posix permissions and links")


def names(folder):
    return {path.name for path in folder.iterdir()}


class TestWriteAtomically:
    @pytest.mark.parametrize(
        "content", ["né", "né".encode(), lambda path: path.write_bytes("né".encode())]
    )
    def test_writes_and_replaces_text_bytes_and_the_files_of_functions(self, path, content):
        for _ in range(2):
            write_atomically(str(path), content)
            assert path.read_bytes() == "né".encode()
        assert names(path.parent) == {"file.txt"}

    @pytest.mark.parametrize("exists", [True, False])
    @pytest.mark.parametrize("step", ["write", "fsync", "replace"])
    def test_leaves_the_old_file_and_nothing_else_after_a_failure(
        self, path, monkeypatch, step, exists
    ):
        if exists:
            path.write_text("old")

        def fail(*_):
            raise OSError("disk full")

        def write_half(temporary):
            temporary.write_text("half")
            fail()

        content = "new"
        if step == "write":
            content = write_half
        else:
            monkeypatch.setattr(os, step, fail)
        with pytest.raises(OSError, match="disk full"):
            write_atomically(path, content)
        contents = {p.name: p.read_text() for p in path.parent.iterdir()}
        assert contents == ({"file.txt": "old"} if exists else {})

    @pytest.mark.parametrize("step", ["replace", "write"])
    def test_names_the_file_of_the_user_in_errors_of_the_system(self, path, monkeypatch, step):
        def refuse(first, second=None):
            raise PermissionError(errno.EACCES, "Permission denied", str(first), None, second)

        content = "new"
        if step == "replace":
            monkeypatch.setattr(os, step, refuse)
        else:
            content = refuse
        with pytest.raises(PermissionError) as caught:
            write_atomically(path, content)
        assert str(caught.value) == f"[Errno {errno.EACCES}] Permission denied: {str(path)!r}"

    def test_leaves_nothing_behind_after_an_interrupt(self, path):
        def interrupt(_):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            write_atomically(path, interrupt)
        assert names(path.parent) == set()

    def test_gives_a_new_file_the_usual_permissions(self, path):
        ordinary = path.with_name("ordinary")
        ordinary.write_text("")
        write_atomically(path, "new")
        assert path.stat().st_mode == ordinary.stat().st_mode

    @posix_only
    def test_keeps_the_permissions_of_the_old_file(self, path):
        path.write_text("old")
        path.chmod(0o640)
        write_atomically(path, "new")
        assert stat.S_IMODE(path.stat().st_mode) == 0o640

    @posix_only
    def test_keeps_the_permissions_if_a_function_replaces_the_temporary_file(self, path):
        def replace(temporary):
            other = path.with_name("other")
            other.write_text("new")
            other.chmod(0o600)
            os.replace(other, temporary)

        path.write_text("old")
        path.chmod(0o644)
        write_atomically(path, replace)
        assert path.read_text() == "new"
        assert stat.S_IMODE(path.stat().st_mode) == 0o644

    @posix_only
    @pytest.mark.parametrize("exists", [True, False])
    def test_replaces_the_target_of_a_link(self, tmp_path, exists):
        target, link = tmp_path / "far" / "target", tmp_path / "link"
        target.parent.mkdir()
        if exists:
            target.write_text("old")
        link.symlink_to(target)
        write_atomically(link, "new")

        assert link.is_symlink()
        assert target.read_text() == "new"
        assert names(target.parent) == {"target"}

    def test_never_shows_a_reader_a_partial_file(self, path):
        pages = [letter * 100_000 for letter in "ab"]
        write_atomically(path, pages[0])

        def write_often():
            for page in pages * 10:
                write_atomically(path, page)

        writer = threading.Thread(target=write_often)
        writer.start()
        while writer.is_alive():
            assert path.read_text() in pages
        writer.join()

    @pytest.mark.parametrize("name", ["x" * 255, "é" * 127])
    def test_writes_files_with_the_longest_names(self, tmp_path, name):
        write_atomically(tmp_path / name, "old")
        _, exit_code = call_in_process(disk.die_while_writing, tmp_path / name)
        assert exit_code == 1
        assert len(names(tmp_path)) == 2
        write_atomically(tmp_path / name, "new")
        assert names(tmp_path) == {name}
        assert (tmp_path / name).read_text() == "new"

    def test_raises_if_the_folder_is_missing(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            write_atomically(tmp_path / "none" / "file", "new")

    def test_creates_a_folder_at_once(self, tmp_path):
        def fill(folder):
            (folder / "within").mkdir(parents=True)
            (folder / "within" / "file").write_text("text")

        write_atomically(tmp_path / "folder", fill)
        assert [p.name for p in tmp_path.rglob("*")] == ["folder", "within", "file"]

    @pytest.mark.parametrize("content", ["new", lambda path: path.mkdir()])
    @pytest.mark.parametrize("filled", [True, False])
    def test_never_replaces_a_folder(self, tmp_path, content, filled):
        folder = tmp_path / "folder"
        folder.mkdir()
        if filled:
            (folder / "precious").write_text("text")

        with pytest.raises(IsADirectoryError, match=r"A folder is never replaced.*folder'"):
            write_atomically(folder, content)
        with pytest.raises(IsADirectoryError):
            write_tensors(folder, KIND, {}, {})
        assert names(tmp_path) == {"folder"}
        assert names(folder) == ({"precious"} if filled else set())

    def test_does_not_replace_a_file_by_a_folder(self, path):
        path.write_text("old")
        with pytest.raises(OSError, match=r"file\.txt"):
            write_atomically(path, lambda temporary: temporary.mkdir())
        assert path.read_text() == "old"
        assert names(path.parent) == {"file.txt"}


class TestLeftovers:
    def test_of_a_killed_writer_are_removed_by_the_next_one(self, path):
        call_in_process(disk.die_while_writing, path)
        assert len(names(path.parent)) == 1
        # Temporary files of another file and of another machine, and a file of the user.
        others = {f".other.{'0' * 8}-1-{'0' * 8}", f".file.txt.{'0' * 8}-1-{'0' * 8}", ".file.txt"}
        for name in others:
            path.with_name(name).write_text("keep")
        write_atomically(path, "new")
        assert names(path.parent) == {"file.txt", *others}

    def test_are_removed_after_a_day_on_any_machine(self, path):
        leftover = path.with_name(f".file.txt.{'0' * 8}-1-{'0' * 8}")
        leftover.write_text("half")
        os.utime(leftover, (0, 0))
        write_atomically(path, "new")
        assert names(path.parent) == {"file.txt"}


# The number of writes, renames and removals of each work. It is killed once at each of them, and at
# 40 moments spread evenly over its run time.
KILLS = {
    "kernel": 300,
    "fit": 155,
    "comparison": 80,
    "history": 80,
    "grid": 30,
    "pretrained": 30,
    "estimator": 15,
}
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")


@forks
def test_work_that_is_killed_and_repeated_ends_with_the_same_files(tmp_path):
    plans = {"kernel": (120, 0), "pretrained": (12, 0), "average": (16, 0)}
    counts = interruption.count_kills(tmp_path, **plans)
    assert min(counts.values()) >= 1
    assert sum(counts.values()) >= 6


@pytest.mark.long
@forks
@pytest.mark.parametrize("work", KILLS)
def test_work_that_is_killed_at_every_write_ends_with_the_same_files(work, tmp_path):
    counts = interruption.count_kills(tmp_path, **{work: (1, 40)})
    assert counts[work] >= KILLS[work]


@pytest.mark.long
@forks
@pytest.mark.parametrize("work", FITS)
def test_training_of_every_kind_that_is_killed_ends_with_the_same_bits(work, tmp_path):
    assert (
        interruption.count_kills(tmp_path, **{work: (4, 6)})[work] >= 8
    )  # a loader has few checkpoints
