"""transition: its battery, on tables of which its claims are true, or false."""

from __future__ import annotations

import math

import pandas
import pytest

from reproduction.claims import judge
from reproduction.figures import transition
from reproduction.figures.transition import transition_point
from reproduction.rows import MissingCellsError, Rows
from tests.reproduction.battery import Battery, bump


def rows(c, true, noise):
    m, p = math.log2(c["members"]), c["p"]
    above = p > 0.62 or (p == 0.6 and c["members"] > 10)
    if true:
        correlation = (0.85 + 0.14 * (p - 0.65) / 0.35 if above else 0.4) if p < 1 else 1.0
        accuracy = 0.93 + 0.004 * m if p > 0.62 else bump(c["members"], 0.95)
        train = 0.995 if p > 0.62 else 1 - 0.05 * m
        member = 0.93 + 0.003 * m * (c["gamma"] == "M") if p > 0.62 else 0.9 - 0.01 * m
    else:
        correlation = (0.4 + 0.4 * min(p, 0.4) / 0.4 - 0.1 * max(0, p - 0.4)) if p < 1 else 1.0
        accuracy = 0.93 - 0.004 * m if p > 0.35 else 0.9 + 0.01 * m
        train = 0.95 - 0.02 * m if p > 0.35 else 0.5 + 0.002 * m
        member = 0.93 - 0.003 * m * (c["gamma"] == "M") if p > 0.35 else 0.3 + 0.01 * m
    advantage = (0.01 if true else -0.01) * (c["law"] == "signs")
    return {
        "accuracy": accuracy + advantage + noise(0.0005),
        "member_accuracy": member + advantage,
        "member_train_accuracy": train,
        "correlation": correlation if c["members"] > 1 else math.nan,
        "coupling": p**6,
    }


class TestTransition(Battery):
    name, rows, draws = "transition", staticmethod(rows), 20
    # The regions above the transition differ between seeds of this table.
    weak = ("above, ensemble accuracy grows with M", "above, member test accuracy rises with M")


def table(correlations, members=(4, 8)):
    return pandas.DataFrame(
        {
            "seed": s,
            "law": transition.NORMAL,
            "p": p,
            "gamma": "M",
            "members": m,
            "correlation": c,
            "member_accuracy": 0.5,
        }
        for s in range(2)
        for m in members
        for p, c in correlations.items()
    )


def test_the_transition_is_half_way_to_one_whatever_the_largest_p_is():
    # The range of p is the same in every preset: at p=1 members are one model.
    correlations = {0.0: 0.2, 0.5: 0.2, 0.7: 0.2, 0.8: 0.4, 0.9: 0.8}
    expected = pytest.approx(0.85)
    assert transition_point(Rows(table(correlations))) == expected
    assert transition_point(Rows(table({**correlations, 1.0: 1.0}))) == expected
    assert transition_point(Rows(table({**correlations, 0.95: 0.9}))) == expected


def test_a_transition_needs_several_values_of_p():
    with pytest.raises(MissingCellsError, match="at least 5 values of p"):
        transition_point(Rows(table({0.0: 0.2, 0.9: 0.8})))


def test_above_is_above_the_measured_transition():
    def growth(correlations):
        claims = {c.statement: c for c in judge(transition.CLAIMS, table(correlations))}
        return claims["above the transition the correlation grows with p"]

    # 0.7 and 0.8 lie below a transition at 0.88; above it correlation falls from 0.9 to 0.95.
    assert growth({0.0: 0.2, 0.7: 0.3, 0.8: 0.5, 0.9: 0.9, 0.95: 0.8}).value < 0
    assert growth({0.0: 0.2, 0.7: 0.7, 0.8: 0.8, 0.9: 0.9, 0.95: 0.8}).value > 0
