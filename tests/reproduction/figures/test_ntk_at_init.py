"""The battery of the experiment ntk-at-init."""

from __future__ import annotations

import math

from tests.reproduction.battery import Battery

OTHER_MEMBERS = (1, 2, 4, 7, 14)


class TestNtkAtInit(Battery):
    name = "ntk-at-init"
    contradicting_seeds = 2

    @staticmethod
    def confirming_rows(cell, noise):
        width = cell["width"]
        rows = []
        for others in OTHER_MEMBERS:
            if cell["kind"] == "centred":
                row = make_row(others, noise, ratio=1 / width, weight=others / width)
            else:
                row = make_row(others, noise, ratio=0.5, weight=others**2)
            rows.append(row)
        return rows

    @staticmethod
    def contradicting_rows(cell, noise):
        width = cell["width"]
        rows = []
        for others in OTHER_MEMBERS:
            if cell["kind"] == "centred":
                row = make_row(others, noise, ratio=1.0, weight=others**2)
            else:
                row = make_row(others, noise, ratio=1 / width, weight=others / width)
            rows.append(row)
        return rows


def make_row(others, noise, ratio, weight):
    """Return a row with noise of one percent on all values."""
    factor = math.exp(noise(0.01))
    return {
        "others": others,
        "ratio": ratio * factor,
        "ratio_to_limit": ratio * factor,
        "nll": weight * factor,
        "target": weight * factor,
    }
