"""The battery of the experiment mc-dropout."""

from __future__ import annotations

import math

from reproduction.grid.cells import MEMBERS
from tests.reproduction.battery import Battery, bump


class TestMcDropout(Battery):
    name = "mc-dropout"

    @staticmethod
    def confirming_rows(cell, noise):
        rows = []
        for masks in counts_of_masks(cell):
            if cell["kind"] == "fresh shifted":
                accuracy = 0.9 + 0.02 * (1 - 1 / masks)
                row = make_row(masks, noise, accuracy, member_accuracy=0.9, correlation=0.9)
            elif cell["kind"] == "fresh centred":
                row = make_row(masks, noise, 0.15, member_accuracy=0.1, correlation=0.1)
            else:
                accuracy = bump(masks, 0.93, 0.004, peak=8 * cell["width"])
                row = make_row(masks, noise, accuracy, member_accuracy=0.8, correlation=0.4)
            rows.append(row)
        return rows

    @staticmethod
    def contradicting_rows(cell, noise):
        rows = []
        for masks in counts_of_masks(cell):
            doublings = math.log2(masks)
            if cell["kind"] == "fresh shifted":
                accuracy = 0.9 - 0.02 * (1 - 1 / masks)
                member_accuracy = 0.9 - 0.02 * doublings
                row = make_row(masks, noise, accuracy, member_accuracy, correlation=0.3)
            elif cell["kind"] == "fresh centred":
                row = make_row(masks, noise, 0.9, member_accuracy=0.1, correlation=0.1)
            else:
                accuracy = bump(masks, 0.93, 0.004, peak=8 / cell["width"])
                if cell["width"] == 0.5:
                    accuracy = 0.9 + 0.01 * doublings
                row = make_row(masks, noise, accuracy, member_accuracy=0.8, correlation=0.29)
            rows.append(row)
        return rows


def counts_of_masks(cell):
    """Return the numbers of masks of a cell: fresh masks are drawn after training."""
    if cell["kind"].startswith("fresh"):
        return MEMBERS["quick"]
    return (cell["members"],)


def make_row(masks, noise, accuracy, member_accuracy, correlation):
    row = {
        "masks": masks,
        "accuracy": accuracy + noise(0.0002),
        "member_accuracy": member_accuracy,
        "correlation": math.nan,
    }
    if masks > 1:
        row["correlation"] = correlation + noise(0.001)
    return row
