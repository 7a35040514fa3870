"""theorems: its battery, on tables of which its claims are true, or false."""

from __future__ import annotations

import math

from tests.reproduction.battery import Battery


def rows(c, true, noise):
    n, one = c["units"] / 32, math.exp(noise(0.01))
    if c["part"] == "outputs":
        return {"kurtosis": (1 / n if true else 1.0) * one}
    if c["part"] == "training":
        return [
            {
                "step": step,
                "drift": (0.1 * step / n if true else 1.0 / step) * one,
                "prediction_error": (n**-0.5 if true else 1.0) * one,
            }
            for step in (10, 300)
        ]
    if c["part"] == "classification":
        late = 0.9 if true else 0.3
        return [
            {"stage": 0.0, "target_part": 0.5},
            {"stage": 1.0, "target_part": late + noise(0.01)},
        ]
    vanishes = c["case"] in ("centred", "last centred")
    row = {"ntk_coupling": (0.0 if vanishes == true else 0.3) + noise(0.001)}
    row["ntk_coupling_limit"] = 0.0
    for column in ("nngp_error", "nngp_cross_error", "ntk_error", "ntk_cross_error"):
        row[column] = (1 / n if true else 1.0) * one
    return row


class TestTheorems(Battery):
    name, rows = "theorems", staticmethod(rows)
    contradicting = 2
