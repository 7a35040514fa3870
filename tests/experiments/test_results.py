"""Results survive crashes, full disks and company."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal

import pytest

from embens.experiments.results import Results

try:
    import resource
except ImportError:  # not on Windows
    resource = None


def record(key, **more):
    return {"key": key, "rows": [{"y": 1.0}], **more}


def test_records_are_there_for_the_next_run(tmp_path):
    results = Results(tmp_path)
    results.add(record("a"))
    results.add(record("b"))
    assert set(Results(tmp_path).records) == {"a", "b"}


def test_what_a_crash_left_of_a_line_is_skipped_and_the_next_line_is_whole(tmp_path):
    results = Results(tmp_path)
    results.add(record("a"))
    with results.path.open("a") as file:
        file.write('{"key": "b", "rows": [{"y"')
    late = Results(tmp_path)
    assert set(late.records) == {"a"}
    late.add(record("c"))
    assert set(Results(tmp_path).records) == {"a", "c"}


def test_a_full_disk_raises_and_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    results = Results(tmp_path)
    results.add(record("a"))
    before = results.path.read_bytes()

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        results.add(record("b"))
    assert results.path.read_bytes() == before
    assert "b" not in results.records
    monkeypatch.undo()
    results.add(record("b"))
    assert set(Results(tmp_path).records) == {"a", "b"}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_device_that_is_really_full_raises(tmp_path):
    (tmp_path / "results.jsonl").symlink_to("/dev/full")
    results = Results.__new__(Results)
    results.__dict__.update(folder=tmp_path, path=tmp_path / "results.jsonl", records={})
    results._position, results._claims = 0, {}
    from filelock import FileLock

    results._lock = FileLock(tmp_path / ".lock")
    with pytest.raises(OSError, match="No space left"):
        results.add(record("a"))
    assert results.records == {}


def test_a_success_is_never_replaced_by_a_failure(tmp_path):
    results = Results(tmp_path)
    results.add({"key": "a", "error": "first"})
    results.add({"key": "a", "error": "second"})
    assert results.records["a"]["error"] == "second"
    results.add(record("a"))
    results.add({"key": "a", "error": "third"})
    for seen in (results, Results(tmp_path)):
        assert "error" not in seen.records["a"]


def write_many(folder, name, count):
    results = Results(folder)
    for k in range(count):
        results.add(record(f"{name}-{k}", text="x" * 5000))


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
    one, other = Results(tmp_path), Results(tmp_path)
    one.add(record("a"))
    assert "a" not in other.records
    other.refresh()
    assert "a" in other.records


def test_a_claimed_cell_is_taken_until_it_is_released(tmp_path):
    one, other = Results(tmp_path), Results(tmp_path)
    assert one.claim("a")
    assert not other.claim("a")
    assert other.claim("b")
    one.release("a")
    assert other.claim("a")
    other.release_all()
    assert not (tmp_path / "claims").exists()


def hold(folder, ready, key):
    results = Results(folder)
    ready.send(results.claim(key))
    ready.recv()


def test_the_claims_of_a_run_that_was_killed_are_free_again(tmp_path):
    context = multiprocessing.get_context("forkserver")
    mine, theirs = context.Pipe()
    process = context.Process(target=hold, args=(tmp_path, theirs, "a"))
    process.start()
    assert mine.recv()
    results = Results(tmp_path)
    assert not results.claim("a")
    process.kill()
    process.join()
    assert results.claim("a")


def test_lines_that_are_no_records_are_skipped(tmp_path):
    odd = [b"\xff\x00", b"[1]", b'{"key": ["a"], "rows": []}', b'{"key": "b"}', b'{"rows": []}']
    (tmp_path / "results.jsonl").write_bytes(b"\n".join([*odd, b""]))
    results = Results(tmp_path)
    assert results.records == {}
    results.add(record("a"))
    assert set(Results(tmp_path).records) == {"a"}


def test_what_another_run_took_back_does_not_hide_what_comes_after_it(tmp_path):
    writer, reader = Results(tmp_path), Results(tmp_path)
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
    results = Results(tmp_path)
    results.add(record("a"))
    before = results.path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5000, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            results.add(record("b", text="x" * 20_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert results.path.read_bytes() == before
