"""``embens explore`` writes its page where it was told to."""

from __future__ import annotations

from embens.cli import main
from embens.report import explorer


def test_the_page_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(explorer, "FAMILIES", {})  # no positions of the dials
    assert main(["explore", "--out", str(tmp_path / "here" / "page.html")]) == 0
    assert "page.html" in capsys.readouterr().out.replace("\n", "")
    assert "Turn the dials" in (tmp_path / "here" / "page.html").read_text()
