"""gain: its battery, on tables of which its claims are true, or false."""

from __future__ import annotations

import math

from reproduction.grid.cells import cells_of
from reproduction.grid.settings import PRESETS
from tests.reproduction.battery import Battery


def rows(c, true, noise):
    m = math.log2(c["members"])
    differ = (1 - c["p"]) * (1 if true else -1)
    return {
        "accuracy": 0.9 + 0.01 * m * differ + noise(0.0005),
        "member_accuracy": 0.9,
        "member_train_accuracy": 1.0,
        "correlation": 0.5 + 0.5 * c["p"] if m else math.nan,
        "nll": 0.3 - 0.02 * m * differ,
        "parameters": 2000 * c["width"] ** 2 * (1 + (0.01 if true else 3) * c["members"]),
    }


class TestGain(Battery):
    name, rows = "gain", staticmethod(rows)


def test_all_networks_of_a_preset_are_of_one_width_and_on_the_same_data():
    for setting in PRESETS.values():
        cells = cells_of("gain", setting, [0])
        assert len({(cell["width"], cell.setting) for cell in cells}) == 1
        assert sum(cell.experiment == "baselines" for cell in cells) == 1
