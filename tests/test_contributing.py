"""CONTRIBUTING is true: its recipes run, in order, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd

from embens.experiments.contract import Experiment

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_the_recipes_run():
    names: dict = {"__name__": "recipes"}
    for block in BLOCKS:
        exec(compile(block, "CONTRIBUTING.md", "exec", dont_inherit=True), names)
    assert len(BLOCKS) == 5

    promised = {name for name in vars(Experiment) if not name.startswith("_")}
    assert promised | set(Experiment.__annotations__) <= set(names)
    table = pd.DataFrame(names["rows"])
    (claim,) = names["claims"](table)
    assert claim.verdict == "holds"
    (panel,) = names["plot"](table).panels
    assert panel.curves[0].x == [0.1, 0.5]


def test_the_files_and_targets_that_it_names_exist():
    for path in set(re.findall(r"`((?:src|tests)/[\w./]+)`", TEXT)):
        assert (ROOT / path).exists(), path
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`make ([\w-]+)", TEXT)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_recipe_of_the_house_is_there():
    for what in ("a law", "a family", "an activation", "a rule", "an experiment"):
        assert f"**Add {what}" in TEXT
