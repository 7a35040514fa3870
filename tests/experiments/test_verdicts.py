"""Every claim of every experiment can hold, fail, and stay undecided."""

from __future__ import annotations

import pytest
from experiments import synthetic

from embens.experiments import NAMES, contract
from embens.experiments.claims import FAILS, HOLDS, UNDECIDED
from embens.experiments.figure import Figure, draw
from embens.experiments.setting import PRESETS

WITHOUT_FAILURE = {("gradients", "exponent −1")}
"""The paper's −1 and the theory's −1/2 can't both hold of one table; see the test below."""


def verdicts(name, kind, **options):
    found = contract.load(name).claims(synthetic.table(name, kind, **options))
    return {claim.name: claim for claim in found}


@pytest.mark.parametrize("name", NAMES)
def test_claims_hold_of_a_table_that_the_paper_would_recognise(name):
    for claim in verdicts(name, "true").values():
        expected = FAILS if (name, claim.name) in WITHOUT_FAILURE else HOLDS
        assert claim.verdict == expected, claim


@pytest.mark.parametrize("name", NAMES)
def test_claims_do_not_hold_of_a_table_that_contradicts_the_paper(name):
    for claim in verdicts(name, "false").values():
        assert claim.verdict == FAILS, claim


@pytest.mark.parametrize("name", NAMES)
def test_claims_are_undecided_where_seeds_contradict_each_other(name):
    # Powers of means are ruled by the larger of two contradicting seeds; two of them say nothing.
    seeds = 2 if name in ("trajectories", "gradients", "ntk-at-init", "theorems") else 4
    for claim in verdicts(name, "mixed", seeds=seeds).values():
        if (name, claim.name) not in WITHOUT_FAILURE:
            assert claim.verdict == UNDECIDED, claim


@pytest.mark.parametrize("name", NAMES)
def test_one_seed_decides_nothing(name):
    for claim in verdicts(name, "true", seeds=1).values():
        assert claim.verdict == UNDECIDED, claim
        assert claim.note


@pytest.mark.parametrize("name", NAMES)
def test_a_claim_whose_cells_are_missing_says_so(name):
    table = synthetic.table(name, "true", seeds=2)
    for claim in contract.load(name).claims(table.head(1)):
        assert claim.verdict == UNDECIDED, claim
        assert claim.note, claim


@pytest.mark.parametrize("name", NAMES)
def test_names_of_claims_are_unique_and_texts_are_there(name):
    claims = contract.load(name).claims(synthetic.table(name, "true", seeds=2))
    assert len({c.name for c in claims}) == len(claims)
    assert all(c.statement and c.paper and c.measure for c in claims)


@pytest.mark.parametrize("name", NAMES)
def test_a_table_becomes_a_picture(name, tmp_path):
    figure = contract.load(name).plot(synthetic.table(name, "true", seeds=2))
    assert isinstance(figure, Figure)
    assert all(panel.curves for panel in figure.panels)
    assert all(len(c.x) == len(c.y) for panel in figure.panels for c in panel.curves)
    draw(figure, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_the_paper_s_exponent_can_hold_instead_of_the_theory_s():
    import pandas

    from embens.experiments import gradients

    rows = [
        {"kind": "centred", "width": w, "seed": s, "norm": 1.0}
        | {f"cos_{part}": 1 / w for part in gradients.PARTS}
        | {f"cos2_{part}": 1 / w**2 for part in gradients.PARTS}
        for w in (1.0, 2.0, 4.0)
        for s in range(3)
    ]
    found = {c.name: c.verdict for c in gradients.claims(pandas.DataFrame(rows))}
    assert found["exponent −1"] == HOLDS
    assert found["exponent −1/2"] == FAILS


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_has_a_sweep_of_distinct_cells_with_several_seeds(name):
    for setting in PRESETS.values():
        cells = contract.load(name).cells(setting)
        assert len(set(cells)) == len(cells)
        assert len({cell.seed for cell in cells}) >= 3
        assert {c.seed for c in contract.load(name).cells(setting, seeds=2)} == {0, 1}
