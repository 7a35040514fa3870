"""The battery of the experiment parametrization."""

from __future__ import annotations

import math

from tests.reproduction.battery import Battery


class TestParametrization(Battery):
    name = "parametrization"

    @staticmethod
    def confirming_rows(cell, noise):
        loss_factor = 1.5 if cell["parametrization"] == "ntk" else 1.0
        return make_rows(noise, accuracy_of_rate(cell), loss_factor)

    @staticmethod
    def contradicting_rows(cell, noise):
        if cell["parametrization"] == "ntk":
            return make_rows(noise, accuracy_of_rate(cell) - 0.04, loss_factor=0.7)
        return make_rows(noise, accuracy_of_rate(cell), loss_factor=1.0)


def accuracy_of_rate(cell):
    """Return an accuracy that is highest at one learning rate per parametrization."""
    best_factor = 1.0 if cell["parametrization"] == "standard" else 16.0
    return 0.95 if cell["factor"] == best_factor else 0.9


def make_rows(noise, accuracy, loss_factor):
    rows = []
    for epoch in (1, 5, 10, 20, 40):
        row = {
            "epoch": epoch,
            "loss": loss_factor * 2.0 / epoch * math.exp(noise(0.01)),
            "member_accuracy": 0.9,
            "final_accuracy": accuracy + noise(0.001),
            "final_member_accuracy": accuracy,
            "diverged": 0.0,
        }
        rows.append(row)
    return rows
