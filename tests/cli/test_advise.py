"""The command ``embens advise``."""

from __future__ import annotations

import json

import pytest

from embens.cli import main

NETWORK = "mlp(inputs=64, width=8, depth=2, outputs=10)"


def test_the_command_prints_text_or_numbers(capsys):
    pytest.importorskip("sklearn")
    arguments = ["advise", NETWORK, "--members", "2", "--epochs", "6", "--parameters", "1.5"]
    arguments += ["--widths", "0.5", "1"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "embens." in text
    assert "points over one network" in text
    assert main([*arguments, "--json"]) == 0
    proposals = json.loads(capsys.readouterr().out)
    assert all(p["cost"]["parameters"] <= 1.5 for p in proposals)
    assert {p["width"] for p in proposals} <= {0.5, 1.0}
    losses = [p["log_loss"] for p in proposals]
    assert losses == sorted(losses)
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == proposals


def test_what_is_wrong_is_said_without_a_traceback(capsys):
    with pytest.raises(SystemExit):
        main(["advise", NETWORK, "--parameters", "0.1", "--epochs", "6"])
    assert "no ensemble keeps to this budget" in capsys.readouterr().err


def test_a_network_of_a_file_has_no_other_widths(capsys):
    with pytest.raises(SystemExit):
        main(["advise", "net.py:build", "--widths", "0.5", "1"])
    assert "the network of a file has its own" in capsys.readouterr().err
