"""Results survive crashes, full disks and company."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal

import pytest

from embens.experiments.store import Store

try:
    import resource
except ImportError:  # not on Windows
    resource = None


def record(key, **more):
    return {"key": key, "rows": [{"y": 1.0}], **more}


def test_records_are_there_for_the_next_run(tmp_path):
    store = Store(tmp_path)
    store.add(record("a"))
    store.add(record("b"))
    assert set(Store(tmp_path).records) == {"a", "b"}


def test_what_a_crash_left_of_a_line_is_skipped_and_the_next_line_is_whole(tmp_path):
    store = Store(tmp_path)
    store.add(record("a"))
    with store.path.open("a") as file:
        file.write('{"key": "b", "rows": [{"y"')
    late = Store(tmp_path)
    assert set(late.records) == {"a"}
    late.add(record("c"))
    assert set(Store(tmp_path).records) == {"a", "c"}


def test_a_full_disk_raises_and_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    store = Store(tmp_path)
    store.add(record("a"))
    before = store.path.read_bytes()

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        store.add(record("b"))
    assert store.path.read_bytes() == before
    assert "b" not in store.records
    monkeypatch.undo()
    store.add(record("b"))
    assert set(Store(tmp_path).records) == {"a", "b"}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_device_that_is_really_full_raises(tmp_path):
    (tmp_path / "results.jsonl").symlink_to("/dev/full")
    store = Store.__new__(Store)
    store.__dict__.update(folder=tmp_path, path=tmp_path / "results.jsonl", records={})
    store._position, store._claims = 0, {}
    from filelock import FileLock

    store._lock = FileLock(tmp_path / ".lock")
    with pytest.raises(OSError, match="No space left"):
        store.add(record("a"))
    assert store.records == {}


def test_a_success_is_never_replaced_by_a_failure(tmp_path):
    store = Store(tmp_path)
    store.add({"key": "a", "error": "first"})
    store.add({"key": "a", "error": "second"})
    assert store.records["a"]["error"] == "second"
    store.add(record("a"))
    store.add({"key": "a", "error": "third"})
    for seen in (store, Store(tmp_path)):
        assert "error" not in seen.records["a"]


def write_many(folder, name, count):
    store = Store(folder)
    for k in range(count):
        store.add(record(f"{name}-{k}", text="x" * 5000))


def test_writers_in_several_processes_do_not_mix_their_lines(tmp_path):
    context = multiprocessing.get_context("forkserver")
    writers = [context.Process(target=write_many, args=(tmp_path, n, 25)) for n in "abc"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert len(lines) == 75
    assert len({json.loads(line)["key"] for line in lines}) == 75


def test_what_others_add_is_seen_after_a_refresh(tmp_path):
    one, other = Store(tmp_path), Store(tmp_path)
    one.add(record("a"))
    assert "a" not in other.records
    other.refresh()
    assert "a" in other.records


def test_a_claimed_cell_is_taken_until_it_is_released(tmp_path):
    one, other = Store(tmp_path), Store(tmp_path)
    assert one.claim("a")
    assert not other.claim("a")
    assert other.claim("b")
    one.release("a")
    assert other.claim("a")
    other.release_all()
    assert not (tmp_path / "claims").exists()


def hold(folder, ready, key):
    store = Store(folder)
    ready.send(store.claim(key))
    ready.recv()


def test_the_claims_of_a_run_that_was_killed_are_free_again(tmp_path):
    context = multiprocessing.get_context("forkserver")
    mine, theirs = context.Pipe()
    process = context.Process(target=hold, args=(tmp_path, theirs, "a"))
    process.start()
    assert mine.recv()
    store = Store(tmp_path)
    assert not store.claim("a")
    process.kill()
    process.join()
    assert store.claim("a")


def test_lines_that_are_no_records_are_skipped(tmp_path):
    odd = [b"\xff\x00", b"[1]", b'{"key": ["a"], "rows": []}', b'{"key": "b"}', b'{"rows": []}']
    (tmp_path / "results.jsonl").write_bytes(b"\n".join([*odd, b""]))
    store = Store(tmp_path)
    assert store.records == {}
    store.add(record("a"))
    assert set(Store(tmp_path).records) == {"a"}


def test_what_another_run_took_back_does_not_hide_what_comes_after_it(tmp_path):
    writer, reader = Store(tmp_path), Store(tmp_path)
    writer.add(record("a"))
    size = writer.path.stat().st_size
    writer.add(record("b", text="x" * 100))
    reader.refresh()
    os.truncate(writer.path, size)
    writer.add(record("c"))
    reader.refresh()
    assert "c" in reader.records


@pytest.mark.skipif(resource is None, reason="there are no limits on files here")
def test_a_line_that_does_not_fit_leaves_nothing_behind(tmp_path):
    store = Store(tmp_path)
    store.add(record("a"))
    before = store.path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5000, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            store.add(record("b", text="x" * 20_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert store.path.read_bytes() == before
