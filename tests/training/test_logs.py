"""Tables and loggers that get the record of each epoch."""

from __future__ import annotations

import csv

import pytest
from training import problem

from embens.training import Checkpoint, CSVLog, Log, fit

SETTINGS = {"epochs": 4, "batch_size": 16, "lr": 0.05}


def make():
    return problem.ensemble(dropout=0.3)


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
    other.write_text("epoch,b\n1,2\n")

    with pytest.raises(ValueError, match="other columns"):
        fit(make(), problem.data(), **SETTINGS, callbacks=[CSVLog(other)])
    assert other.read_text() == "epoch,b\n1,2\n"


@pytest.mark.parametrize("rows", [b"\xff\xfe\x00", b"epoch,loss\n", b"one,2\n", b"\n"])
def test_a_file_that_no_run_wrote_is_kept(rows, tmp_path):
    path = tmp_path / "log.csv"
    if not rows.startswith(b"\xff"):
        fit(make(), problem.data(), **SETTINGS, callbacks=[CSVLog(path)])
        rows = path.read_bytes() + rows
    path.write_bytes(rows)

    with pytest.raises(ValueError, match="of this run"):
        fit(make(), problem.data(), **SETTINGS, callbacks=[CSVLog(path)])
    assert path.read_bytes() == rows


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
