"""Callbacks: what they see, when, and what they leave as it is."""

from __future__ import annotations

import csv
import sys

import pytest
import torch
from training import problem
from training.test_checkpoint import SETTINGS, Stop, make, stopping

from embens.training import CSV, Log, fit


class Watching:
    def __init__(self):
        self.steps, self.epochs, self.ends = [], [], []

    def on_step(self, ensemble, record):
        torch.rand(3)
        self.steps.append(record)

    def on_epoch(self, ensemble, record):
        self.epochs.append(record)

    def on_end(self, ensemble, history):
        self.ends.append(history)


def test_an_object_sees_steps_epochs_and_the_end_and_changes_nothing():
    plain, watched, watching = make(), make(), Watching()
    fit(plain, problem.data(), **SETTINGS)
    history = fit(watched, problem.data(), **SETTINGS, callbacks=[watching])
    problem.assert_equal(problem.weights(plain), problem.weights(watched))
    assert [row["step"] for row in watching.steps] == list(range(1, 17))
    assert [row["epoch"] for row in watching.steps] == [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4
    sizes = [16, 16, 16, 12]
    mean = sum(n * row["loss"] for n, row in zip(sizes, watching.steps[:4], strict=True)) / 60
    assert mean == pytest.approx(history.epochs[0]["loss"], rel=1e-5)
    assert watching.steps[0]["lr"] == history.epochs[0]["lr"]
    assert repr(watching.epochs) == repr(history.epochs)
    assert watching.ends == [history]


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (3, "expected functions, or objects with any of on_step, on_epoch, on_end; got int"),
        (type("Mine", (), {"on_epochs": None})(), "Mine has an unknown on_epochs; did you mean"),
    ],
)
def test_what_would_not_be_called_is_refused(callback, message):
    with pytest.raises(TypeError, match=message):
        fit(make(), problem.data(), epochs=1, callbacks=[callback])
    with pytest.raises(TypeError, match="expected a list"):
        fit(make(), problem.data(), epochs=1, callbacks=Watching())


def rows_of(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("every", [None, 3])
@pytest.mark.parametrize("moment", [5, 31])
def test_a_table_of_a_run_that_was_stopped_has_every_row_once(every, moment, tmp_path):
    path, whole = tmp_path / "log.csv", tmp_path / "whole.csv"
    options = {"checkpoint": tmp_path / "run", "every": every}
    stopped = SETTINGS | {"criterion": stopping(moment)}
    with pytest.raises(Stop):
        fit(make(), problem.data(), **stopped, **options, callbacks=[CSV(path)])
    if path.exists():
        path.write_text(path.read_text() + "1,2,half a ro")
    fit(make(), problem.data(), **SETTINGS, **options, callbacks=[CSV(path)])
    fit(make(), problem.data(), **SETTINGS, callbacks=[CSV(whole)])
    found, expected = rows_of(path), rows_of(whole)
    assert len(found) == 4
    for row in found + expected:
        row.pop("seconds", None)
    assert found == expected


def test_one_table_serves_runs_in_turn_and_a_foreign_file_is_kept(tmp_path):
    table = CSV(tmp_path / "log.csv")
    for _ in range(2):
        fit(make(), problem.data(), **SETTINGS, callbacks=[table])
        assert [row["epoch"] for row in rows_of(table.path)] == ["1", "2", "3", "4"]
    other = tmp_path / "data.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="other columns"):
        fit(make(), problem.data(), **SETTINGS, callbacks=[CSV(other)])
    assert other.read_text() == "a,b\n1,2\n"


def test_any_logger_gets_the_records():
    class Logger:
        def __init__(self):
            self.seen = []

        def log(self, record):
            self.seen.append(record)

    class Writer(Logger):
        def add_scalar(self, name, value, step):
            self.seen.append((name, value, step))

    logger, writer = Logger(), Writer()
    callbacks = [Log(logger), Log(writer)]
    history = fit(make(), problem.data(), **SETTINGS, callbacks=callbacks)
    assert repr(logger.seen) == repr(history.epochs)
    losses = [entry for entry in writer.seen if entry[0] == "loss"]
    assert [step for *_, step in losses] == [1, 2, 3, 4]
    with pytest.raises(TypeError, match=r"log\(dict\) or add_scalar; got list"):
        Log([])


def test_the_state_of_a_callback_is_in_the_checkpoints(tmp_path):
    class Counting:
        steps = 0

        def on_step(self, ensemble, record):
            self.steps += 1

        def state_dict(self):
            return {"steps": self.steps}

        def load_state_dict(self, state):
            self.steps = state["steps"]

    stopped = SETTINGS | {"criterion": stopping(31)}
    with pytest.raises(Stop):
        fit(make(), problem.data(), **stopped, checkpoint=tmp_path, every=3, callbacks=[Counting()])
    counting = Counting()
    fit(make(), problem.data(), **SETTINGS, checkpoint=tmp_path, every=3, callbacks=[counting])
    assert counting.steps == 16


def test_progress_is_quiet_unless_asked_for(capsys, monkeypatch):
    fit(problem.ensemble(), problem.data(), epochs=2)
    assert capsys.readouterr() == ("", "")
    fit(problem.ensemble(), problem.data(), problem.data(), epochs=2, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split(":")[0] for line in err.splitlines()] == ["epoch 1/2", "epoch 2/2"]
    assert "validation accuracy" in err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    fit(problem.ensemble(), problem.data(), epochs=2)
    assert "epoch 2/2" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    fit(problem.ensemble(), problem.data(), epochs=2)
    assert "epoch 2/2" in capsys.readouterr().err
