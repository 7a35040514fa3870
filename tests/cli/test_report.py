"""``embens report`` from the outside."""

from __future__ import annotations

import pytest
from report import results

from embens.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return results.make(tmp_path_factory.mktemp("results"), "widths")


def call(*arguments):
    return main(["report", *map(str, arguments)])


def test_the_command_writes_the_page_and_says_where(folder, tmp_path, capsys):
    assert call(folder, "--out", tmp_path / "sub" / "page.html") == 0
    assert (tmp_path / "sub" / "page.html").exists()
    assert "page.html" in capsys.readouterr().out


def test_a_name_that_ends_in_md_gives_the_claims_alone(folder, tmp_path):
    assert call(folder, "--out", tmp_path / "claims.md") == 0
    assert (tmp_path / "claims.md").read_text().startswith("# Claims of the paper")


def test_an_empty_folder_is_explained(tmp_path, capsys):
    with pytest.raises(SystemExit):
        call(tmp_path)
    assert "Run `embens reproduce transition" in " ".join(capsys.readouterr().err.split())
