"""The pages of the documentation: their code runs in order, and their links exist."""

from __future__ import annotations

import re

import pytest
from pages import ROOT, blocks, check_references, run

DOCS = ROOT / "docs"
PRINTED = ("index.md", "tutorial.md", "how-it-works.md", "how-to/uncertainty.md")
"""Pages that show everything that they print."""
PAGES = {str(path.relative_to(DOCS)): path for path in sorted(DOCS.rglob("*.md"))}
WITH_CODE = [name for name, path in PAGES.items() if blocks(path)]


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of Lightning
@pytest.mark.filterwarnings("ignore:.*many workers")
@pytest.mark.parametrize("page", [name for name in WITH_CODE if name not in PRINTED])
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    run(PAGES[page])


@pytest.mark.parametrize("page", PAGES)
def test_links_files_and_make_targets_of_a_page_exist(page):
    check_references(PAGES[page])


@pytest.mark.parametrize("page", PRINTED)
def test_a_page_shows_everything_that_it_prints(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run(DOCS / page)
    printed = capsys.readouterr().out
    shown = "".join(re.findall(r"```text\n(.*?)```", (DOCS / page).read_text(), re.DOTALL))
    # Digits after a point depend on the machine.
    digits = re.compile(r"\d+\.\d+")

    assert digits.sub("#", shown) == digits.sub("#", printed)
