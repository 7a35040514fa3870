"""The battery of the experiment gain, and the networks that it compares."""

from __future__ import annotations

import math

import pytest

from reproduction.grid.cells import cells_of
from reproduction.grid.settings import PRESETS
from tests.reproduction.battery import Battery


class TestGain(Battery):
    name = "gain"

    @staticmethod
    def confirming_rows(cell, noise):
        return make_row(cell, noise, gain=1 - cell["p"], parameters_per_member=0.01)

    @staticmethod
    def contradicting_rows(cell, noise):
        return make_row(cell, noise, gain=cell["p"] - 1, parameters_per_member=3)


def make_row(cell, noise, gain, parameters_per_member):
    """Return a row in which the accuracy grows by ``gain`` percent with each doubling of M."""
    doublings = math.log2(cell["members"])
    correlation = math.nan
    if cell["members"] > 1:
        correlation = 0.5 + 0.5 * cell["p"]
    return {
        "accuracy": 0.9 + 0.01 * doublings * gain + noise(0.0005),
        "member_accuracy": 0.9,
        "member_train_accuracy": 1.0,
        "correlation": correlation,
        "nll": 0.3 - 0.02 * doublings * gain,
        "parameters": 2000 * cell["width"] ** 2 * (1 + parameters_per_member * cell["members"]),
    }


@pytest.mark.parametrize("preset", PRESETS)
def test_all_networks_of_a_preset_have_one_width_and_the_same_data(preset):
    cells = cells_of("gain", PRESETS[preset], [0])

    assert len({(cell["width"], cell.setting) for cell in cells}) == 1
    assert [cell.experiment for cell in cells].count("baselines") == 1
