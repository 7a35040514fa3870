"""The pages are true: their code runs, in order, and what they point to exists."""

from __future__ import annotations

import pytest
from pages import ROOT, blocks, check_references, run

DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(DOCS)): path for path in sorted(DOCS.rglob("*.md"))}


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # Lightning's own
@pytest.mark.filterwarnings("ignore:.*many workers")
@pytest.mark.parametrize("page", [name for name, path in PAGES.items() if blocks(path)])
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    run(PAGES[page])


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_points_to_exists(page):
    check_references(PAGES[page])
