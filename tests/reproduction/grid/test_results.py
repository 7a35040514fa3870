"""Results survive crashes and full disks; tables hold what belongs together."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
from dataclasses import replace

import pytest

from reproduction.grid import results as module
from reproduction.grid import runs
from reproduction.grid.engines import inline
from reproduction.grid.keys import key_of
from reproduction.grid.results import Results, make_table
from reproduction.storage import DamagedFileError, seal
from tests.reproduction import problem

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


def test_an_incomplete_line_is_skipped_and_the_next_one_is_complete(tmp_path):
    results = Results(tmp_path)
    results.add(record("a"))
    with results.path.open("a") as file:
        file.write('{"key": "b", "rows": [{"y"')
    late = Results(tmp_path)
    assert set(late.records) == {"a"}
    late.add(record("c"))
    assert set(Results(tmp_path).records) == {"a", "c"}


def test_a_full_disk_raises_and_costs_no_other_record(tmp_path, monkeypatch):
    results = Results(tmp_path)
    results.add(record("a"))

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        results.add(record("b"))
    assert "b" not in results.records
    monkeypatch.undo()
    results.add(record("c"))
    assert {"a", "c"} <= set(Results(tmp_path).records)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_device_that_is_really_full_raises(tmp_path):
    (tmp_path / "results.jsonl").symlink_to("/dev/full")
    results = Results.__new__(Results)
    results.__dict__.update(folder=tmp_path, path=tmp_path / "results.jsonl", records={})

    with pytest.raises(OSError, match="No space left"):
        results.add(record("a"))
    assert results.records == {}


def test_the_last_record_of_a_cell_counts(tmp_path):
    results = Results(tmp_path)
    results.add({"key": "a", "error": "first"})
    results.add(record("a"))
    for seen in (results, Results(tmp_path)):
        assert "error" not in seen.records["a"]


def test_lines_that_are_no_records_are_skipped(tmp_path):
    odd = [b"\xff\x00", b"[1]", b'{"key": ["a"], "rows": []}', b'{"key": "b"}', b'{"rows": []}']
    (tmp_path / "results.jsonl").write_bytes(b"\n".join([*odd, b""]))
    results = Results(tmp_path)
    assert results.records == {}
    results.add(record("a"))
    assert set(Results(tmp_path).records) == {"a"}


@pytest.mark.parametrize(
    "change",
    [
        {"key": 3},
        {"rows": [3]},
        {"rows": {"y": 1.0}},
        {"rows": [{"y": [1.0]}]},
        {"seconds": "long"},
        {"seconds": float("nan")},
        {"seconds": True},
        {"code": ["a"]},
        {"cell": ["setting"]},
        {"cell": {"p": 0.5}},
        {"cell": {"setting": {}, "p": [0.5]}},
        {"error": 3},
    ],
)
def test_records_with_a_checksum_and_wrong_types_are_skipped(change, tmp_path):
    whole = record("a", seconds=1.5, code="1", cell={"setting": {}, "p": 0.5})
    lines = [json.dumps(seal(values)) for values in (whole, {**whole, "key": "b", **change})]
    (tmp_path / "results.jsonl").write_text("\n".join(lines))
    assert list(Results(tmp_path).records) == ["a"]


def test_a_column_of_numbers_and_texts_is_an_error_with_its_name(tmp_path):
    cells = problem.cells(2)
    measure(cells, tmp_path)
    results = Results(tmp_path)
    results.records[key_of(cells[0])]["rows"][0]["accuracy"] = "high"
    with pytest.raises(DamagedFileError, match=r"numbers and texts for 'accuracy'"):
        make_table(results, "transition", problem.SETTING)


@pytest.mark.skipif(resource is None, reason="there are no limits on files here")
def test_a_line_that_does_not_fit_is_skipped_and_the_next_one_is_whole(tmp_path):
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
    results.add(record("c"))

    assert set(Results(tmp_path).records) == {"a", "c"}


def measure(cells, folder):
    runs.run("transition", cells, Results(folder), inline)


def test_the_table_contains_results_of_the_present_code(tmp_path):
    measure(problem.cells(2), tmp_path)
    results = Results(tmp_path)
    results.add({**next(iter(results.records.values())), "key": "old", "code": "another"})
    table = make_table(results, "transition", problem.SETTING)

    assert list(table["members"]) == [1, 2]
    assert set(table) >= {"p", "gamma", "seed", "accuracy", "seconds"}
    assert not len(
        make_table(results, "transition", replace(problem.SETTING, records="other data"))
    )
    assert module.count_outdated(results, "transition") == 1


def test_results_with_other_epochs_stay_out_of_the_table(tmp_path):
    longer = replace(problem.SETTING, epochs=2)
    measure(problem.cells(3), tmp_path)
    measure(problem.cells(2, longer), tmp_path)
    results = Results(tmp_path)
    assert list(make_table(results, "transition", problem.SETTING)["members"]) == [1, 2, 3]
    assert list(make_table(results, "transition", longer)["members"]) == [1, 2]
    module.write_summary(results, "transition", longer, make_table(results, "transition", longer))
    assert json.loads((tmp_path / "manifest.json").read_text())["cells"] == 2


def test_the_commit_is_that_of_the_repository_if_there_is_one(tmp_path, monkeypatch):
    file = tmp_path / "reproduction" / "grid" / "results.py"
    monkeypatch.setattr(module, "__file__", str(file))
    file.parent.mkdir(parents=True)
    assert module.commit() is None
    for arguments in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "title"]):
        author = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *author, *arguments], cwd=tmp_path, check=True)
    assert len(module.commit()) == 12
