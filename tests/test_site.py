"""The documentation is whole: every public name is in the reference, every built page holds.

Tests marked ``site`` look at the pages that ``make docs`` has built.
"""

from __future__ import annotations

import importlib
import re
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest
from pages import NEEDS_CHROMIUM, ROOT, in_chromium

import embens
from benchmarks import page as performance

DOCS, BUILT = ROOT / "docs", ROOT / "docs" / "_build"
PACKAGES = ("embens", "embens.data", "embens.estimators", "embens.finite", "embens.theory")
PACKAGES += ("embens.training",)
MODULES = ("embens.laws", "embens.metrics", "embens.networks")  # documented as a whole


def public_names() -> set[str]:
    """Return what the packages promise, less the modules among it."""
    found = set()
    for name in PACKAGES:
        package = importlib.import_module(name)
        names = {f"{name}.{n}" for n in package.__all__}
        found |= {n for n in names if not hasattr(attribute(n), "__path__") and n not in MODULES}
    return {n for n in found if n not in PACKAGES}


def attribute(name: str):
    package, _, last = name.rpartition(".")
    return getattr(importlib.import_module(package), last)


def documented() -> list[object]:
    """Return the objects that the reference names."""
    text = "".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    names = re.findall(r"\.\. auto(?:function|class|exception|data):: ([\w.]+)", text)
    assert set(re.findall(r"\.\. automodule:: ([\w.]+)", text)) == set(MODULES)
    return [attribute(name) for name in names]


def test_every_public_name_is_in_the_reference():
    known = documented()
    missing = {n for n in public_names() if not any(attribute(n) is one for one in known)}
    assert missing == set()


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_of_a_documented_module_has_a_text(module):
    found = vars(importlib.import_module(module)).items()
    own = {n: v for n, v in found if getattr(v, "__module__", "") == module and n[0] != "_"}
    assert {n for n, v in own.items() if callable(v) and not v.__doc__} == set()


def test_the_page_on_performance_is_made_from_the_results():
    assert performance.page() == performance.PAGE.read_text(), "python -m benchmarks.page makes it"


def test_version_and_citation_agree():
    citation = (ROOT / "CITATION.cff").read_text()
    version = re.search(r'(?m)^version = "(.*)"', (ROOT / "pyproject.toml").read_text())
    assert version
    assert f"version: {version[1]}\n" in citation
    assert f"## [{version[1]}]" in (ROOT / "CHANGELOG.md").read_text()
    assert embens.__doc__


class Page(HTMLParser):
    """Where a page leads, what it loads, and which anchors it has."""

    def __init__(self, text: str):
        super().__init__()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {value for key, value in attrs if key in ("id", "name") and value}
        if tag == "a" and given.get("href"):
            self.links.add(given["href"])
        elif given.get("src") or (tag == "link" and given.get("rel") == "stylesheet"):
            self.loads.add(given.get("src") or given["href"])


def built() -> dict[str, Page]:
    pages = {str(p.relative_to(BUILT)): Page(p.read_text()) for p in BUILT.rglob("*.html")}
    assert "index.html" in pages, "make docs builds them"
    return pages


@pytest.mark.site
def test_every_link_leads_somewhere():
    pages, broken = built(), []
    for name, page in pages.items():
        for link in page.links | page.loads:
            parts = urlsplit(link)
            if parts.scheme or link.startswith("//"):
                continue
            path = (BUILT / name).parent / unquote(parts.path) if parts.path else BUILT / name
            target = str(path.resolve().relative_to(BUILT.resolve()))
            known = pages.get(target)
            if not path.exists() or (
                parts.fragment and known and unquote(parts.fragment) not in known.anchors
            ):
                broken.append((name, link))
    assert broken == []


@pytest.mark.site
def test_nothing_is_loaded_from_a_network():
    loaded = {link for page in built().values() for link in page.loads}
    assert {link for link in loaded if link.startswith(("http", "//"))} == set()


@pytest.mark.site
@NEEDS_CHROMIUM
def test_equations_are_drawn_without_a_network(tmp_path):
    text = in_chromium(f"file://{BUILT}/theory.html", tmp_path)
    assert text.count("<mjx-container") > 50
    assert "<mjx-merror" not in text


@pytest.mark.site
@NEEDS_CHROMIUM
def test_the_search_finds_a_word_without_a_network(tmp_path):
    text = in_chromium(f"file://{BUILT}/search.html?q=correctness_correlation", tmp_path)
    assert "embens.metrics.correctness_correlation" in text
