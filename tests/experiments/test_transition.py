"""transition: its battery, on tables of which its claims are true, or false."""

from __future__ import annotations

import math

from experiments.battery import Battery, bump


def rows(c, true, noise):
    m, p = math.log2(c.members), c.p
    above = p >= 0.65 or (p == 0.6 and c.members > 10)
    if true:
        correlation = 0.75 + 0.2 * (p - 0.65) / 0.35 if above else 0.4
        accuracy = 0.93 + 0.004 * m + noise(0.012) if above else bump(c.members, 0.95)
        train = 0.995 if above else 1 - 0.05 * m
        member = 0.93 + 0.003 * m * (c.gamma == "M") if above else 0.9 - 0.01 * m
    else:
        correlation = 0.9 - 0.3 * (p - 0.65) if p > 0.55 else 0.4 + 0.5 * p / 0.55
        accuracy = 0.93 - 0.004 * m if above else 0.9 + 0.01 * m + noise(0.012)
        train = 0.5 + 0.45 * p + 0.002 * m
        member = 0.93 - 0.003 * m * (c.gamma == "M") if above else 0.3 + 0.01 * m
    return {
        "accuracy": accuracy + noise(0.0005),
        "member_accuracy": member,
        "member_train_accuracy": train,
        "correlation": correlation if c.members > 1 else math.nan,
        "coupling": p**6,
    }


class TestTransition(Battery):
    name, rows = "transition", staticmethod(rows)
