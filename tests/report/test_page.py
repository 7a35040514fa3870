"""The page holds what the folder has, and nothing from elsewhere."""

from __future__ import annotations

import json
import re

import pytest
from report import results

from embens.report import page


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return results.make(tmp_path_factory.mktemp("results"), "widths", "transition")


def data_of(text):
    found = re.search(r'<script id="data" type="application/json">\n(.*?)\n</script>', text, re.S)
    assert found
    return json.loads(found[1])


def test_experiments_come_in_the_order_of_the_paper(folder):
    assert [entry["name"] for entry in page.collect(folder)] == ["transition", "widths"]


def test_the_page_holds_charts_claims_tables_set_up_and_pictures(folder):
    text = page.write(folder).read_text()
    entries = data_of(text)
    for entry, written in zip(entries, page.collect(folder), strict=True):
        assert entry == written
        assert entry["figure"]["panels"][0]["curves"]
        assert entry["claims"][0]["verdict"]
        assert len(entry["table"]["rows"]) > 10
        assert entry["manifest"]["versions"]["torch"]
        assert entry["manifest"]["machine"]["cores"]
        assert entry["picture"].startswith("data:image/png;base64,")


def test_nothing_is_loaded_from_elsewhere(folder):
    text = page.write(folder).read_text()
    own = text.replace(page._library(), "")
    assert not re.search(r'(src|href)\s*=\s*["\']?(https?:)?//', own)
    assert "@import" not in own
    assert "Plotly" in text
    assert "MIT" in page._library()[:400]  # its licence stays with it


def test_no_text_can_end_the_script_it_is_in(folder):
    entries = page.collect(folder)
    entries[0]["manifest"]["about"] = "</script><script>alert(1)</script>{{script}}"
    text = page.render(entries)
    assert "<script>alert(1)" not in text
    assert data_of(text)[0]["manifest"]["about"].endswith("{{script}}")


def test_a_half_written_folder_is_left_out(folder, tmp_path):
    results.make(tmp_path, "widths")
    broken = tmp_path / "lld" / "quick"
    broken.mkdir(parents=True)
    (broken / "manifest.json").write_text('{"experiment"')
    assert [entry["name"] for entry in page.collect(tmp_path)] == ["widths"]


def test_a_manifest_of_something_else_is_left_out(tmp_path):
    results.make(tmp_path, "widths")
    for name, text in (("list", "[1, 2]"), ("object", '{"files": []}'), ("number", "3")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(text)
    assert [entry["name"] for entry in page.collect(tmp_path)] == ["widths"]
