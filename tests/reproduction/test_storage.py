"""Atomic writes and checksums."""

from __future__ import annotations

import pytest

from reproduction.storage import DamagedFileError, seal, unseal, write_atomically


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


def test_a_leftover_of_a_killed_writer_is_overwritten(tmp_path):
    (tmp_path / ".file.txt.part").write_text("half")
    write_atomically(tmp_path / "file.txt", b"new")
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
