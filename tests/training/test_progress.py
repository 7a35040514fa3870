"""Progress of a run on the error stream."""

import sys

import pytest
from training import problem

from embens.training import fit


def lines(capsys) -> list[str]:
    out, err = capsys.readouterr()
    assert out == ""
    return [line.split(":")[0] for line in err.splitlines()]


def test_off_a_terminal_every_epoch_has_a_line(capsys):
    fit(problem.ensemble(), problem.data(), epochs=3)
    assert lines(capsys) == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]


@pytest.mark.parametrize(("progress", "expected"), [(True, 2), (False, 0)])
def test_lines_are_printed_on_request_for_all_epochs_or_for_none(progress, expected, capsys):
    fit(problem.ensemble(), problem.data(), problem.data(), epochs=2, progress=progress)
    assert len(lines(capsys)) == expected


def test_lines_show_the_metrics_of_the_task(capsys):
    data = problem.data()
    fit(problem.ensemble(), data, data, epochs=1)
    text = capsys.readouterr().err
    for label in ("validation loss", "validation accuracy", "validation NLL"):
        assert label in text
    x, _ = data
    fit(problem.ensemble(outputs=1), (x, x.sum(1)), (x, x.sum(1)), epochs=1)
    text = capsys.readouterr().err
    assert "validation RMSE" in text
    assert "accuracy" not in text


def test_a_terminal_shows_progress_with_and_without_rich(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    fit(problem.ensemble(), problem.data(), epochs=2)
    assert "epoch 2/2" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    fit(problem.ensemble(), problem.data(), epochs=2)
    assert "epoch 2/2" in capsys.readouterr().err
    fit(problem.ensemble(), problem.data(), epochs=2, progress=False)
    assert capsys.readouterr().err == ""


def test_a_process_without_an_error_stream_trains(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    fit(problem.ensemble(), problem.data(), epochs=1)
