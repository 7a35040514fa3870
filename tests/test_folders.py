"""Folders appear as a whole; tests/test_outputs.py has the battery of all writers."""

import pytest

from embens.folders import check_folder, write_folder


def fill(folder):
    (folder / "within").mkdir()
    (folder / "within" / "file").write_text("new")


def test_a_folder_is_invisible_until_it_is_complete(tmp_path):
    def watch(folder):
        assert not (tmp_path / "folder").exists()
        fill(folder)

    write_folder(tmp_path / "folder", watch, lambda _: False)
    assert (tmp_path / "folder" / "within" / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_readers_of_the_old_folder_keep_it_until_the_new_one_is_there(tmp_path):
    write_folder(tmp_path / "folder", lambda folder: (folder / "old").touch(), lambda _: False)

    def watch(folder):
        fill(folder)
        assert [path.name for path in (tmp_path / "folder").iterdir()] == ["old"]

    write_folder(tmp_path / "folder", watch, lambda folder: (folder / "old").exists())
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["within"]
    with pytest.raises(FileExistsError, match="holds other files"):
        write_folder(tmp_path / "folder", watch, lambda folder: (folder / "old").exists())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_nothing_behind(tmp_path, error):
    def fail(folder):
        fill(folder)
        raise error

    with pytest.raises(error):
        write_folder(tmp_path / "a" / "b", fail, lambda _: False)
    assert list(tmp_path.iterdir()) == []


def test_the_message_names_a_few_of_the_other_files(tmp_path):
    for name in "abcd":
        (tmp_path / name).touch()
    with pytest.raises(FileExistsError, match=r"other files \(a, b, c\) and is never replaced"):
        check_folder(tmp_path, lambda _: False)
    check_folder(tmp_path / "new", lambda _: False)
