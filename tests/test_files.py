import os
import stat
import threading

import pytest

from embens.files import write_atomically


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
