"""Atomic writes, locks, checksums; work that is killed at any moment."""

import json
import multiprocessing
import os
import stat
import threading
from collections import Counter

import killing
import pytest
import torch
from killed import FITS

from embens.files import (
    Format,
    Refused,
    check_header,
    checksum,
    locked,
    pack,
    read_tensors,
    read_tree,
    refusing,
    remove,
    seal,
    unpack,
    unseal,
    write_atomically,
    write_tensors,
    write_tree,
)

KIND = Format("numbers", 1)
posix_only = pytest.mark.skipif(os.name != "posix", reason="needs posix permissions and links")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file.txt"


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


def in_another_process(function, *arguments):
    """Run a function in another process; return its process number and its exit code."""
    process = multiprocessing.get_context("forkserver").Process(target=function, args=arguments)
    process.start()
    process.join()
    return process.pid, process.exitcode


def write_and_die(path):
    write_atomically(path, lambda temporary: (temporary.write_text("half"), os._exit(1)))


def lock_and_die(path):
    try:
        with locked(path, "this"):
            os._exit(1)
    except BlockingIOError:
        os._exit(7)


class TestLeftovers:
    def test_of_a_killed_writer_are_removed_by_the_next_one(self, path):
        in_another_process(write_and_die, path)
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

    def test_files_and_folders_are_removed_if_they_exist(self, path):
        remove(path)
        path.write_text("text")
        remove(path)
        path.mkdir()
        (path / "within").write_text("text")
        remove(path)
        assert names(path.parent) == set()


class TestLocks:
    def test_have_one_owner_and_name_it(self, path):
        with locked(path, "this"):
            message = f"^this is in use by process {os.getpid()} on"
            with pytest.raises(BlockingIOError, match=message), locked(path, "this"):
                pass
            assert in_another_process(lock_and_die, path)[1] == 7
        assert not path.exists()

    def test_of_a_dead_process_are_free(self, path):
        process, code = in_another_process(lock_and_die, path)
        assert code == 1
        assert path.read_text().startswith(f"process {process} on")
        with locked(path, "this"):
            assert path.read_text().startswith(f"process {os.getpid()} on")


class TestTensors:
    def test_of_every_shape_and_type_are_restored(self, path):
        matrix = torch.arange(12.0).view(3, 4)
        tensors = {
            "view": matrix[:, 1],
            "transposed": matrix.T,
            "one": torch.randn(33, 3)[:, 0][:1],
            "tied": matrix,
            "empty": torch.empty(0, 2),
            "scalar": torch.tensor(3),
        }
        for dtype in (torch.bool, torch.bfloat16, torch.complex64, torch.int8):
            tensors[str(dtype)] = torch.ones(3, dtype=dtype)
        write_tensors(path, KIND, {"note": [1, None, "é"]}, tensors)
        header, restored = read_tensors(path, KIND)
        assert header == {"format": "numbers", "version": 1, "note": [1, None, "é"]}
        assert restored.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert restored[name].dtype == tensor.dtype
            assert torch.equal(restored[name], tensor), name

    def test_on_the_meta_device_and_without_a_folder_raise(self, path):
        with pytest.raises(ValueError, match="'x' has no values to write: it is on the meta dev"):
            write_tensors(path, KIND, {}, {"x": torch.zeros(2, device="meta")})
        with pytest.raises(FileNotFoundError, match=r"the folder .* does not exist"):
            write_tensors(path / "none" / "file", KIND, {}, {})
        with pytest.raises(FileNotFoundError, match="there is no file"):
            read_tensors(path, KIND)

    @pytest.mark.parametrize(
        ("header", "message"),
        [
            ([], "x has no embens header; expected an 'numbers' file"),
            ({"format": "letters"}, "x is an 'letters' file; expected an 'numbers' file"),
            ({"format": "numbers", "version": 2}, "version 2, this embens reads 1; use a newer"),
            ({"format": "numbers", "version": 0}, "version 0, this embens reads 1; read it with"),
            ({"format": "numbers", "version": "?"}, "read it with the embens that wrote it"),
        ],
    )
    def test_of_another_kind_or_version_are_refused(self, header, message):
        with pytest.raises(Refused, match=message):
            check_header("x", header, KIND)

    def test_with_a_changed_value_are_refused(self):
        arrays = {"x": torch.arange(3)}
        sealed = seal({"a": 1}, arrays)
        assert unseal("x", sealed, arrays) == {"a": 1}
        for record, values in (({**sealed, "a": 2}, arrays), (sealed, {"x": torch.ones(3)})):
            with pytest.raises(Refused, match="x is damaged: its content has another checksum"):
                unseal("x", record, values)

    def test_have_the_checksum_of_earlier_versions(self):
        arrays = {"b": torch.arange(3), "a": torch.ones(2, 2, dtype=torch.bfloat16)}
        assert checksum("text", arrays) == (
            "2f5f41d844da323c199e27031ef5cb28d5a90c493a772f5523d7db85daa83908"
        )

    def test_errors_of_the_system_are_not_refusals(self, path):
        with pytest.raises(FileNotFoundError), refusing(path):
            path.read_text()
        with (
            pytest.raises(Refused, match=r"file.txt can't be read: KeyError\('a'\)"),
            refusing(path),
        ):
            raise KeyError("a")


class TestTrees:
    TREE = {  # noqa: RUF012
        "a": [1, 2.5, "b", None, True, float("inf"), 0.1 + 0.2],
        3: (torch.arange(3), {"x": torch.zeros(2, dtype=torch.bfloat16)}),
        "c": Counter({1: 2}),
        "d": [],
    }

    def test_are_packed_without_loss(self):
        tensors: dict[str, torch.Tensor] = {}
        packed = json.loads(json.dumps(pack(self.TREE, tensors)))
        assert repr(unpack(packed, tensors)) == repr(self.TREE)

    def test_are_restored_from_files(self, path):
        write_tree(path, KIND, self.TREE)
        assert repr(read_tree(path, KIND)) == repr(self.TREE)

    def test_with_other_objects_raise(self):
        with pytest.raises(TypeError, match="got function"):
            pack({"f": pack}, {})
        with pytest.raises(ValueError, match="unknown kind of container 'dtype'"):
            unpack({"dtype": "save"}, {})


# The number of writes, renames and removals of each work. It is killed once at each of them, and at
# 40 moments spread evenly over its run time.
KILLS = {"kernel": 300, "fit": 155, "grid": 30, "pretrained": 30, "estimator": 15}
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")


@forks
def test_work_that_is_killed_and_repeated_ends_with_the_same_files(tmp_path):
    plans = {"kernel": (120, 0), "pretrained": (12, 0), "average": (16, 0)}
    kills = killing.kills(tmp_path, **plans)
    assert min(kills.values()) >= 1
    assert sum(kills.values()) >= 6


@pytest.mark.long
@forks
@pytest.mark.parametrize("work", KILLS)
def test_work_that_is_killed_at_every_write_ends_with_the_same_files(work, tmp_path):
    assert killing.kills(tmp_path, **{work: (1, 40)})[work] >= KILLS[work]


@pytest.mark.long
@forks
@pytest.mark.parametrize("work", FITS)
def test_training_of_every_kind_that_is_killed_ends_with_the_same_bits(work, tmp_path):
    assert killing.kills(tmp_path, **{work: (4, 6)})[work] >= 8  # a loader has few checkpoints
