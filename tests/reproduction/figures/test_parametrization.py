"""parametrization: its battery, on tables of which its claims are true, or false."""

from __future__ import annotations

import math

from tests.reproduction.battery import Battery


def rows(c, true, noise):
    best = c["factor"] == (1.0 if c["parametrization"] == "standard" else 16.0)
    ntk = c["parametrization"] == "ntk"
    accuracy = (0.95 if best else 0.9) - (0.0 if true or not ntk else 0.04)
    slow = (1.5 if true else 0.7) if ntk else 1.0
    return [
        {
            "epoch": epoch,
            "loss": slow * 2.0 / epoch * math.exp(noise(0.01)),
            "member_accuracy": 0.9,
            "final_accuracy": accuracy + noise(0.001),
            "final_member_accuracy": accuracy,
            "diverged": 0.0,
        }
        for epoch in (1, 5, 10, 20, 40)
    ]


class TestParametrization(Battery):
    name, rows = "parametrization", staticmethod(rows)
