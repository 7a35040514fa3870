"""What a run shows while it goes on."""

from __future__ import annotations

import sys

from training import problem

from embens.training import fit


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
