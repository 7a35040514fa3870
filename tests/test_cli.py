"""The command line."""

from __future__ import annotations

import json

import pytest

from embens import cli, demo


def test_the_demo_ends_in_a_table_numbers_and_a_picture(tmp_path, capsys):
    options = "--seeds 2 --epochs 1 --members 1 2 --width 8 --workers 1".split()
    assert cli.main(["demo", "--out", str(tmp_path / "out"), *options]) == 0
    printed = capsys.readouterr().out
    picture = tmp_path / "out" / "demo.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "picture:" in printed
    assert "demo.png" in printed
    for family in demo.FAMILIES:
        assert family in printed
    rows = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert len(rows) == 2 * 2 * len(demo.FAMILIES)
    assert all(0 <= row["accuracy"] <= 1 for row in rows)


def test_a_run_of_the_demo_depends_on_its_cell_alone():
    cell = demo.Cell("BatchEnsemble p=0", 2, 0, 1, 8)
    first, second = demo.measure(cell), demo.measure(cell)
    for key in first:
        assert first[key] == second[key] or key == "seconds"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["dmeo"], "invalid choice"),
        (["demo", "--seeds", "0"], "must be at least 1"),
        (["demo", "--members", "2", "-1"], "must be at least 1"),
    ],
)
def test_a_wrong_call_is_explained(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_missing_extra_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert cli.main(["demo", "--out", str(tmp_path / "out")]) == 1
    assert "pip install 'embens[demo]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
