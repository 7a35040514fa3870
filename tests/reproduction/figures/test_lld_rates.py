"""The battery of the experiment lld-rates."""

from __future__ import annotations

import math

from tests.reproduction.battery import Battery, bump


class TestLldRates(Battery):
    name = "lld-rates"

    @staticmethod
    def confirming_rows(cell, noise):
        distance = decades_between(cell["lr"], 0.1)
        if cell["family"] == "all":
            accuracy = 0.95 if cell["members"] > 1 else 0.9
        else:
            accuracy = bump(cell["members"], 0.93, 0.002, 10) - 0.03 * distance
        return make_row(accuracy, distance, noise)

    @staticmethod
    def contradicting_rows(cell, noise):
        if cell["members"] == 1:
            distance = decades_between(cell["lr"], 1.0)
            loss = 0.001 * distance
        else:
            distance = decades_between(cell["lr"], 0.01)
            loss = 0.03 * distance
        if cell["family"] == "all":
            accuracy = 0.9
        else:
            accuracy = 0.9 + 0.01 * math.log2(cell["members"]) - loss
        return make_row(accuracy, distance, noise)


def decades_between(rate, best_rate):
    return abs(math.log10(rate / best_rate))


def make_row(accuracy, distance, noise):
    """Return a row of a network trained at some distance from its best rate."""
    return {
        "accuracy": accuracy + noise(0.0002),
        "member_accuracy": 0.9,
        "member_train_accuracy": 0.99 - 0.03 * distance,
        "train_loss": 0.1 + distance,
        "early_loss": 0.5 + distance,
        "diverged": 0.0,
    }
