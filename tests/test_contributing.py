"""CONTRIBUTING is true: its recipes run, in order, and what it names exists."""

from __future__ import annotations

import pandas as pd
from pages import ROOT, blocks, check_references, run

from reproduction.claims import judge
from reproduction.grid.cells import describe

PAGE = ROOT / "CONTRIBUTING.md"


def test_the_recipes_run():
    names = run(PAGE)
    assert {"SWEEP", "measure", "CLAIMS", "plot"} <= set(names)
    about = "How members differ at initialisation."
    assert describe(names["__doc__"]) == {"title": "Levels", "label": "ours", "about": about}
    table = pd.DataFrame(names["rows"])
    (claim,) = judge(names["CLAIMS"], table)
    assert claim.verdict == "holds"
    (panel,) = names["plot"](table).panels
    assert panel.curves[0].x == [0.1, 0.5]


def test_every_recipe_of_the_house_is_there():
    assert len(blocks(PAGE)) == 5
    for what in ("a law", "a family", "an activation", "a rule", "an experiment"):
        assert f"**Add {what}" in PAGE.read_text()


def test_what_it_points_to_exists():
    check_references(PAGE)
