"""Experiments by name, and what their cells have in common."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from embens import laws
from embens.experiments import NAMES, contract
from embens.experiments.setting import PRESETS, reference

QUICK = PRESETS["quick"]


@dataclass(frozen=True)
class Cell(contract.CellBase):
    width: float
    members: int


def test_an_unknown_name_gets_the_closest():
    with pytest.raises(ValueError, match="unknown experiment 'transitoin'; did you mean 'transit"):
        contract.load("transitoin")


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_an_experiment(name):
    words = contract.describe(contract.load(name).__doc__)
    assert all(words.values())
    assert not set("`:") & set(words["about"].replace(": ", ""))  # plain text, for a page


def test_the_ensemble_of_the_paper_has_the_laws_of_the_paper():
    network = reference(QUICK)
    for ensemble, p in (
        (contract.batch_ensemble(network, 2), 0.0),
        (contract.batch_ensemble(network, 2, p=0.6), 0.6),
    ):
        assert {site.law for site in ensemble.plan.sites} == {laws.Shifted(p)}
    for name in set(NAMES) - {"laws"}:  # whatever the library's default is
        assert contract.load(name).__dict__.get("batch_ensemble") in (None, contract.batch_ensemble)


def test_a_product_has_a_cell_for_each_combination():
    cells = contract.product(Cell, QUICK, width=(0.5, 1.0), members=(1, 2))
    assert [(c.width, c.members) for c in cells] == [(0.5, 1), (0.5, 2), (1.0, 1), (1.0, 2)]
    assert list(replace(cells[0], seed=3).swept()) == ["width", "members", "seed"]


def test_seeds_are_the_preset_s_or_those_asked_for():
    assert {c.seed for c in contract.cells("widths", QUICK)} == set(range(5))
    assert {c.seed for c in contract.cells("gradients", QUICK)} == set(range(30))
    assert {c.seed for c in contract.cells("widths", QUICK, [7, 8])} == {7, 8}


def test_a_shortened_cell_weighs_as_much_less_as_it_has_less_to_train():
    cell = Cell(1.0, 2, setting=QUICK)
    assert cell.weight / cell.shortened(epochs=2).weight == QUICK.epochs / 2
    images = replace(cell, setting=replace(PRESETS["paper"], epochs=4))
    factor = images.weight / images.shortened(epochs=2, train=500).weight
    assert factor == pytest.approx(2 * 40_000 / 500)


def test_a_cell_draws_its_network_and_goes_on_from_there():
    network, generator = Cell(2.0, 2, setting=QUICK, seed=5).draw()
    same = torch.Generator().manual_seed(5)
    expected = reference(QUICK, 2.0, generator=same)
    for mine, theirs in zip(network.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(generator.get_state(), same.get_state())
