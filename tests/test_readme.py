"""The README holds: its code runs, its links exist, and it is short."""

from __future__ import annotations

import re

import pytest
from pages import ROOT, anchors, blocks, check_references, links, run

README = ROOT / "README.md"
LINKED = sorted({target.partition("#")[0] for target in links(README) if ".md" in target})


@pytest.mark.filterwarnings("ignore:Only .* held-out rows calibrate")
def test_every_block_runs_in_order_and_prints_what_is_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = run(README)
    printed = capsys.readouterr().out
    shown = "".join(re.findall(r"```text\n(.*?)```", README.read_text(), re.DOTALL))
    # Digits depend on the machine and on the random state.
    digits = re.compile(r"\d+(\.\d+)?")

    assert digits.sub("#", shown) == digits.sub("#", printed)
    assert names["outputs"].shape == (4, 100, 10)
    assert names["scores"]["accuracy"] > 0.9
    assert 0.8 < names["inside"].mean() <= 1


def test_it_is_short():
    assert len(README.read_text().splitlines()) <= 120


def test_the_first_example_has_at_most_twelve_lines():
    assert len([line for line in blocks(README)[0].splitlines() if line.strip()]) <= 12


def test_no_sentence_has_three_percentages():
    sentences = re.split(r"[.:;]\s|\n\n|\|", README.read_text())
    assert max(len(re.findall(r"\d\s?%", sentence)) for sentence in sentences) < 3


def test_it_has_no_sphinx_directives():
    text = README.read_text()
    assert ":::" not in text
    assert "```{" not in text


def test_the_picture_and_its_description_are_one_line():
    assert re.search(r"(?m)^!\[.+\]\(docs/reproduction/.+\.png\)$", README.read_text())


def test_links_files_and_make_targets_exist():
    check_references(README)


@pytest.mark.parametrize("page", LINKED)
def test_links_of_the_pages_behind_the_readme_exist(page):
    check_references(ROOT / page)


def test_anchors_are_those_of_a_forge(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# γ is a `rate`\n## A [link](to.md), twice\n## A link, twice\n```\n# code\n```\n"
    )
    assert anchors(page) == {"γ-is-a-rate", "a-link-twice", "a-link-twice-1"}


def test_a_link_to_a_missing_heading_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n[here](#title) and [there](#no-such-heading)\n")
    with pytest.raises(AssertionError, match="no-such-heading"):
        check_references(page)
