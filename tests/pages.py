"""Pages of text that promise things: code that runs, links that lead somewhere, make targets."""

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
    """Return a page as a browser shows it, after its scripts have run, without a network."""
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    command += ["--disable-background-networking", "--allow-file-access-from-files"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={profile}", "--virtual-time-budget=20000", "--dump-dom", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


def blocks(page: Path) -> list[str]:
    """Return the Python code of a page."""
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def run(page: Path) -> dict:
    """Run the Python code of a page in order, as if in one module; return its names."""
    names: dict = {"__name__": page.stem}
    for block in blocks(page):
        exec(compile(block, page.name, "exec", dont_inherit=True), names)
    return names


def made(page: Path, target: str) -> bool:
    return target.startswith("_static") or (page.parent / target).exists()


def check_references(page: Path) -> None:
    """See that links, files of the repository and make targets that a page names exist."""
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        assert target.startswith(("http", "mailto")) or made(page, target), target
    for path in re.findall(r"`((?:src|tests|benchmarks|examples)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path
    targets = re.findall(r"(?m)^([\w-]+):", (ROOT / "Makefile").read_text())
    for target in re.findall(r"(?m)(?:`|^|\$ )make ([a-z][\w-]*)", text):
        assert target in targets, target
