"""lld-rates: its battery, on tables of which its claims are true, or false."""

from __future__ import annotations

import math

from tests.reproduction.battery import Battery, bump


def rows(c, true, noise):
    m = math.log2(c["members"])
    best = 0.1 if true else (1.0 if c["members"] == 1 else 0.01)
    distance = abs(math.log10(c["lr"] / best))
    if c["family"] == "all":
        accuracy = 0.95 if true and c["members"] > 1 else 0.9
    elif true:
        accuracy = bump(c["members"], 0.93, 0.002, 10) - 0.03 * distance
    else:
        accuracy = 0.9 + 0.01 * m - (0.03 if c["members"] > 1 else 0.001) * distance
    return {
        "accuracy": accuracy + noise(0.0002),
        "member_accuracy": 0.9,
        "member_train_accuracy": 0.99 - 0.03 * distance,
        "train_loss": 0.1 + distance,
        "early_loss": 0.5 + distance,
        "diverged": 0.0,
    }


class TestLldRates(Battery):
    name, rows = "lld-rates", staticmethod(rows)
