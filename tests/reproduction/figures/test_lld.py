"""lld: its battery, on tables of which its claims are true, or false."""

from __future__ import annotations

import math

from tests.reproduction.battery import Battery


def rows(c, true, noise):
    m, w = math.log2(c["members"]), math.log2(c["width"])
    sign = 1 if true else -1
    flat = 1 - c["p"] if true else 0.2 + c["p"]
    if true:
        peak = 3 + w
        gain = 0.03 - 0.01 * w
        accuracy = 0.9 + 0.02 * w + flat * gain * (1 - ((m - peak) / peak) ** 2)
    else:
        accuracy = 0.9 + flat * (0.008 + 0.003 * w) * m
    return {
        "accuracy": accuracy + noise(0.0001),
        "member_accuracy": 0.9
        - sign * 0.01 * m * (1 - c["p"])
        - (0 if true else 0.02 * m * c["p"]),
        "member_train_accuracy": 0.95,
        "correlation": 0.5 - sign * 0.05 * w + sign * 0.4 * c["p"] + noise(0.001),
    }


class TestLld(Battery):
    name, rows = "lld", staticmethod(rows)
