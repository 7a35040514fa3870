import json
import multiprocessing
import os
import stat
import threading
from collections import Counter

import killing
import mutated
import pytest
import torch

from embens.files import (
    Format,
    locked,
    pack,
    read_tensors,
    unpack,
    write_atomically,
    write_tensors,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file.txt"


@pytest.mark.parametrize(
    "content", ["né", "né".encode(), lambda path: path.write_bytes("né".encode())]
)
def test_text_bytes_and_what_a_function_writes_arrive_whole(path, content):
    for _ in range(2):
        write_atomically(str(path), content)
        assert path.read_bytes() == "né".encode()
    assert [p.name for p in path.parent.iterdir()] == ["file.txt"]


def fail(path):
    path.write_text("half")
    raise OSError("disk full")


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
def test_a_failure_leaves_the_old_file_and_nothing_else(path, monkeypatch, step, there):
    if there:
        path.write_text("old")

    def refuse(*_):
        raise OSError("disk full")

    if step != "write":
        monkeypatch.setattr(os, step, refuse)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fail if step == "write" else "new")
    assert {p.name: p.read_text() for p in path.parent.iterdir()} == (
        {"file.txt": "old"} if there else {}
    )


def test_an_interrupt_leaves_nothing_behind(path):
    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, interrupt)
    assert list(path.parent.iterdir()) == []


def test_a_new_file_has_the_permissions_of_any_new_file(path):
    ordinary = path.with_name("ordinary")
    ordinary.write_text("")
    write_atomically(path, "new")
    assert path.stat().st_mode == ordinary.stat().st_mode


@pytest.mark.skipif(os.name != "posix", reason="permissions are those of posix")
def test_a_replaced_file_keeps_its_permissions(path):
    path.write_text("old")
    path.chmod(0o640)
    write_atomically(path, "new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.skipif(os.name != "posix", reason="links need rights elsewhere")
@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path, there):
    (tmp_path / "far").mkdir()
    target, link = tmp_path / "far" / "target", tmp_path / "link"
    if there:
        target.write_text("old")
    link.symlink_to(target)
    write_atomically(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert [p.name for p in target.parent.iterdir()] == ["target"]


def test_a_reader_never_sees_half_a_file(path):
    pages = [letter * 100_000 for letter in "ab"]
    write_atomically(path, pages[0])
    writer = threading.Thread(target=lambda: [write_atomically(path, p) for p in pages * 10])
    writer.start()
    while writer.is_alive():
        assert path.read_text() in pages
    writer.join()


def test_a_missing_folder_is_said_to_be_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "none" / "file", "new")


@pytest.mark.skipif(os.name != "posix", reason="permissions are those of posix")
def test_a_function_that_replaces_the_file_does_not_change_its_permissions(path):
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


def test_tensors_of_every_shape_and_type_come_back(tmp_path):
    whole, kind = torch.arange(12.0).view(3, 4), Format("numbers", 1)
    tensors = {"view": whole[:, 1], "turned": whole.T, "one": torch.randn(33, 3)[:, 0][:1]}
    tensors |= {"tied": whole, "none": torch.empty(0, 2), "scalar": torch.tensor(3)}
    types = (torch.bool, torch.bfloat16, torch.complex64, torch.int8)
    tensors |= {str(t): torch.ones(3, dtype=t) for t in types}
    write_tensors(tmp_path / "file", kind, {"note": [1, None, "é"]}, tensors)
    header, found = read_tensors(tmp_path / "file", kind)
    assert header == {"format": "numbers", "version": 1, "note": [1, None, "é"]}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def in_another_process(function, *arguments):
    """Return the process that a function ran in, and its exit code."""
    process = multiprocessing.get_context("forkserver").Process(target=function, args=arguments)
    process.start()
    process.join()
    return process.pid, process.exitcode


def die_writing(path):
    write_atomically(path, lambda temporary: (temporary.write_text("half"), os._exit(1)))


def die_with_the_lock(path):
    try:
        with locked(path, "this"):
            os._exit(1)
    except BlockingIOError:
        os._exit(7)


def test_what_a_killed_writer_left_is_removed_by_the_next_and_nothing_else_is(path):
    in_another_process(die_writing, path)
    assert len(list(path.parent.iterdir())) == 1
    others = {f".other.{'0' * 8}-1-{'0' * 8}", f".file.txt.{'0' * 8}-1-{'0' * 8}", ".file.txt"}
    for name in others:
        path.with_name(name).write_text("of another file, another machine, or the user's")
    write_atomically(path, "new")
    assert {p.name for p in path.parent.iterdir()} == {"file.txt", *others}


def test_a_folder_is_replaced_as_a_whole(tmp_path):
    def make(text):
        def fill(folder):
            (folder / "within").mkdir(parents=True)
            (folder / "within" / text).write_text(text)

        return fill

    for text in "ab":
        write_atomically(tmp_path / "folder", make(text))
    assert [p.name for p in tmp_path.rglob("*")] == ["folder", "within", "b"]


def test_a_lock_has_one_owner_and_names_it(path):
    with locked(path, "this"):
        whose = f"^this is in use by process {os.getpid()} on"
        with pytest.raises(BlockingIOError, match=whose), locked(path, "this"):
            pass
        assert in_another_process(die_with_the_lock, path)[1] == 7
    assert not path.exists()


def test_the_lock_of_a_process_that_died_is_free(path):
    process, code = in_another_process(die_with_the_lock, path)
    assert code == 1
    assert path.read_text().startswith(f"process {process} on")
    with locked(path, "this"):
        assert path.read_text().startswith(f"process {os.getpid()} on")


KILLS = {"kernel": 300, "fit": 155, "grid": 50}
"""The least number of writes, renames and removals, at each of which it is killed once; 40 moments
more are spread over its time."""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_work_that_is_killed_at_a_write_and_run_again_ends_with_the_same_bits(tmp_path):
    found = killing.kills(tmp_path, kernel=(60, 1), fit=(50, 1))
    assert min(found.values()) >= 3


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize("work", KILLS)
def test_work_that_is_killed_at_every_write_and_at_any_moment_ends_with_the_same_bits(
    work, tmp_path
):
    assert killing.kills(tmp_path, **{work: (1, 40)})[work] >= KILLS[work]
    assert KILLS["kernel"] > 200
    assert sum(KILLS.values()) > 500


@pytest.mark.parametrize("kind", mutated.KINDS)
def test_a_mutated_file_is_refused_or_has_the_same_contents(kind, tmp_path):
    found = mutated.mutate_often(kind, tmp_path, 15)
    assert found["refused"] > 1
    assert found["after"] - found["before"] < 1000


@pytest.mark.long
@pytest.mark.parametrize("kind", mutated.KINDS)
def test_none_of_2000_mutated_files_is_executed_or_taken_for_another_or_fills_the_memory(
    kind, tmp_path
):
    found = mutated.mutate_apart(kind, tmp_path, 2000)
    assert found["refused"] > 500
    assert found["after"] < 1000  # megabytes, with those of torch


def test_trees_are_packed_without_loss():
    tree = {
        "a": [1, 2.5, "b", None, True, float("inf"), 0.1 + 0.2],
        3: (torch.arange(3), {"x": torch.zeros(2, dtype=torch.bfloat16)}),
        "c": Counter({1: 2}),
        "d": [],
    }
    tensors: dict[str, torch.Tensor] = {}
    found = unpack(json.loads(json.dumps(pack(tree, tensors))), tensors)
    assert repr(found) == repr(tree)
    with pytest.raises(TypeError, match="no function"):
        pack({"f": pack}, {})
    with pytest.raises(KeyError):
        unpack({"dtype": "save"}, {})
