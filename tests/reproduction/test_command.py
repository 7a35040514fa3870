"""``python -m reproduction`` from the outside."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pandas
import pytest
from filelock import FileLock
from rich.console import Console

from reproduction import claims
from reproduction.progress import show_progress
from tests.reproduction import problem

ROOT = Path(__file__).parents[2]
SMALL = "--epochs 1 --workers 0 --seeds 2 --members 1 2 4 --only p=0,0.9 law=normal".split()
# Three cells a seed: two ensembles, and the baselines, which have four rows.
TINY = "--epochs 1 --workers 0 --seeds 2 --members 2 4 --only p=0 law=normal gamma=M".split()


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch):
    monkeypatch.setenv("EMBENS_DATA", "/nowhere")
    monkeypatch.setattr(claims, "BOOTSTRAP_SAMPLES", 10)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """The results of a run of TINY, which tests copy."""
    folder = tmp_path_factory.mktemp("finished")
    with mock.patch.object(claims, "BOOTSTRAP_SAMPLES", 10):
        problem.reproduce("transition", "--out", folder, *TINY)
    return folder


@pytest.fixture
def out(finished_run, tmp_path, capsys):
    """A copy of the results of TINY."""
    capsys.readouterr()  # the run may have printed
    return shutil.copytree(finished_run, tmp_path / "out")


def test_a_run_ends_in_table_picture_claims_and_manifest(tmp_path, capsys):
    assert problem.reproduce("transition", "--out", tmp_path, *SMALL) == 0
    folder = tmp_path / "transition" / "quick"
    table = pandas.read_csv(folder / "table.csv")
    assert len(table) == 2 * (3 + 3 + 2) + 2 * 4  # baselines have four rows a seed
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    judged = json.loads((folder / "claims.json").read_text())
    printed = " ".join(capsys.readouterr().out.split())
    for claim in judged:
        assert claim["verdict"] in ("holds", "does not hold", "undecided")
        assert claim["statement"] in printed
        assert claim["paper"] in printed
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["cells"] == 18
    assert manifest["setting"]["epochs"] == 1
    assert set(manifest) >= {"commit", "versions", "machine", "cell_seconds", "run_seconds"}
    assert manifest["versions"]["torch"]
    assert "hostname" not in json.dumps(manifest)


def test_running_again_measures_nothing(out, capsys):
    problem.reproduce("transition", "--out", out, *TINY)
    assert "0 cells measured" in capsys.readouterr().out


@pytest.mark.parametrize("options", [["--seeds", "3"], ["--first-seed", "1"]])
def test_running_with_more_seeds_measures_the_new_ones_only(options, out, capsys):
    problem.reproduce("transition", "--out", out, *TINY, *options)
    assert "3 cells measured" in capsys.readouterr().out


def test_a_dry_run_counts_and_estimates_and_writes_nothing(tmp_path, capsys):
    assert problem.reproduce("widths", "--out", tmp_path / "out", "--dry-run") == 0
    printed = capsys.readouterr().out
    assert re.search(r"widths \(quick\): 140 cells, 140 to measure; about .* each", printed)
    assert re.search(r"\d:\d\d:\d\d on \d+ workers", printed)
    assert not (tmp_path / "out").exists()


def test_a_failed_cell_is_reported_and_sets_the_exit_code(tmp_path, capsys, monkeypatch):
    from reproduction.figures import transition

    original = transition.measure

    def measure(cell):
        if cell["members"] == 4:
            raise ArithmeticError("four is unlucky")
        return original(cell)

    monkeypatch.setattr(transition, "measure", measure)
    assert problem.reproduce("transition", "--out", tmp_path, *TINY) == 1
    printed = capsys.readouterr().out
    assert "four is unlucky" in printed
    assert "--retry-failed" in printed
    monkeypatch.undo()
    monkeypatch.setenv("EMBENS_DATA", "/nowhere")
    assert problem.reproduce("transition", "--out", tmp_path, *TINY) == 1
    assert problem.reproduce("transition", "--out", tmp_path, *TINY, "--retry-failed") == 0


def test_a_full_disk_is_reported_without_a_traceback(tmp_path, capsys, monkeypatch):
    from reproduction.grid.results import Results

    def add(self, record):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Results, "add", add)
    assert problem.reproduce("transition", "--out", tmp_path, *TINY) == 1
    assert "No space left on device" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either the NAME of an experiment or --all"),
        (["transition", "--all"], "give either the NAME of an experiment or --all"),
        (["transitoin"], "Did you mean 'transition'"),
        (["transition", "--seeds", "0"], "--seeds must be at least 1"),
        (["transition", "--first-seed", "-1"], "--first-seed must be at least 0, got -1"),
        (["transition", "--workers", "-1"], "--workers must be at least 0"),
        (["transition", "--only", "p"], "--only needs AXIS=VALUE"),
        (["transition", "--only", "q=1"], "transition does not sweep q"),
        (["--all", "--only", "q=1"], "--only q=1: no experiment sweeps it; axes:"),
        (["--all", "--members", "3"], "members must be among 1, 2, 4, 8, 16, 32, got 3"),
        (
            ["transition", "--workers", "0", "--engine", "ray"],
            "--workers 0 needs the local engine",
        ),
        (["transition", "--members", "3"], "members must be among 1, 2, 4, 8, 16, 32, got 3"),
        (["transition", "--widths", "3"], "does not sweep width"),
        (["transition", "--preset", "cpu"], "Use --data DIR or --download"),
        (["transition", "--preset", "huge"], "invalid choice"),
    ],
)
def test_a_wrong_call_is_explained(arguments, message, capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        problem.reproduce(*arguments, "--out", tmp_path)
    assert stop.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_cpu_preset_takes_a_folder_of_records(tmp_path, capsys, monkeypatch):
    folder = problem.write_cifar(tmp_path / "records")
    options = "--preset cpu --epochs 1 --workers 0 --seeds 1 --members 2".split()
    options += "--only p=0 law=normal gamma=M".split()
    code = problem.reproduce("transition", *options, "--data", folder, "--out", tmp_path / "out")
    assert code == 0
    manifest = json.loads((tmp_path / "out/transition/cpu/manifest.json").read_text())
    assert len(manifest["setting"]["records"]) == 16
    assert str(tmp_path) not in json.dumps(manifest)
    capsys.readouterr()
    problem.write_cifar(folder, train=41)
    problem.reproduce("transition", *options, "--data", folder, "--out", tmp_path / "out")
    assert "2 cells measured" in capsys.readouterr().out  # other records, other results


def test_full_disk_at_the_end_is_reported_and_the_run_can_continue(out, capsys, monkeypatch):
    def write_together(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("reproduction.grid.results.write_together", write_together)
        assert problem.reproduce("transition", "--out", out, *TINY) == 1
    assert "Results written so far are safe" in capsys.readouterr().out

    assert problem.reproduce("transition", "--out", out, *TINY) == 0
    assert "0 cells measured" in capsys.readouterr().out


def test_results_with_other_epochs_are_kept_apart(out, capsys):
    folder = out / "transition" / "quick"

    problem.reproduce("transition", "--out", out, *TINY, "--epochs", "2", "--seeds", "1")
    assert len(pandas.read_csv(folder / "table.csv")) == 2 + 4
    assert json.loads((folder / "manifest.json").read_text())["cells"] == 3

    capsys.readouterr()
    problem.reproduce("transition", "--out", out, *TINY)
    assert "0 cells measured" in capsys.readouterr().out
    assert len(pandas.read_csv(folder / "table.csv")) == 4 + 8


def test_run_waits_for_another_run_on_its_folder_and_measures_what_is_missing(
    finished_run, tmp_path
):
    folder = tmp_path / "transition" / "quick"
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "reproduction", "transition", *TINY, "--out", str(tmp_path)]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    with FileLock(folder / ".results.lock"):
        waiting = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert "another run uses this folder" in waiting.stdout.readline()
        assert not (folder / "results.jsonl").exists()
        # The run that holds the lock writes its results.
        shutil.copy(finished_run / "transition" / "quick" / "results.jsonl", folder)
    output, _ = waiting.communicate()

    assert "0 cells measured" in output
    assert waiting.returncode == 0


def show(cells, console, error=None):
    """Return what a console shows of an engine that gives made-up outcomes."""

    def engine(cells):
        for cell in cells:
            outcome = {"error": error} if error else {"rows": [{"accuracy": 0.5}]}
            yield cell, {"seconds": 1.0, **outcome}

    assert [cell for cell, _ in show_progress(engine, console, "transition")(cells)] == cells
    return console.file.getvalue()


def test_without_a_terminal_lines_tell_count_time_left_and_the_latest_result():
    lines = show(problem.cells(4), Console(file=io.StringIO(), width=200)).splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("transition 1/4, 0:00:0")
    assert "left: law=normal p=0.5 members=1 gamma=M seed=0: accuracy 0.5" in lines[0]
    many = show(problem.cells(100), Console(file=io.StringIO(), width=200))
    assert len(many.splitlines()) == 10


def test_on_a_terminal_one_line_shows_count_time_left_and_the_latest_result():
    console = Console(file=io.StringIO(), width=110, force_terminal=True)
    text = show(problem.cells(2), console, "Traceback\n[/] ValueError: " + "no " * 50)
    line = text[text.rindex("2/2 (2 failed), 0:00:00 left") :].splitlines()[0]
    assert "members=2 gamma=M seed=0: failed, [/] ValueError" in line
    assert len(line) < 110  # what does not fit is cut


def test_a_missing_package_is_named_before_any_work(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert problem.reproduce("transition", "--out", tmp_path / "out") == 1
    assert "pip install 'embens[reproduction]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [[], ["report"], ["explore"]])
def test_help_is_printed(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        problem.reproduce(*arguments, "--help")
    assert stop.value.code == 0
    assert "usage: python -m reproduction" in capsys.readouterr().out
