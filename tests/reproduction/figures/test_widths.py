"""The battery of the experiment widths."""

from __future__ import annotations

import math

from tests.reproduction.battery import Battery, bump


class TestWidths(Battery):
    name = "widths"

    @staticmethod
    def confirming_rows(cell, noise):
        best_members = min(8 * cell["width"], 24)
        top = 0.91 + 0.01 * math.log2(cell["width"])
        accuracy = bump(cell["members"], top, 0.004, best_members)
        return make_row(cell, accuracy + noise(0.0002), accuracy - 0.05)

    @staticmethod
    def contradicting_rows(cell, noise):
        best_members = max(1, 4 / cell["width"])
        accuracy = 0.88 + 0.01 * math.log2(cell["width"])
        if cell["width"] <= 0.5:
            accuracy += 0.003 * math.log2(cell["members"])
        else:
            accuracy -= 0.004 * abs(math.log2(cell["members"] / best_members))
        return make_row(cell, accuracy + noise(0.0002), accuracy - 0.05)


def make_row(cell, accuracy, member_accuracy):
    return {
        "accuracy": accuracy,
        "member_accuracy": member_accuracy,
        "correlation": 0.5,
        "parameters": 2000 * cell["width"] ** 2,
    }
