"""The battery of the experiment theorems."""

from __future__ import annotations

import math

from tests.reproduction.battery import Battery

CENTRED_CASES = ("centred", "last centred")
ERRORS = ("nngp_error", "nngp_cross_error", "ntk_error", "ntk_cross_error")


class TestTheorems(Battery):
    name = "theorems"
    contradicting_seeds = 2

    @staticmethod
    def confirming_rows(cell, noise):
        width = cell["units"] / 32
        factor = math.exp(noise(0.01))
        if cell["part"] == "outputs":
            return {"kurtosis": factor / width}
        if cell["part"] == "training":
            return [
                training_row(10, drift=1.0 * factor / width, error=factor * width**-0.5),
                training_row(300, drift=30.0 * factor / width, error=factor * width**-0.5),
            ]
        if cell["part"] == "classification":
            return classification_rows(target_part=0.9 + noise(0.01))
        coupling = 0.0 if cell["case"] in CENTRED_CASES else 0.3
        return kernel_row(coupling + noise(0.001), error=factor / width)

    @staticmethod
    def contradicting_rows(cell, noise):
        factor = math.exp(noise(0.01))
        if cell["part"] == "outputs":
            return {"kurtosis": factor}
        if cell["part"] == "training":
            return [
                training_row(10, drift=factor / 10, error=factor),
                training_row(300, drift=factor / 300, error=factor),
            ]
        if cell["part"] == "classification":
            return classification_rows(target_part=0.3 + noise(0.01))
        coupling = 0.3 if cell["case"] in CENTRED_CASES else 0.0
        return kernel_row(coupling + noise(0.001), error=factor)


def training_row(step, drift, error):
    return {"step": step, "drift": drift, "prediction_error": error}


def classification_rows(target_part):
    return [
        {"stage": 0.0, "target_part": 0.5},
        {"stage": 1.0, "target_part": target_part},
    ]


def kernel_row(coupling, error):
    row = dict.fromkeys(ERRORS, error)
    row["ntk_coupling"] = coupling
    row["ntk_coupling_limit"] = 0.0
    return row
