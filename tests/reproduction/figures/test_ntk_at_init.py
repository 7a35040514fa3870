"""ntk-at-init: its battery, on tables of which its claims are true, or false."""

from __future__ import annotations

import math

from tests.reproduction.battery import Battery


def rows(c, true, noise):
    rows = []
    for others in (1, 2, 4, 7, 14):
        one = math.exp(noise(0.01))
        if c["kind"] == "centred":
            ratio = 1 / c["width"] if true else 1.0
            weight = others / c["width"] if true else float(others**2)
        else:
            ratio = 0.5 if true else 1 / c["width"]
            weight = others**2 if true else others / c["width"]
        rows.append(
            {
                "others": others,
                "ratio": ratio * one,
                "ratio_to_limit": ratio * one,
                "nll": weight * one,
                "target": weight * one,
            }
        )
    return rows


class TestNtkAtInit(Battery):
    name, rows = "ntk-at-init", staticmethod(rows)
    contradicting = 2
