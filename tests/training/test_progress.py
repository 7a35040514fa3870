"""Progress on the error stream."""

from __future__ import annotations

import sys

from training import problem

from embens.training import fit


def test_there_is_no_output_unless_it_is_requested(capsys):
    fit(problem.ensemble(), problem.data(), epochs=2)
    assert capsys.readouterr() == ("", "")
    fit(problem.ensemble(), problem.data(), problem.data(), epochs=2, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split(":")[0] for line in err.splitlines()] == ["epoch 1/2", "epoch 2/2"]
    assert "validation accuracy" in err


def test_a_terminal_shows_progress_with_and_without_rich(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    fit(problem.ensemble(), problem.data(), epochs=2)
    assert "epoch 2/2" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    fit(problem.ensemble(), problem.data(), epochs=2)
    assert "epoch 2/2" in capsys.readouterr().err
    fit(problem.ensemble(), problem.data(), epochs=2, progress=False)
    assert capsys.readouterr().err == ""
