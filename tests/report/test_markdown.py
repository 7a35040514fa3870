"""The Markdown page says what the folder's claims say."""

from __future__ import annotations

import json
import re

import pytest
from report import results

from embens.report import markdown


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return results.make(tmp_path_factory.mktemp("results"), "widths", "gradients")


@pytest.fixture(scope="module")
def text(folder):
    return markdown.write(folder, folder / "pages" / "claims.md").read_text()


def test_every_claim_has_a_line_with_its_verdict(folder, text):
    lines = text.splitlines()
    for path in folder.rglob("claims.json"):
        for claim in json.loads(path.read_text()):
            statement = claim["statement"].replace("|", "\\|")
            (line,) = (x for x in lines if f"| {statement} |" in x)
            assert line.startswith(f"| **{claim['verdict']}** |")
            assert f"{claim['value']:.3g}" in line


def test_tables_have_equal_columns_and_pictures_are_there(folder, text):
    for block in re.findall(r"(?:^\|.*\n)+", text, re.M):
        counts = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(counts) == 1
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert len(pictures) == 2
    for picture in pictures:
        assert (folder / "pages" / picture).resolve().is_file()


def test_the_summary_links_to_sections(text):
    for anchor in re.findall(r"\]\(#(.*?)\)", text):
        assert re.search(rf"^## {anchor.rpartition('-')[0]} ", text, re.M)
