"""CONTRIBUTING holds: its recipes run in order, and its links exist."""

from __future__ import annotations

import pandas as pd
from pages import ROOT, blocks, check_references, run

from reproduction.claims import judge
from reproduction.grid.cells import describe

PAGE = ROOT / "CONTRIBUTING.md"
RECIPES = ("a law", "a family", "a layer kind", "a row-wise operation", "a callback")
RECIPES += ("an activation", "a rule of the limit", "an experiment")


def test_the_recipes_run():
    names = run(PAGE)
    about = "Differences between members at initialisation."
    assert describe(names["__doc__"]) == {"title": "Levels", "label": "ours", "about": about}
    table = pd.DataFrame(names["rows"])
    (claim,) = judge(names["CLAIMS"], table)
    assert claim.verdict == "holds"
    (panel,) = names["plot"](table).panels
    assert panel.curves[0].x == [0.1, 0.5]


def test_every_recipe_has_code_that_runs():
    text = PAGE.read_text()
    for recipe in RECIPES:
        assert f"**Add {recipe}**" in text
    assert len(blocks(PAGE)) == len(RECIPES)


def test_links_files_and_make_targets_exist():
    check_references(PAGE)
