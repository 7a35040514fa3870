"""Pages of text that promise things: code that runs, links that lead somewhere, make targets."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def blocks(page: Path) -> list[str]:
    """Return the Python code of a page."""
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def run(page: Path) -> dict:
    """Run the Python code of a page in order, as if in one module; return its names."""
    names: dict = {"__name__": page.stem}
    for block in blocks(page):
        exec(compile(block, page.name, "exec", dont_inherit=True), names)
    return names


def check_references(page: Path) -> None:
    """See that links, files of the repository and make targets that a page names exist."""
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        assert target.startswith(("http", "mailto")) or (page.parent / target).exists(), target
    for path in re.findall(r"`((?:src|tests|benchmarks|examples)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path
    targets = re.findall(r"(?m)^([\w-]+):", (ROOT / "Makefile").read_text())
    for target in re.findall(r"(?m)(?:`|^|\$ )make ([a-z][\w-]*)", text):
        assert target in targets, target
