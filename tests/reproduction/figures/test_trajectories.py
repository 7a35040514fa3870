"""trajectories: its battery, on tables of which its claims are true, or false."""

from __future__ import annotations

import math

from reproduction.claims import FAILS, HOLDS, judge
from reproduction.figures import trajectories
from tests.reproduction.battery import Battery, table


def rows(c, true, noise):
    rows = []
    for epoch in range(1, 41):
        alone = 2.0 * epoch**-0.7
        late = max(0.0, epoch - (6 if (c["width"] == 1.0) == true else 15)) * 0.08
        m = math.log2(c["members"])
        if c["members"] == 1:
            loss = alone
        elif true:
            loss = alone * math.exp(0.4 * m if c["gamma"] == "1" else late * m / 3)
        else:
            slow = (0.3 if c["width"] == 1.0 else 0.5) * m if c["gamma"] == "M" else -0.1 * m
            slow = late * m / 3 if c["gamma"] == "M" and epoch > 6 else slow
            loss = alone * math.exp(slow)
        rows.append(
            {"epoch": epoch, "loss": loss * math.exp(noise(0.0001)), "member_accuracy": 0.9}
        )
    return rows


class TestTrajectories(Battery):
    name, rows = "trajectories", staticmethod(rows)
    contradicting = 6


def test_curves_that_coincide_do_so_for_one_gamma_alone():
    # What was claimed before, a departure of early losses below 15 %, held of γ=1 as well.
    together, _, _ = TestTrajectories().claims("true")
    apart, slower, _ = judge(trajectories.CLAIMS, exchanged(table("trajectories", rows, "true")))
    assert together.verdict == HOLDS
    assert apart.verdict == slower.verdict == FAILS


def exchanged(made):
    """Return the table with the names of the two scalings exchanged at width 1."""
    other = made["gamma"].map({"1": "M", "M": "1"})
    return made.assign(gamma=made["gamma"].where(made["width"] != 1.0, other))
