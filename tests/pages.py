"""Helpers for tests of Markdown pages: run their code, check links, files and make targets."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NEEDS_CHROMIUM = pytest.mark.skipif(
    shutil.which("chromium") is None, reason="no Chromium: `make test` installs it where it can"
)


def in_chromium(address: str, profile: Path) -> str:
    """Return the document of a page after its scripts have run in a browser without a network."""
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    command += ["--disable-background-networking", "--allow-file-access-from-files"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={profile}", "--virtual-time-budget=20000", "--dump-dom", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


def blocks(page: Path) -> list[str]:
    """Return the blocks of Python code of a page."""
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def run(page: Path) -> dict:
    """Run the Python blocks of a page in order in one namespace, and return it."""
    names: dict = {"__name__": page.stem}
    for block in blocks(page):
        exec(compile(block, page.name, "exec", dont_inherit=True), names)
    return names


def anchors(page: Path) -> set[str]:
    """Return the anchors that a forge gives the headings of a Markdown page."""
    without_code = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    names: set[str] = set()
    for heading in re.findall(r"(?m)^#+ (.+)$", without_code):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        unique, count = name, 0
        while unique in names:
            count += 1
            unique = f"{name}-{count}"
        names.add(unique)
    return names


def links(page: Path) -> list[str]:
    """Return the targets of the links and pictures of a Markdown page that are no web addresses."""
    without_code = re.sub(r"(?ms)^```.*?^```|`[^`\n]*`", "", page.read_text())
    targets = re.findall(r"\]\(([^)\s]+)\)", without_code)
    return [target for target in targets if not target.startswith(("http", "mailto"))]


def check_references(page: Path) -> None:
    """Check that the links, anchors, files and make targets of a page exist."""
    text = page.read_text()
    for target in links(page):
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        if anchor and linked.suffix == ".md":
            assert anchor in anchors(linked), target
    for path in re.findall(r"`((?:src|tests|benchmarks|examples|reproduction)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path
    targets = re.findall(r"(?m)^([\w-]+):", (ROOT / "Makefile").read_text())
    for target in re.findall(r"(?m)(?:`|^|\$ )make ([a-z][\w-]*)", text):
        assert target in targets, target
