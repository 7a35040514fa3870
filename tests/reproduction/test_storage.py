"""Atomic writes and checksums."""

from __future__ import annotations

import os
import shutil

import pytest
from disk import NEVER, FullDisk, watched

from reproduction.storage import (
    PENDING,
    DamagedFileError,
    check_distinct,
    finish_writing,
    newest,
    seal,
    unseal,
    write_atomically,
    write_together,
)


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "file.txt"
    write_atomically(path, "old")

    def fail(temporary):
        temporary.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fail)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["file.txt"]


def test_a_folder_appears_when_it_is_complete(tmp_path):
    def fill(temporary):
        temporary.mkdir()
        assert not (tmp_path / "folder").exists()
        (temporary / "a").write_text("1")

    write_atomically(tmp_path / "folder", fill)
    assert (tmp_path / "folder" / "a").read_text() == "1"


def test_a_changed_record_does_not_match_its_checksum():
    sealed = seal({"value": 1})
    assert unseal("record", sealed) == {"value": 1}
    with pytest.raises(DamagedFileError, match="record is damaged"):
        unseal("record", {**sealed, "value": 2})


OLD = {"a": "old a", "b": "old b"}
NEW = {"a": "new a", "b": "new b"}


def readable(folder):
    """Return the texts that readers find."""
    return {name: newest(folder, name).read_text() for name in OLD if newest(folder, name).exists()}


@pytest.mark.parametrize("before", [OLD, {}])
def test_a_full_disk_leaves_all_old_files_or_all_new_ones(tmp_path, before):
    with watched(FullDisk(NEVER)) as counter:
        write_together(tmp_path, {**NEW, "b": lambda path: path.write_text("new b")})
    assert counter.calls >= 8
    for number in range(1, counter.calls + 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_together(folder, before)
        with watched(FullDisk(number)), pytest.raises(OSError, match="No space left"):
            write_together(folder, NEW)
        expected = readable(folder)
        assert expected in (before, NEW)
        finish_writing(folder)
        assert {path.name: path.read_text() for path in folder.iterdir()} == expected


def test_a_folder_in_place_of_one_file_stops_all_of_them(tmp_path):
    (tmp_path / "b").mkdir()
    with pytest.raises(IsADirectoryError):
        write_together(tmp_path, NEW)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_files_of_an_interrupted_call_are_read_and_moved_by_the_next(tmp_path):
    write_together(tmp_path, OLD)
    (tmp_path / PENDING).mkdir()
    (tmp_path / PENDING / "a").write_text("new a")
    assert readable(tmp_path) == {**OLD, "a": "new a"}
    write_together(tmp_path, {"c": "new c"})
    assert readable(tmp_path) == {**OLD, "a": "new a"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_an_output_that_is_an_input_is_refused(tmp_path, link):
    source, other = tmp_path / "source", tmp_path / "other"
    source.write_text("text")
    link(source, other)

    check_distinct(tmp_path / "new", [source])
    check_distinct(source, [tmp_path / "missing"])
    for path in (source, other, tmp_path / "." / "source"):
        with pytest.raises(shutil.SameFileError, match=r"is an input .* Choose another path"):
            check_distinct(path, [tmp_path / "missing", source])
