"""Every writer replaces files and its own folders only, and leaves nothing half-written.

One battery for all functions that write: what is at the path already, a disk that is full at any
moment, links, missing folders.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat

import pytest
import torch
from cases import FAMILIES
from disk import NEVER, FullDisk, watched
from tabular.problems import mixed_table, regressor
from torch import nn
from training import problem

import embens
from embens import laws, networks, theory
from embens.ensemble import saving
from embens.ensemble.saving import CARD, FILE
from embens.files import write_atomically
from embens.pictures import picture
from embens.theory import archive
from embens.training import Checkpoint, CSVLog
from reproduction import __main__ as command
from reproduction.report import explorer, page


def net(width: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))


def draw_picture(path):
    with picture(path, title="empty") as axes:
        axes.plot([0, 1])


def write_kernels(path):
    ensemble = embens.embed(networks.mlp(3, 4, 1), 2, pre=laws.Normal())
    theory.write_kernels(path, ensemble, torch.eye(3), block=2)


def log_run(path):
    embens.fit(problem.ensemble(), problem.data(), epochs=1, callbacks=[CSVLog(path)])


@functools.cache
def estimator():
    X, target = mixed_table(60)
    return regressor(max_epochs=1).fit(X[["size", "time"]], target)


FILES = {
    "write_atomically": lambda path: write_atomically(path, "text"),
    "ensemble.save": lambda path: embens.batch_ensemble(net(), 2).save(path),
    "estimator.save": lambda path: estimator().save(path),
    "estimator.model_card": lambda path: estimator().model_card(path),
    "CSVLog": log_run,
    "picture": draw_picture,
    "write_kernels": write_kernels,
}
SLOW = {
    "to_onnx": lambda path: embens.batch_ensemble(net(), 2).to_onnx(path, torch.zeros(2, 3)),
    "estimator.to_onnx": lambda path: estimator().to_onnx(path),
    "explorer": lambda path: explorer.write(path, lambda items: items[:1]),
}
SUFFIX = {"picture": "file.png", "write_kernels": "file.npz"}


def path_of(name, folder):
    return folder / SUFFIX.get(name, "file")


def contents(folder):
    """Return all files of a folder with their contents, and all folders."""
    found = {}
    for path in sorted(folder.rglob("*")):
        found[str(path.relative_to(folder))] = path.read_bytes() if path.is_file() else None
    return found


@pytest.mark.parametrize("filled", [True, False])
@pytest.mark.parametrize("name", [*FILES, *SLOW])
def test_a_folder_in_place_of_a_file_is_never_touched(name, filled, tmp_path):
    path = path_of(name, tmp_path)
    path.mkdir()
    if filled:
        (path / "precious").write_text("text")
    before = contents(tmp_path)
    with pytest.raises(IsADirectoryError, match="A folder is never replaced"):
        {**FILES, **SLOW}[name](path)
    assert contents(tmp_path) == before
    if os.name == "posix":
        link = path.with_name(f"link{path.suffix}")
        link.symlink_to(path)
        with pytest.raises(IsADirectoryError, match="A folder is never replaced"):
            {**FILES, **SLOW}[name](link)
        assert link.is_symlink()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes")
@pytest.mark.parametrize("name", FILES)
def test_pipes_and_circular_links_are_never_replaced(name, tmp_path):
    path = path_of(name, tmp_path)
    os.mkfifo(path)
    with pytest.raises(FileExistsError, match="Only a regular file can be replaced"):
        FILES[name](path)
    assert stat.S_ISFIFO(path.stat().st_mode)
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(FileExistsError, match="Only a regular file can be replaced"):
        FILES[name](path)
    assert path.is_symlink()


@pytest.mark.parametrize("name", FILES)
def test_a_file_in_place_of_a_folder_and_a_missing_folder_are_named(name, tmp_path):
    (tmp_path / "file").write_text("text")
    with pytest.raises(NotADirectoryError, match="file"):
        FILES[name](path_of(name, tmp_path / "file"))
    assert contents(tmp_path) == {"file": b"text"}
    if name == "write_kernels":
        return  # creates missing folders
    with pytest.raises(FileNotFoundError, match=r"the folder '.*nowhere' does not exist"):
        FILES[name](path_of(name, tmp_path / "nowhere"))


@pytest.mark.skipif(os.name != "posix", reason="needs symbolic links")
@pytest.mark.parametrize("name", FILES)
def test_a_link_is_kept_and_its_target_written(name, tmp_path):
    target = path_of(name, tmp_path / "far")
    target.parent.mkdir()
    link = path_of(name, tmp_path)
    link.symlink_to(target)
    FILES[name](link)

    assert link.is_symlink()
    assert target.stat().st_size > 0
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]


def check_full_disk(write, path):
    """Let the disk be full from each write on: the folder stays as it was, or is complete."""
    before = contents(path.parent)
    with watched(FullDisk(NEVER)) as counter:
        write(path)
    after = contents(path.parent)
    for number in range(1, counter.calls + 1):
        restore(path.parent, before)
        with watched(FullDisk(number)), pytest.raises(OSError, match="No space left"):
            write(path)
        remaining = contents(path.parent)
        assert remaining in (before, after), (number, sorted(remaining))
    return counter.calls


def restore(folder, before):
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    for name, content in before.items():
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content)


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("name", ["write_atomically", "ensemble.save", "estimator.save"])
def test_a_full_disk_leaves_the_old_file_or_none(name, exists, tmp_path):
    path = path_of(name, tmp_path)
    if exists:
        path.write_text("old")
    assert check_full_disk(FILES[name], path) >= 3


class TestPretrained:
    """Folders of ``save_pretrained`` are replaced as a whole, and only by each other."""

    def save(self, path, family="low rank"):
        torch.manual_seed(0)
        FAMILIES[family](net(), members=2).save_pretrained(path, results={"log loss": 0.5})

    def test_an_earlier_folder_an_empty_one_and_a_missing_one_are_written(self, tmp_path):
        path = tmp_path / "new" / "folder"
        self.save(path)
        first = contents(path)
        (path / f".{FILE}.{'0' * 8}-1-{'0' * 8}").write_text("of a writer that was killed")
        path.chmod(0o750)
        self.save(path, "batch ensemble")
        assert contents(path).keys() == first.keys() == {FILE, CARD}
        assert contents(path) != first
        assert stat.S_IMODE(path.stat().st_mode) == 0o750
        (tmp_path / "empty").mkdir()
        self.save(tmp_path / "empty")
        assert contents(tmp_path / "empty") == first
        assert contents(tmp_path).keys() == {
            *("empty", f"empty/{FILE}", f"empty/{CARD}"),
            *("new", "new/folder", f"new/folder/{FILE}", f"new/folder/{CARD}"),
        }

    @pytest.mark.parametrize("name", ["notes.txt", CARD, FILE, ".git/config"])
    def test_a_folder_with_other_files_is_never_touched(self, tmp_path, name):
        path = tmp_path / "folder" / name
        path.parent.mkdir(parents=True)
        path.write_text("precious")
        before = contents(tmp_path)

        with pytest.raises(FileExistsError, match=r"holds other files .* never replaced"):
            self.save(tmp_path / "folder")
        assert contents(tmp_path) == before

    def test_a_file_added_to_an_earlier_folder_protects_it(self, tmp_path):
        self.save(tmp_path / "folder")
        (tmp_path / "folder" / "tokenizer.json").write_text("{}")
        before = contents(tmp_path)

        with pytest.raises(FileExistsError, match="holds other files"):
            self.save(tmp_path / "folder", "batch ensemble")
        assert contents(tmp_path) == before

    def test_files_and_the_current_folder_are_never_replaced(self, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("precious")
        with pytest.raises(NotADirectoryError, match="never replaced by a folder"):
            self.save(tmp_path / "file")
        with pytest.raises(NotADirectoryError):
            self.save(tmp_path / "file" / "folder")
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        with pytest.raises(FileExistsError, match="current folder"):
            self.save(".")
        assert contents(tmp_path) == {"file": b"precious", "here": None}

    @pytest.mark.skipif(os.name != "posix", reason="needs symbolic links")
    def test_a_link_to_a_folder_is_kept(self, tmp_path):
        (tmp_path / "target").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "target")
        for _ in range(2):
            self.save(tmp_path / "link")
            assert (tmp_path / "link").is_symlink()
            assert embens.load(tmp_path / "link", net()).members == 2

    @pytest.mark.parametrize("exists", [True, False])
    def test_a_full_disk_leaves_the_old_folder_or_none(self, tmp_path, exists):
        path = tmp_path / "parent" / "folder"
        if exists:
            self.save(path, "batch ensemble")
        else:
            path = tmp_path / "folder"

        assert check_full_disk(self.save, path) >= 6

    def test_a_full_disk_leaves_no_new_parents(self, tmp_path):
        with watched(FullDisk(3)), pytest.raises(OSError, match="No space left"):
            self.save(tmp_path / "new" / "folder")
        assert contents(tmp_path) == {}

    def test_systems_without_an_exchange_rename_twice(self, tmp_path, monkeypatch):
        monkeypatch.setattr("embens.folders._exchange", lambda *_: False)
        path, rename, calls = tmp_path / "folder", os.rename, []

        def fail_second(*paths):
            calls.append(paths)
            if len(calls) == 2:
                raise OSError("another process took the place")
            rename(*paths)

        self.save(path, "batch ensemble")
        before = contents(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", fail_second)
            with pytest.raises(OSError, match="took the place"):
                self.save(path)
        assert contents(tmp_path) == before
        self.save(path)
        assert contents(tmp_path).keys() == {"folder", f"folder/{FILE}", f"folder/{CARD}"}
        assert contents(tmp_path) != before

    def test_a_file_added_while_the_new_folder_is_written_protects_it(self, tmp_path, monkeypatch):
        self.save(tmp_path / "folder")
        save = saving.save

        def save_slowly(*arguments, **options):
            (tmp_path / "folder" / "notes.txt").write_text("precious")
            save(*arguments, **options)

        monkeypatch.setattr(saving, "save", save_slowly)
        with pytest.raises(FileExistsError, match=r"holds other files \(README.md, ens.*, notes"):
            self.save(tmp_path / "folder", "batch ensemble")
        assert (tmp_path / "folder" / "notes.txt").read_text() == "precious"


class TestCheckpoints:
    def fit(self, folder):
        callbacks = [Checkpoint(folder, every=1)]
        embens.fit(problem.ensemble(), problem.data(), epochs=2, batch_size=20, callbacks=callbacks)

    def test_files_of_the_user_stay_in_their_folder(self, tmp_path):
        names = ["notes.txt", "step-0000000001.safetensors", "within/step-0000000002.safetensors"]
        (tmp_path / "within").mkdir()
        for name in names[:1] + names[2:]:
            (tmp_path / name).write_text("precious")
        # The name of a checkpoint of ours, but no checkpoint: it is neither read nor removed.
        (tmp_path / "step-0000000000.safetensors").write_text("precious")
        with pytest.warns(UserWarning, match="checkpoint refused: step-0000000000"):
            self.fit(tmp_path)
        self.fit(tmp_path)

        for name in (names[0], names[2], "step-0000000000.safetensors"):
            assert (tmp_path / name).read_text() == "precious"

    def test_a_lock_file_of_the_user_is_never_touched(self, tmp_path):
        (tmp_path / ".lock").write_text("precious")
        with pytest.raises(FileExistsError, match="this is not a lock file"):
            self.fit(tmp_path)
        assert contents(tmp_path) == {".lock": b"precious"}

    def test_a_full_disk_raises_and_the_run_continues_afterwards(self, tmp_path):
        with watched(FullDisk(NEVER)) as counter:
            self.fit(tmp_path / "whole")
        for number in range(2, counter.calls, 4):
            folder = tmp_path / str(number)
            with watched(FullDisk(number)), pytest.raises(OSError, match="No space left"):
                self.fit(folder)
            if folder.exists():
                assert not [path for path in folder.iterdir() if path.name.startswith(".")]
            self.fit(folder)
            assert sorted(contents(folder)) == sorted(contents(tmp_path / "whole"))


class TestLogs:
    @pytest.mark.parametrize("content", [b"precious", b"a,b\n1,2\n", b"\xff\xfe"])
    def test_a_file_of_the_user_is_refused_before_any_training(self, tmp_path, content):
        path, data = tmp_path / "file.csv", problem.data()
        path.write_bytes(content)
        ensemble = problem.ensemble()
        before = problem.weights(ensemble)

        with pytest.raises(ValueError, match="is not a table of this run"):
            embens.fit(ensemble, data, epochs=1, callbacks=[CSVLog(path)])
        assert path.read_bytes() == content
        problem.assert_equal(problem.weights(ensemble), before)


class TestKernels:
    def test_a_folder_of_the_user_with_the_name_of_the_blocks_is_never_removed(self, tmp_path):
        blocks = tmp_path / "file.npz.partial"
        blocks.mkdir()
        (blocks / "precious").write_text("text")
        with pytest.raises(FileExistsError, match=r"it holds 'precious'\. Move it"):
            write_kernels(tmp_path / "file.npz")
        assert contents(tmp_path) == {
            "file.npz.partial": None,
            "file.npz.partial/precious": b"text",
        }
        (blocks / "precious").unlink()
        blocks.rmdir()
        blocks.write_text("precious")
        with pytest.raises(FileExistsError, match="but it is a file"):
            write_kernels(tmp_path / "file.npz")
        assert contents(tmp_path) == {"file.npz.partial": b"precious"}

    def test_a_file_added_to_the_blocks_in_the_meantime_is_kept(self, tmp_path, monkeypatch):
        compute = archive.compute_blocks

        def compute_slowly(*arguments, **options):
            (tmp_path / "file.npz.partial" / "precious").write_text("text")
            return compute(*arguments, **options)

        monkeypatch.setattr(archive, "compute_blocks", compute_slowly)
        with pytest.warns(UserWarning, match="holds other files and was not removed"):
            write_kernels(tmp_path / "file.npz")
        assert contents(tmp_path / "file.npz.partial") == {"precious": b"text"}
        assert theory.load_kernels(tmp_path / "file.npz").nngp.same.shape == (3, 3)

    def test_a_full_disk_leaves_finished_blocks_only(self, tmp_path):
        path = tmp_path / "file.npz"
        with watched(FullDisk(NEVER)) as counter:
            write_kernels(path)
        expected = theory.load_kernels(path).blocks
        path.unlink()
        for number in range(1, counter.calls + 1, 3):
            # The last calls release the lock, which works on a full disk as well.
            with watched(FullDisk(number)), contextlib.suppress(OSError):
                write_kernels(path)
            assert not [p for p in tmp_path.rglob("*") if p.name.startswith(".")]
            write_kernels(path)
            assert all(map(torch.equal, theory.load_kernels(path).blocks, expected))
            path.unlink()


@pytest.fixture
def folder(tmp_path):
    """A folder with the names of results; a page is refused before they are read."""
    place = tmp_path / "results" / "widths" / "quick"
    place.mkdir(parents=True)
    for name in ("manifest.json", "table.csv", "figure.png", "results.jsonl"):
        (place / name).write_text(name)
    return tmp_path / "results"


class TestReproduction:
    """Options ``--out`` of ``python -m reproduction``."""

    @pytest.mark.parametrize("name", ["manifest.json", "table.csv", "figure.png", "results.jsonl"])
    @pytest.mark.parametrize("road", ["same", "relative", "link", "hard link"])
    def test_a_page_never_overwrites_its_results(self, folder, name, road, tmp_path):
        source = folder / "widths" / "quick" / name
        out = {"same": source, "relative": folder / "widths" / ".." / "widths" / "quick" / name}
        if road not in out:
            out[road] = tmp_path / "out.html"
            out[road].symlink_to(source) if road == "link" else os.link(source, out[road])
        before = contents(folder)

        with pytest.raises(SystemExit):
            command.main(["report", str(folder), "--out", str(out[road])])
        with pytest.raises(OSError, match=r"is an input .* would be overwritten"):
            page.write(folder, out[road])
        assert contents(folder) == before

    def test_recorded_choices_never_overwrite_results_or_folders(self, folder, tmp_path, capsys):
        place = folder / "tuning" / "quick"
        place.mkdir(parents=True)
        (place / "manifest.json").write_text("{}")
        before = contents(folder)

        for file, message in ((place / "manifest.json", "is an input"), (place, "A folder is")):
            with pytest.raises(SystemExit):
                command.main(["record", str(folder), "--file", str(file)])
            assert message in capsys.readouterr().err
        assert contents(folder) == before

    @pytest.mark.parametrize("arguments", [["report", "results"], ["explore"]])
    def test_a_page_never_replaces_a_folder(self, folder, arguments, tmp_path, capsys):
        arguments = [str(folder) if word == "results" else word for word in arguments]
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "precious").write_text("text")

        with pytest.raises(SystemExit):
            command.main([*arguments, "--out", str(tmp_path / "out")])
        assert "A folder is never replaced" in capsys.readouterr().err
        assert contents(tmp_path / "out") == {"precious": b"text"}

    def test_results_are_written_to_a_folder_other_than_the_data(self, tmp_path, capsys):
        (tmp_path / "file").write_text("precious")
        (tmp_path / "data").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "data")
        for out, message in (("file", "is a file"), ("file/x", "is a file"), ("link", "--data")):
            options = ["--data", str(tmp_path / "data"), "--out", str(tmp_path / out)]
            with pytest.raises(SystemExit):
                command.main(["gain", *options])
            assert message in capsys.readouterr().err

        assert (tmp_path / "file").read_text() == "precious"
        assert contents(tmp_path / "data") == {}
