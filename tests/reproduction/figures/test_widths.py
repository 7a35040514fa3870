"""widths: its battery, on tables of which its claims are true, or false."""

from __future__ import annotations

import math

from tests.reproduction.battery import Battery, bump


def rows(c, true, noise):
    peak = 8 * c["width"] if true else 4 / c["width"]
    top = 0.9 + 0.01 * math.log2(c["width"])
    if true:
        accuracy = bump(c["members"], top + 0.01, 0.004, min(peak, 24))
    else:
        accuracy = top - 0.02 + (0.003 * math.log2(c["members"]) if c["width"] <= 0.5 else 0)
        accuracy -= 0 if c["width"] <= 0.5 else 0.004 * abs(math.log2(c["members"] / max(1, peak)))
    return {
        "accuracy": accuracy + noise(0.0002),
        "member_accuracy": accuracy - 0.05,
        "correlation": 0.5,
        "parameters": 2000 * c["width"] ** 2,
    }


class TestWidths(Battery):
    name, rows = "widths", staticmethod(rows)
