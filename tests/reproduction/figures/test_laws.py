"""The battery of the experiment laws; its laws differ in their tails only."""

from __future__ import annotations

import math

import pytest
import torch

from reproduction.figures import laws
from reproduction.grid.cells import cells_of
from reproduction.grid.settings import PRESETS
from reproduction.rows import Rows
from tests.reproduction.battery import Battery

SHIFTED_SIGNS = "±1, mean √½"


class TestLaws(Battery):
    name = "laws"

    @staticmethod
    def confirming_rows(cell, noise):
        law = cell["law"]
        loss = loss_of_tails(law) + loss_of_control(law)
        if law == SHIFTED_SIGNS:
            loss -= 0.05
        if law == laws.SEPARATE:
            loss += 0.01
        correlation = 0.8 if law == "N(1, ½)" else 0.4
        return make_row(cell, noise, loss, correlation)

    @staticmethod
    def contradicting_rows(cell, noise):
        law = cell["law"]
        loss = 0.4 - loss_of_tails(law) - loss_of_control(law)
        if law == SHIFTED_SIGNS:
            loss += 0.1
        if law == laws.SEPARATE:
            loss -= 0.15
        return make_row(cell, noise, loss, correlation=0.4)


def effective_share(law):
    """Return a made-up effective width, relative to the width."""
    return {"±1": 1.0, "N(0, 1)": 0.1, "uniform": 0.3}.get(law, 0.5)


def loss_of_tails(law):
    return 0.2 - 0.02 * math.log2(effective_share(law))


def loss_of_control(law):
    """Return by how much one network loses more than an ensemble."""
    return 0.1 if law in (laws.ONE, laws.FASTER) else 0.0


def make_row(cell, noise, loss, correlation):
    return {
        "accuracy": 1 - loss,
        "member_accuracy": 0.9 - loss / 2 + noise(0.001),
        "nll": loss + noise(0.001),
        "correlation": correlation + noise(0.001),
        "disagreement": 0.1,
        "effective_width": 16 * cell["width"] * effective_share(cell["law"]),
    }


@pytest.mark.parametrize(("group", "mean"), [(laws.CENTRED, 0.0), (laws.MIXED, math.sqrt(0.5))])
def test_laws_of_a_group_differ_in_their_tails_only(group, mean):
    for law in group.values():
        assert law.mean == pytest.approx(mean, abs=1e-12)
        assert law.second_moment == pytest.approx(1)
    assert len({round(law.kurtosis, 6) for law in group.values()}) >= 4


def test_usual_law_has_mean_one_and_standard_deviation_one_half():
    law = laws.LAWS["N(1, ½)"]
    assert law.mean == 1
    assert law.std == 0.5
    assert law.overlap == pytest.approx(0.8)


def test_ensembles_have_the_sites_of_their_cells():
    kinds_of_sites = {"u": {"post"}, "v": {"pre"}, "none": set(), laws.BOTH: {"pre", "post"}}
    cells = [cell for cell in cells_of("laws", PRESETS["quick"], [0]) if cell.experiment == "laws"]
    for cell in cells[::3]:
        if cell["law"] == laws.SEPARATE:
            continue
        kinds = {site.kind for site in laws.build(cell).spec.sites}
        if cell["law"] == "Masksembles":
            assert kinds == {"post"}
        else:
            assert kinds == kinds_of_sites[cell["sites"]], cell


def test_cost_of_tails_does_not_depend_on_rounded_effective_widths():
    table = TestLaws.make_table("confirming", seeds=2)
    rounded = table.copy()
    rounded["effective_width"] *= 1 + 1e-9 * rounded.index

    cost = laws.cost_of_tails(Rows(table), "nll")
    cost_when_rounded = laws.cost_of_tails(Rows(rounded), "nll")

    assert cost_when_rounded == pytest.approx(cost, rel=1e-6)


def test_predictions_follow_from_the_law_and_leave_weights_unchanged():
    cells = cells_of("laws", PRESETS["quick"], [0])
    cell = next(cell for cell in cells if cell["law"] == "N(0, 1)" and cell["width"] == 4)
    ensemble = laws.build(cell)
    before = [parameter.clone() for parameter in ensemble.parameters()]

    predictions = laws.predictions(cell, ensemble)

    assert predictions["coupling"] == 0
    assert predictions["effective_width"] == pytest.approx(64 * 5 / 53)
    for parameter, value_before in zip(ensemble.parameters(), before, strict=True):
        assert torch.equal(parameter, value_before)
