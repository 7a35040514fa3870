"""The README is true: its code runs, its files exist, its example is short."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_the_code_blocks_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(BLOCKS) >= 4
    names: dict[str, object] = {}
    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), names)
    assert names["outputs"].shape == (8, 256, 3)
    assert names["split"].shape == (256, 3)


def test_the_first_example_has_at_most_fifteen_lines():
    assert len([line for line in BLOCKS[0].splitlines() if line.strip()]) <= 15


def test_links_and_pictures_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target


def test_the_make_targets_that_it_names_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"make (\w+)", TEXT)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE) or target == "make", target
