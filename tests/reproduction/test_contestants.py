"""Contestants of the comparison: built, trained, and run through one interface."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from reproduction import contestants
from reproduction.grid.cells import Cell, cells_of
from reproduction.grid.settings import PRESETS, count_parameters
from reproduction.problems import load_problem

SETTING = cells_of("systems", PRESETS["quick"], [0])[0].setting
BUILT = [name for name in contestants.NAMES if name not in contestants.PROCEDURES]


def cell_of(members=3, width=1.0, epochs=1):
    setting = replace(SETTING, epochs=epochs)
    return Cell(setting, {"members": members, "width": width, "seed": 0})


def test_every_contestant_is_of_one_kind():
    assert len(set(contestants.NAMES)) == len(contestants.NAMES) == 21


@pytest.mark.parametrize("name", BUILT)
def test_every_contestant_has_outputs_of_its_members(name):
    outputs = contestants.build(cell_of(), name)(torch.zeros(2, 1, 8, 8))
    assert outputs.shape[1:] == (2, 10)
    is_single = name in (contestants.ONE, contestants.WIDE, contestants.FRESH)
    assert len(outputs) == (1 if is_single else 3)


def test_an_unknown_name_raises():
    with pytest.raises(ValueError, match="name must be one of one network"):
        contestants.build(cell_of(), "nothing")


def test_the_wide_network_has_as_many_parameters_as_the_separate_ones():
    cell = cell_of(members=4, width=4.0)
    wide = count_parameters(contestants.build(cell, contestants.WIDE))
    separate = count_parameters(contestants.build(cell, contestants.SEPARATE))
    assert abs(wide / separate - 1) < 0.05


@pytest.mark.parametrize("name", ["BatchEnsemble p=0", "MIMO", "MixMo", "rank-1", "snapshots"])
def test_training_depends_on_the_cell_alone(name):
    cell, data = cell_of(), load_problem(SETTING).data
    outputs = []
    for _ in range(2):
        torch.randn(3)
        trained = contestants.train_contestant(cell, name, data, lr=0.01)
        outputs.append(contestants.predict_contestant(cell, name, trained, data.test.inputs[:20]))

    assert outputs[0].shape == (3, 20, 10)
    assert torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("name", ["BatchEnsemble p=0", "MIMO", "SWAG"])
def test_divergence_is_reported_in_one_way(name):
    with pytest.raises(contestants.DivergenceError, match="diverged at the learning rate 1e"):
        contestants.train_contestant(cell_of(), name, load_problem(SETTING).data, lr=1e12)
