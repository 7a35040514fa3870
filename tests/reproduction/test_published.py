"""Verdicts and figures in docs/reproduction follow from its tables."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

from reproduction.claims import judge
from reproduction.figures import NAMES
from reproduction.grid.cells import load_experiment, pooled_axes
from reproduction.grid.results import make_figure
from reproduction.grid.settings import UNTUNED
from reproduction.report import page
from tests.reproduction.battery import check_figure

FOLDER = Path(__file__).parents[2] / "docs" / "reproduction"
PUBLISHED = sorted(path.parent for path in FOLDER.rglob("manifest.json"))


NOT_RUN = {"compare"}
"""Experiments without published results at `quick`."""
SHORT = {("gain", "quick"), ("widths", "earlier")}
"""Tables with pooled residuals that are judged fast enough for every run of the tests."""


def as_case(folder):
    """Return a folder as a case of a test; judging large tables with pooled residuals is long."""
    name = folder.parent.name
    is_long = pooled_axes(name) and (name, folder.name) not in SHORT
    marks = [pytest.mark.long] if is_long else []
    return pytest.param(folder, marks=marks, id=f"{name}-{folder.name}")


def test_every_experiment_was_run():
    published = {path.parent.name for path in PUBLISHED if path.name == "quick"}
    assert published == set(NAMES) - NOT_RUN


PRESET_INDEPENDENT = {"cost"}
"""Experiments that measure networks of another size than the preset's."""


def test_results_of_another_preset_are_not_published_as_cpu():
    for folder in FOLDER.glob("*/cpu"):
        if folder.parent.name in PRESET_INDEPENDENT:
            continue
        setting = json.loads((folder / "manifest.json").read_text())["setting"]
        assert tuple(setting["channels"]) == UNTUNED["cpu"].channels, folder
        for name in ("train", "test", "image", "labels"):
            assert setting[name] == getattr(UNTUNED["cpu"], name), folder


@pytest.mark.parametrize("folder", [as_case(folder) for folder in PUBLISHED])
def test_the_verdicts_follow_from_the_table(folder):
    pandas = pytest.importorskip("pandas")
    table = pandas.read_csv(folder / "table.csv", dtype={"gamma": str})
    written = json.loads((folder / "claims.json").read_text())
    name = folder.parent.name

    judged = judge(load_experiment(name).CLAIMS, table, pooled_axes(name))

    assert len(judged) == len(written)
    for claim, expected in zip(judged, written, strict=True):
        actual = claim.to_dict()
        assert actual["statement"] == expected["statement"]
        assert actual["verdict"] == expected["verdict"], expected["statement"]
        for name in ("value", "low", "high"):
            if expected[name] is None:
                assert actual[name] is None, expected["statement"]
            else:
                approximate = pytest.approx(expected[name], rel=1e-2, abs=1e-4)
                assert actual[name] == approximate, expected["statement"]


def test_equal_systems_of_compare_have_equal_results():
    # At a budget of M, M networks are separate networks. They are measured in separate runs.
    pandas = pytest.importorskip("pandas")
    table = pandas.read_csv(FOLDER / "compare" / "cpu" / "table.csv")
    table = table.drop(columns=["training_seconds", "inference_seconds", "seconds"])
    by_cell = table.set_index(["system", "budget", "seed"])

    pairs = []
    for system, budget in (("two networks", 2), ("four networks", 4)):
        for seed in sorted(set(table["seed"])):
            first, second = (system, budget, seed), ("separate networks", budget, seed)
            if first in by_cell.index and second in by_cell.index:
                pairs.append((by_cell.loc[first], by_cell.loc[second]))
    if not pairs:
        pytest.skip("no budget was measured for both systems")
    for first, second in pairs:
        pandas.testing.assert_series_equal(first, second, check_names=False, rtol=1e-5)


@pytest.mark.parametrize("folder", PUBLISHED, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_the_figure_is_that_of_the_table(folder):
    pandas = pytest.importorskip("pandas")
    table = pandas.read_csv(folder / "table.csv", dtype={"gamma": str})
    written = json.loads((folder / "figure.json").read_text())

    figure = make_figure(load_experiment(folder.parent.name), table)

    check_figure(figure)
    assert len(figure.panels) == len(written["panels"])
    for panel, expected in zip(figure.panels, written["panels"], strict=True):
        assert panel.title == expected["title"]
        labels = [curve["label"] for curve in expected["curves"]]
        assert [curve.label for curve in panel.curves] == labels


@pytest.fixture(scope="module")
def claims_page():
    markdown = runpy.run_path(str(FOLDER / "claims.py"))["markdown"]
    return markdown(page.collect(FOLDER))


def test_the_page_of_claims_is_the_one_that_the_results_give(claims_page):
    assert (FOLDER / "claims.md").read_text() == claims_page


def test_the_overview_is_the_one_that_the_results_give():
    markdown = runpy.run_path(str(FOLDER / "overview.py"))["markdown"]
    assert (FOLDER / "index.md").read_text() == markdown(page.collect(FOLDER))


def test_every_claim_has_a_line_with_its_verdict(claims_page):
    lines = claims_page.splitlines()
    for path in FOLDER.rglob("claims.json"):
        for claim in json.loads(path.read_text()):
            statement = claim["statement"].replace("|", "\\|")
            start = f"| **{claim['verdict']}** | {statement} |"
            shown = claim["note"] or f"{claim['value']:.3g}"
            assert any(line.startswith(start) and shown in line for line in lines)


def test_tables_have_equal_columns_and_pictures_are_there(claims_page):
    for block in re.findall(r"(?:^\|.*\n)+", claims_page, re.M):
        counts = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(counts) == 1
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", claims_page)

    assert len(pictures) == len(PUBLISHED)
    for picture in pictures:
        assert (FOLDER / picture).resolve().is_file()


def test_the_summary_links_to_sections(claims_page):
    anchors = re.findall(r"\]\(#(.*?)\)", claims_page)
    assert anchors
    for anchor in anchors:
        assert re.search(rf"^## {anchor.rpartition('-')[0]} ", claims_page, re.M)


def test_tables_are_small_and_name_no_machine():
    assert sum(path.stat().st_size for path in FOLDER.rglob("*.csv")) < 4_000_000
    for path in FOLDER.rglob("*.json"):
        assert not re.search(r"/(?:home|root|tmp|work|Users)/", path.read_text()), path
