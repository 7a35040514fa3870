"""laws: its battery, and that its laws differ in their tails alone."""

from __future__ import annotations

import math

import pytest
import torch

from reproduction.figures import laws
from reproduction.grid.cells import cells_of
from reproduction.grid.settings import PRESETS
from reproduction.rows import Rows
from tests.reproduction.battery import Battery, table


def rows(c, true, noise):
    share = {"±1": 1.0, "N(0, 1)": 0.1, "uniform": 0.3}.get(c["law"], 0.5)
    loss = 0.2 - 0.02 * math.log2(share)
    loss += {"±1, mean √½": -0.05, laws.SEPARATE: 0.01}.get(c["law"], 0.0) if true else 0.0
    loss += 0.1 * (c["law"] in (laws.ONE, laws.FASTER))
    if not true:
        loss = 0.4 - loss + 0.1 * (c["law"] == "±1, mean √½")
        loss -= 0.15 * (c["law"] == laws.SEPARATE)
    correlation = 0.8 if true and c["law"] == "N(1, ½)" else 0.4
    return {
        "accuracy": 1 - loss,
        "member_accuracy": 0.9 - loss / 2 + noise(0.001),
        "nll": loss + noise(0.001),
        "correlation": correlation + noise(0.001),
        "disagreement": 0.1,
        "effective_width": 16 * c["width"] * share,
    }


class TestLaws(Battery):
    name, rows = "laws", staticmethod(rows)


@pytest.mark.parametrize(("group", "mean"), [(laws.CENTRED, 0.0), (laws.MIXED, math.sqrt(0.5))])
def test_laws_of_a_group_differ_in_their_tails_alone(group, mean):
    for law in group.values():
        assert law.mean == pytest.approx(mean, abs=1e-12)
        assert law.second_moment == pytest.approx(1)
    assert len({round(law.kurtosis, 6) for law in group.values()}) >= 4


def test_n_one_half_is_the_usual_one():
    law = laws.LAWS["N(1, ½)"]
    assert (law.mean, law.std) == (1, 0.5)
    assert law.overlap == pytest.approx(0.8)


def test_cells_modulate_their_sites():
    cells = cells_of("laws", PRESETS["quick"], [0])
    for cell in [cell for cell in cells if cell.experiment == "laws"][::3]:
        kinds = {site.kind for site in laws.build(cell).spec.sites}
        expected = {"u": {"post"}, "v": {"pre"}, "none": set(), laws.BOTH: {"pre", "post"}}
        if cell["law"] == "Masksembles":
            assert kinds == {"post"}
        elif cell["law"] != laws.SEPARATE:
            assert kinds == expected[cell["sites"]], cell


def test_two_laws_of_one_effective_width_are_two_points_however_it_is_rounded():
    costs = []
    for noise in (0.0, 1e-9):
        made = table("laws", rows, "true", 2)
        made["effective_width"] *= 1 + noise * made.index
        costs.append(laws.cost_of_tails(Rows(made), "nll"))
    assert costs[0] == pytest.approx(costs[1], rel=1e-6)


def test_predictions_are_those_of_the_law_and_change_no_weight():
    cells = cells_of("laws", PRESETS["quick"], [0])
    cell = next(cell for cell in cells if cell["law"] == "N(0, 1)" and cell["width"] == 4)
    ensemble = laws.build(cell)
    before = [parameter.clone() for parameter in ensemble.parameters()]
    predicted = laws.predictions(cell, ensemble)
    assert predicted["coupling"] == 0
    assert predicted["effective_width"] == pytest.approx(64 * 5 / 53)
    for parameter, other in zip(ensemble.parameters(), before, strict=True):
        assert torch.equal(parameter, other)
