"""The page holds what the folder has, and nothing from elsewhere."""

from __future__ import annotations

import base64
import gzip
import json
import re
import shutil
from pathlib import Path

import pytest

from reproduction.report import page
from reproduction.storage import DamagedFileError, checksum, seal
from tests.reproduction.report import results


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return results.make(tmp_path_factory.mktemp("results"), "widths", "transition")


def unpack(text):
    return gzip.decompress(base64.b64decode(text)).decode()


def data_of(text):
    match = re.search(r'<script id="data" type="application/json">\n(.*?)\n</script>', text, re.S)
    assert match
    entries = json.loads(match[1])
    return [{**entry, "table": json.loads(unpack(entry["table"]))} for entry in entries]


def library_of(text):
    (library,) = re.findall(r'<script id="library" type="text/plain">(.*?)</script>', text, re.S)
    return unpack(library)


def test_experiments_come_in_the_order_of_the_paper(folder):
    assert [entry["name"] for entry in page.collect(folder)] == ["transition", "widths"]


def test_the_page_holds_charts_claims_tables_and_set_up(folder):
    text = page.write(folder).read_text()
    entries = data_of(text)

    for entry, written in zip(entries, page.collect(folder), strict=True):
        assert entry == written
        assert entry["figure"]["panels"][0]["curves"]
        assert entry["claims"][0]["verdict"]
        assert len(entry["table"]) == entry["manifest"]["rows"] + 1 > 10
        assert entry["manifest"]["versions"]["torch"]
        assert entry["manifest"]["machine"]["cores"]


def test_the_page_of_everything_is_small_and_has_the_library_once(folder):
    published = page.write(Path(__file__).parents[3] / "docs" / "reproduction", folder / "all.html")
    assert published.stat().st_size < 3_500_000
    assert "Plotly" in library_of(published.read_text())


def test_nothing_is_loaded_from_elsewhere(folder):
    text = page.write(folder).read_text()
    assert not re.search(r'(src|href)\s*=\s*["\']?(https?:)?//', text)
    assert "@import" not in text
    assert "MIT" in library_of(text)[:400]  # its licence stays with it


def test_no_text_can_end_the_script_it_is_in(folder):
    entries = page.collect(folder)
    entries[0]["manifest"]["about"] = "</script><script>alert(1)</script>{{script}}"
    text = page.render(entries)
    assert "<script>alert(1)" not in text
    assert data_of(text)[0]["manifest"]["about"].endswith("{{script}}")


@pytest.mark.parametrize("text", ['{"experiment"', "[1, 2]", '{"files": []}', "3", "[" * 9999])
def test_a_manifest_of_something_else_is_left_out_and_named(folder, tmp_path, text):
    shutil.copytree(folder / "widths", tmp_path / "widths")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text(text)
    with pytest.warns(UserWarning, match=r"other/manifest.json is skipped"):
        assert [entry["name"] for entry in page.collect(tmp_path)] == ["widths"]


def test_every_missing_key_is_reported(folder, tmp_path):
    here = shutil.copytree(folder / "widths" / "quick", tmp_path / "widths" / "quick")
    whole = json.loads((here / "manifest.json").read_text())
    for key in whole:
        less = {k: v for k, v in whole.items() if k != key}
        (here / "manifest.json").write_text(json.dumps(less))
        if key == "experiment":
            continue  # then it is of something else
        with pytest.raises(
            DamagedFileError, match=r"manifest.json is damaged: its checksum does not match"
        ):
            page.collect(tmp_path)


@pytest.mark.parametrize("name", ["manifest.json", "claims.json", "figure.json", "table.csv"])
def test_a_digit_that_was_changed_is_found_and_so_is_a_file_that_is_gone(folder, tmp_path, name):
    here = shutil.copytree(folder / "widths" / "quick", tmp_path / "widths" / "quick")
    path = here / name
    text = path.read_text()
    place = re.search(r"\d", text).start()
    path.write_text(text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1 :])
    with pytest.raises(DamagedFileError, match=f"{name} .*checksum"):
        page.collect(tmp_path)
    path.unlink()
    message = "has no results" if name == "manifest.json" else f"No such file or directory.*{name}"
    with pytest.raises((DamagedFileError, FileNotFoundError), match=message):
        page.collect(tmp_path)


@pytest.mark.parametrize("key", ["experiment", "preset"])
def test_a_forged_manifest_is_an_error(folder, tmp_path, key):
    here = shutil.copytree(folder / "widths" / "quick", tmp_path / "widths" / "quick")
    manifest = json.loads((here / "manifest.json").read_text())
    del manifest["sha256"]
    (here / "manifest.json").write_text(json.dumps(seal({**manifest, key: ["a"]})))
    with pytest.raises(DamagedFileError, match="quick is damaged"):
        page.collect(tmp_path)


@pytest.mark.parametrize(("name", "text"), [("figure.json", "[NaN]"), ("claims.json", "{")])
def test_forged_figures_and_claims_are_errors(folder, tmp_path, name, text):
    here = shutil.copytree(folder / "widths" / "quick", tmp_path / "widths" / "quick")
    (here / name).write_text(text)
    manifest = json.loads((here / "manifest.json").read_text())
    del manifest["sha256"]
    manifest["files"][name] = checksum(text)
    (here / "manifest.json").write_text(json.dumps(seal(manifest)))
    with pytest.raises(DamagedFileError, match="quick is damaged"):
        page.collect(tmp_path)
