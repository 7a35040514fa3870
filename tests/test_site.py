"""The documentation is complete: every public name is in the reference, every built page is sound.

Tests marked ``site`` check the pages that ``make docs`` has built.
"""

from __future__ import annotations

import importlib
import inspect
import re
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest
from pages import NEEDS_CHROMIUM, ROOT, in_chromium

import embens
from benchmarks import page as performance

DOCS, BUILT = ROOT / "docs", ROOT / "docs" / "_build"
PACKAGES = ("embens", "embens.tabular", "embens.finite", "embens.laws", "embens.theory")
PACKAGES += ("embens.training",)
WHOLE_MODULES = ("embens.metrics", "embens.networks")
"""Modules whose members are all documented."""


def attribute(name: str):
    package, _, last = name.rpartition(".")
    return getattr(importlib.import_module(package), last)


def public_names() -> set[str]:
    """Return the names of the packages' ``__all__`` that are not modules."""
    names = set()
    for package in PACKAGES:
        for name in importlib.import_module(package).__all__:
            full_name = f"{package}.{name}"
            if not inspect.ismodule(attribute(full_name)):
                names.add(full_name)
    return names


def documented_objects() -> list[object]:
    """Return the objects that the reference names."""
    text = "".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    names = re.findall(r"\.\. auto(?:function|class|exception|data):: ([\w.]+)", text)
    return [attribute(name) for name in names]


def test_every_public_name_is_in_the_reference():
    documented = {id(thing) for thing in documented_objects()}
    missing = {name for name in public_names() if id(attribute(name)) not in documented}
    assert missing == set()


@pytest.mark.parametrize("module", WHOLE_MODULES)
def test_every_public_name_of_a_documented_module_has_a_docstring(module):
    missing = set()
    for name, value in vars(importlib.import_module(module)).items():
        is_public = getattr(value, "__module__", "") == module and not name.startswith("_")
        if is_public and callable(value) and not value.__doc__:
            missing.add(name)

    assert missing == set()


def test_the_page_on_performance_agrees_with_the_results():
    assert performance.page() == performance.PAGE.read_text(), "run python -m benchmarks.page"


def test_version_and_citation_agree():
    citation = (ROOT / "CITATION.cff").read_text()
    version = re.search(r'(?m)^version = "(.*)"', (ROOT / "pyproject.toml").read_text())

    assert version
    assert f"version: {version[1]}\n" in citation
    assert f"## [{version[1]}]" in (ROOT / "CHANGELOG.md").read_text()
    assert embens.__doc__


class Page(HTMLParser):
    """Links, loaded files and anchors of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.anchors |= {value for key, value in attrs if key in ("id", "name") and value}
        if tag == "a" and attributes.get("href"):
            self.links.add(attributes["href"])
        elif attributes.get("src"):
            self.loads.add(attributes["src"])
        elif tag == "link" and attributes.get("rel") == "stylesheet":
            self.loads.add(attributes["href"])


def built_pages() -> dict[str, Page]:
    pages = {str(path.relative_to(BUILT)): Page(path.read_text()) for path in BUILT.rglob("*.html")}
    assert "index.html" in pages, "run make docs"
    return pages


def exists(link: str, name: str, pages: dict[str, Page]) -> bool:
    """Return whether a link of a page leads to a file and an anchor that exist."""
    parts = urlsplit(link)
    if parts.scheme or link.startswith("//"):
        return True
    path = BUILT / name
    if parts.path:
        path = path.parent / unquote(parts.path)
    if not path.exists():
        return False
    target = pages.get(str(path.resolve().relative_to(BUILT.resolve())))
    if not parts.fragment or target is None:
        return True
    return unquote(parts.fragment) in target.anchors


@pytest.mark.site
def test_every_link_leads_somewhere():
    pages = built_pages()
    broken = []
    for name, page in pages.items():
        for link in page.links | page.loads:
            if not exists(link, name, pages):
                broken.append((name, link))

    assert broken == []


@pytest.mark.site
def test_nothing_is_loaded_from_a_network():
    loaded = {link for page in built_pages().values() for link in page.loads}
    assert {link for link in loaded if link.startswith(("http", "//"))} == set()


@pytest.mark.site
@NEEDS_CHROMIUM
@pytest.mark.parametrize(("page", "equations"), [("theory", 30), ("theory-derivations", 50)])
def test_equations_are_drawn_without_a_network(tmp_path, page, equations):
    text = in_chromium(f"file://{BUILT}/{page}.html", tmp_path)
    assert text.count("<mjx-container") > equations
    assert "<mjx-merror" not in text


@pytest.mark.site
@NEEDS_CHROMIUM
def test_the_search_finds_a_word_without_a_network(tmp_path):
    text = in_chromium(f"file://{BUILT}/search.html?q=correctness_correlation", tmp_path)
    assert "embens.metrics.correctness_correlation" in text


@pytest.mark.site
def test_no_description_of_a_property_is_read_as_its_type():
    """Napoleon takes the words before a colon in the first line for a type."""
    texts = {path.name: path.read_text() for path in (BUILT / "reference").glob("*.html")}
    assert texts, "run make docs"
    assert [name for name, text in texts.items() if '<dt class="field-odd">Type<' in text] == []
