"""The command line."""

from __future__ import annotations

import sys

import pytest

import embens
from embens.cli import COMMANDS, main


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_says_how_it_is_used(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"usage: embens {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["reprodcue"], "invalid choice"),
        (["reproduce", "transitoin"], "did you mean 'transition'"),
        (["reproduce", "transition", "--seeds", "0"], "must be at least 1"),
    ],
)
def test_a_wrong_call_is_explained(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_missing_extra_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["reproduce", "transition", "--out", str(tmp_path / "out")]) == 1
    assert "pip install 'embens[experiments]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"embens {embens.__version__}\n"
