"""The battery of the experiment lld."""

from __future__ import annotations

import math

from tests.reproduction.battery import Battery


class TestLld(Battery):
    name = "lld"

    @staticmethod
    def confirming_rows(cell, noise):
        doublings, width = math.log2(cell["members"]), math.log2(cell["width"])
        peak = 3 + width
        gain = (1 - cell["p"]) * (0.03 - 0.01 * width)
        accuracy = 0.9 + 0.02 * width + gain * (1 - ((doublings - peak) / peak) ** 2)
        return {
            "accuracy": accuracy + noise(0.0001),
            "member_accuracy": 0.9 - 0.01 * doublings * (1 - cell["p"]),
            "member_train_accuracy": 0.95,
            "correlation": 0.5 - 0.05 * width + 0.4 * cell["p"] + noise(0.001),
        }

    @staticmethod
    def contradicting_rows(cell, noise):
        doublings, width = math.log2(cell["members"]), math.log2(cell["width"])
        gain = (0.2 + cell["p"]) * (0.008 + 0.003 * width)
        return {
            "accuracy": 0.9 + gain * doublings + noise(0.0001),
            "member_accuracy": 0.9 + 0.01 * doublings * (1 - 3 * cell["p"]),
            "member_train_accuracy": 0.95,
            "correlation": 0.5 + 0.05 * width - 0.4 * cell["p"] + noise(0.001),
        }
