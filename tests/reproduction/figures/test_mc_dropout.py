"""mc-dropout: its battery, on tables of which its claims are true, or false."""

from __future__ import annotations

import math

from reproduction.grid.cells import MEMBERS
from tests.reproduction.battery import Battery, bump


def rows(c, true, noise):
    sign = 1 if true else -1
    masks = MEMBERS["quick"] if c["kind"].startswith("fresh") else (c["members"],)
    rows = []
    for count in masks:
        m = math.log2(count)
        if c["kind"] == "fresh shifted":
            accuracy = 0.9 + sign * 0.02 * (1 - 1 / count)
            member, correlation = 0.9 - (0 if true else 0.02 * m), 0.9 if true else 0.3
        elif c["kind"] == "fresh centred":
            accuracy, member, correlation = (0.15 if true else 0.9), 0.1, 0.1
        else:
            peak = 8 * c["width"] if true else 8 / c["width"]
            accuracy = bump(count, 0.93, 0.004, peak)
            if not true and c["width"] == 0.5:
                accuracy = 0.9 + 0.01 * m
            member, correlation = 0.8, 0.4 if true else 0.29
        rows.append(
            {
                "masks": count,
                "accuracy": accuracy + noise(0.0002),
                "member_accuracy": member,
                "correlation": correlation + noise(0.001) if count > 1 else math.nan,
            }
        )
    return rows


class TestMcDropout(Battery):
    name, rows = "mc-dropout", staticmethod(rows)
