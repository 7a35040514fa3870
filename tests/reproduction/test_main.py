"""``python -m reproduction report`` and ``explore`` from the outside."""

from __future__ import annotations

import json
import shutil

import pytest

from reproduction.__main__ import main
from reproduction.report import explorer
from tests.reproduction.report import results


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return results.make(tmp_path_factory.mktemp("results"), "widths")


def call(*arguments):
    return main(["report", *map(str, arguments)])


def test_the_command_writes_the_page_and_says_where(folder, tmp_path, capsys):
    assert call(folder, "--out", tmp_path / "sub" / "page.html") == 0
    assert (tmp_path / "sub" / "page.html").exists()
    assert "page.html" in capsys.readouterr().out


def test_redrawing_keeps_table_and_origin(folder, tmp_path):
    here = shutil.copytree(folder, tmp_path / "results") / "widths" / "quick"
    rows, before = (
        (here / "table.csv").read_bytes(),
        json.loads((here / "manifest.json").read_text()),
    )
    (here / "figure.png").unlink()
    assert call(tmp_path / "results", "--redraw") == 0
    after = json.loads((here / "manifest.json").read_text())
    assert (here / "table.csv").read_bytes() == rows
    assert (here / "figure.png").exists()
    changed = {name for name in before if before[name] != after[name]}
    assert changed <= {"files", "sha256"}


def test_an_empty_folder_is_explained(tmp_path, capsys):
    with pytest.raises(SystemExit):
        call(tmp_path)
    assert "Run `python -m reproduction transition" in " ".join(capsys.readouterr().err.split())


def test_the_explorer_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(explorer, "FAMILIES", ())  # no positions of the controls
    assert main(["explore", "--out", str(tmp_path / "here" / "page.html")]) == 0
    assert "page.html" in capsys.readouterr().out.replace("\n", "")
    assert "Explore an embedded ensemble" in (tmp_path / "here" / "page.html").read_text()
