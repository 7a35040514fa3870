"""The callback protocol and the loggers."""

from __future__ import annotations

import csv

import pytest
import torch
from training import problem

from embens.training import Callback, Checkpoint, CSVLog, Log, fit

SETTINGS = {"epochs": 4, "batch_size": 16, "lr": 0.05}


def make():
    return problem.ensemble(dropout=0.3)


def test_a_callback_sees_steps_epochs_and_the_end_and_changes_nothing():
    plain, watched, recorder = make(), make(), problem.Recorder()
    fit(plain, problem.data(), **SETTINGS)
    history = fit(watched, problem.data(), **SETTINGS, callbacks=[recorder])
    problem.assert_equal(problem.weights(plain), problem.weights(watched))
    assert [steps for _, _, steps in recorder.steps] == list(range(1, 17))
    assert [epoch for epoch, _, _ in recorder.steps] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    sizes = [16, 16, 16, 12]
    mean = sum(n * loss for n, loss in zip(sizes, recorder.losses[:4], strict=True)) / 60
    assert mean == pytest.approx(history.epochs[0]["loss"], rel=1e-5)
    assert recorder.rates[0]["lr"] == history.epochs[0]["lr"]
    assert repr(recorder.epochs) == repr(history.epochs)
    assert recorder.ends == [history]


def test_a_function_is_called_after_each_epoch_and_changes_nothing():
    plain, watched, records = make(), make(), []

    def callback(ensemble, record):
        assert ensemble is watched
        torch.rand(())
        records.append(record)

    fit(plain, problem.data(), **SETTINGS)
    history = fit(watched, problem.data(), **SETTINGS, callbacks=[callback])
    problem.assert_equal(problem.weights(plain), problem.weights(watched))
    assert repr(records) == repr(history.epochs)


def test_a_callback_that_changes_training_shares_the_random_generators():
    class Noise(Callback):
        changes_training = True

        def on_gradients(self, run):
            torch.rand(1)

    plain, changed = make(), make()
    fit(plain, problem.data(), **SETTINGS)
    fit(changed, problem.data(), **SETTINGS, callbacks=[Noise()])
    with pytest.raises(AssertionError):
        problem.assert_equal(problem.weights(plain), problem.weights(changed))


class Misspelled(Callback):
    def on_epochs(self, run, record):
        pass


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        ([3], "expected objects of a subclass of embens.training.Callback.* got 3"),
        ([problem.Recorder], "expected objects of a subclass"),
        ([Misspelled()], "Misspelled has an unknown on_epochs; did you mean 'on_epoch'"),
        (problem.Recorder(), "expected a list of callbacks, got Recorder"),
    ],
)
def test_objects_that_would_not_be_called_raise(callbacks, message):
    with pytest.raises(TypeError, match=message):
        fit(make(), problem.data(), epochs=1, callbacks=callbacks)


def rows_of(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("every", [None, 3])
@pytest.mark.parametrize("steps", [1, 10])
def test_the_table_of_a_resumed_run_has_every_row_once(every, steps, tmp_path):
    path, whole = tmp_path / "log.csv", tmp_path / "whole.csv"
    callbacks = [Checkpoint(tmp_path / "run", every), CSVLog(path)]
    interrupted = [*callbacks, problem.Interrupt(steps)]
    with pytest.raises(problem.Stop):
        fit(make(), problem.data(), **SETTINGS, callbacks=interrupted)
    if path.exists():
        path.write_text(path.read_text() + "1,2,half a ro")
    callbacks = [Checkpoint(tmp_path / "run", every), CSVLog(path)]
    fit(make(), problem.data(), **SETTINGS, callbacks=callbacks)
    fit(make(), problem.data(), **SETTINGS, callbacks=[CSVLog(whole)])
    rows, expected = rows_of(path), rows_of(whole)
    assert len(rows) == 4
    for row in rows + expected:
        row.pop("seconds", None)
    assert rows == expected


def test_one_table_serves_several_runs_and_a_foreign_file_is_kept(tmp_path):
    table = CSVLog(tmp_path / "log.csv")
    for _ in range(2):
        fit(make(), problem.data(), **SETTINGS, callbacks=[table])
        assert [row["epoch"] for row in rows_of(table.path)] == ["1", "2", "3", "4"]
    other = tmp_path / "data.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="other columns"):
        fit(make(), problem.data(), **SETTINGS, callbacks=[CSVLog(other)])
    assert other.read_text() == "a,b\n1,2\n"


class Logger:
    def __init__(self):
        self.seen = []

    def log(self, record):
        self.seen.append(record)


class Writer(Logger):
    def add_scalar(self, name, value, step):
        self.seen.append((name, value, step))


def test_loggers_and_writers_get_the_records():
    logger, writer = Logger(), Writer()
    callbacks = [Log(logger), Log(writer)]
    history = fit(make(), problem.data(), **SETTINGS, callbacks=callbacks)
    assert repr(logger.seen) == repr(history.epochs)
    losses = [entry for entry in writer.seen if entry[0] == "loss"]
    assert [step for *_, step in losses] == [1, 2, 3, 4]
    with pytest.raises(TypeError, match=r"log\(dict\) or add_scalar; got list"):
        Log([])


class Counter(Callback):
    steps = 0

    def on_step(self, run):
        self.steps += 1

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def test_the_state_of_a_callback_is_saved_in_checkpoints(tmp_path):
    callbacks = [Counter(), Checkpoint(tmp_path, every=3), problem.Interrupt(10)]
    with pytest.raises(problem.Stop):
        fit(make(), problem.data(), **SETTINGS, callbacks=callbacks)
    first, second = Counter(), Counter()
    callbacks = [Checkpoint(tmp_path, every=3), first, second]
    fit(make(), problem.data(), **SETTINGS, callbacks=callbacks)
    assert first.steps == 16
    assert second.steps == 16 - 9  # it has no state in the checkpoint of step 9
