"""The pages of the documentation: their code runs in order, and their links exist."""

from __future__ import annotations

import re

import pytest
from pages import ROOT, blocks, check_references, run

DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(DOCS)): path for path in sorted(DOCS.rglob("*.md"))}


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of Lightning
@pytest.mark.filterwarnings("ignore:.*many workers")
@pytest.mark.parametrize("page", [name for name, path in PAGES.items() if blocks(path)])
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    run(PAGES[page])


@pytest.mark.parametrize("page", PAGES)
def test_links_files_and_make_targets_of_a_page_exist(page):
    check_references(PAGES[page])


def test_the_tutorial_shows_what_it_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run(DOCS / "tutorial.md")
    printed = capsys.readouterr().out
    shown = "".join(re.findall(r"```text\n(.*?)```", (DOCS / "tutorial.md").read_text(), re.DOTALL))
    # Digits after a point depend on the machine.
    digits = re.compile(r"\d+\.\d+")
    assert digits.sub("#", shown) == digits.sub("#", printed)
