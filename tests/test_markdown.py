"""Texts of the user are shown in Markdown and YAML as they are, whatever they contain."""

import re

import pytest

from embens.markdown import code, escape, one_line, quote, tag

TEXTS = [
    "plain words",
    "<script>alert(1)</script>",
    "a | b | c",
    "line\nbreak\r\nand\u2028more\x00",
    "[link](javascript:alert(1))",
    "**bold** _emphasis_ `code` ~~gone~~ # title",
    "```\nfence\n```",
    "backslash \\| and \\",
    "&lt; &amp;",
    "key: [value, {other}] # comment",
    "---",
    "ünïcode 😀 \ud800",
    "'single' and \"double\"",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_stays_in_its_line_and_cell_and_opens_nothing(text):
    escaped = escape(text)
    assert len(escaped.splitlines()) <= 1
    assert not re.search(r"[<>]", escaped)
    without_escapes = re.sub(r"\\.", "", escaped)
    assert not re.search(r"[|`*\[\]\\~]", without_escapes)
    escaped.encode()


@pytest.mark.parametrize("text", TEXTS)
def test_a_renderer_shows_the_text(text):
    commonmark = pytest.importorskip("markdown_it").MarkdownIt("gfm-like", {"linkify": False})
    shown = one_line(text)
    row = commonmark.render(f"| a |\n|---|\n| {escape(text)} |\n")
    cells = re.findall(r"<td>(.*?)</td>", row, re.DOTALL)
    html = pytest.importorskip("html")
    assert [html.unescape(cell) for cell in cells] == [shown]
    span = commonmark.render(f"- {code(text)}\n")
    (inside,) = re.findall(r"<code>(.*?)</code>", span)
    assert html.unescape(inside).strip() == shown


@pytest.mark.parametrize("text", TEXTS)
def test_a_parser_of_yaml_reads_the_text(text):
    yaml = pytest.importorskip("yaml")
    parsed = yaml.safe_load(f"tags: [a, {tag(text)}, b]\nname: {quote(text)}\n")
    expected = text.replace("\ud800", "\ufffd")
    assert parsed == {"tags": ["a", expected, "b"], "name": expected}


@pytest.mark.parametrize("word", ["no", "Yes", "null", "on", "1e5", "~", "a b", "true"])
def test_words_with_a_meaning_in_yaml_are_quoted(word):
    assert tag(word) == f'"{word}"'
    assert tag("batch_ensemble") == "batch_ensemble"
