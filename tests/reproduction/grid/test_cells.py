"""Experiments by name, and their cells."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch

from reproduction.figures import NAMES
from reproduction.grid.cells import (
    Cell,
    cells_of,
    describe,
    load_experiment,
    sweep,
    training_cost,
)
from reproduction.grid.settings import PRESETS, build_reference

QUICK = PRESETS["quick"]


def cell_of(width, members, seed=0, setting=QUICK):
    return Cell(setting, {"width": width, "members": members, "seed": seed})


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_an_experiment_with_a_title_and_plain_text(name):
    texts = describe(load_experiment(name).__doc__)
    assert all(texts.values())
    assert not set("`:") & set(texts["about"].replace(": ", ""))


def test_a_sweep_has_a_cell_for_each_combination():
    cells = sweep(width=(0.5, 1.0), members={"quick": (1, 2)})(QUICK)
    combinations = [(cell["width"], cell["members"]) for cell in cells]
    assert combinations == [(0.5, 1), (0.5, 2), (1.0, 1), (1.0, 2)]
    assert sweep(width=1.0, members=2)(QUICK) == [cell_of(1.0, 2)]
    assert cells[0].with_values(seed=3).values == {"width": 0.5, "members": 1, "seed": 3}


def test_reading_an_unknown_axis_lists_the_axes():
    with pytest.raises(KeyError, match=r"no axis 'gamma'; it has width, members, seed"):
        cell_of(1.0, 2)["gamma"]


def test_cells_can_be_copied_and_pickled():
    cell = cell_of(1.0, 2)
    assert copy.deepcopy(cell) == pickle.loads(pickle.dumps(cell)) == cell


def test_seeds_are_those_of_the_preset_or_the_requested_ones():
    assert {cell.seed for cell in cells_of("widths", QUICK)} == set(range(5))
    assert {cell.seed for cell in cells_of("gradients", QUICK)} == set(range(30))
    assert {cell.seed for cell in cells_of("widths", QUICK, [7, 8])} == {7, 8}


def test_the_cost_of_a_shortened_cell_is_proportional_to_its_training():
    cell = cell_of(1.0, 2)
    assert training_cost(cell) / training_cost(cell.shortened(epochs=2)) == QUICK.epochs / 2
    images = replace(cell, setting=replace(PRESETS["paper"], epochs=4))
    factor = training_cost(images) / training_cost(images.shortened(epochs=2, train=500))
    assert factor == pytest.approx(2 * 40_000 / 500)


def test_members_are_drawn_with_the_generator_that_drew_the_reference():
    network, generator = cell_of(2.0, 2, seed=5).build_reference()
    expected_generator = torch.Generator().manual_seed(5)
    expected = build_reference(QUICK, 2.0, generator=expected_generator)

    for parameter, other in zip(network.parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter, other)
    assert torch.equal(generator.get_state(), expected_generator.get_state())
