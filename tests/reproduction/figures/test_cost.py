"""cost: its battery, on tables of which its claims are true, or false."""

from __future__ import annotations

import math
from typing import ClassVar

from tests.reproduction.battery import Battery


def rows(c, true, noise):
    lld = c["family"] == "last-layer dropout"
    step = (1.05 if true else 1.6) if lld else (c["members"] if true else 1.0)
    return {
        "step": step * math.exp(noise(0.005)),
        "inference": ((1.01 if true else 1.5) if lld else c["members"]) * math.exp(noise(0.005)),
        "parameters": (1.01 if true else 2.0) if c["family"] == "BatchEnsemble" else 1.0,
        "memory": 1.0,
    }


class TestCost(Battery):
    name, rows = "cost", staticmethod(rows)
    fast: ClassVar = {"turns": 1, "batch": 4}
