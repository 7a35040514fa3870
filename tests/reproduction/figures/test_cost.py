"""The battery of the experiment cost."""

from __future__ import annotations

import math
from typing import ClassVar

from tests.reproduction.battery import Battery


class TestCost(Battery):
    name = "cost"
    fast: ClassVar = {"turns": 1, "batch": 4}

    @staticmethod
    def confirming_rows(cell, noise):
        parameters = 1.01 if cell["family"] == "BatchEnsemble" else 1.0
        if cell["family"] == "last-layer dropout":
            return make_row(noise, step=1.05, inference=1.01, parameters=parameters)
        members = cell["members"]
        return make_row(noise, step=members, inference=members, parameters=parameters)

    @staticmethod
    def contradicting_rows(cell, noise):
        parameters = 2.0 if cell["family"] == "BatchEnsemble" else 1.0
        if cell["family"] == "last-layer dropout":
            return make_row(noise, step=1.6, inference=1.5, parameters=parameters)
        return make_row(noise, step=1.0, inference=cell["members"], parameters=parameters)


def make_row(noise, step, inference, parameters):
    """Return a row of costs relative to one network."""
    return {
        "step": step * math.exp(noise(0.005)),
        "inference": inference * math.exp(noise(0.005)),
        "parameters": parameters,
        "memory": 1.0,
    }
