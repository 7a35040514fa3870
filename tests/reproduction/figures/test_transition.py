"""The battery of the experiment transition, and where it sees the transition."""

from __future__ import annotations

import math

import pandas
import pytest

from reproduction.claims import judge
from reproduction.figures import transition
from reproduction.figures.transition import transition_point
from reproduction.rows import MissingCellsError, Rows
from tests.reproduction.battery import Battery, bump


class TestTransition(Battery):
    name = "transition"
    draws = 20
    # The regions above the transition differ between seeds of this table.
    weak = ("above, ensemble accuracy grows with M", "above, member test accuracy rises with M")

    @staticmethod
    def confirming_rows(cell, noise):
        doublings, p = math.log2(cell["members"]), cell["p"]
        correlation = 0.4
        if p > 0.62 or (p == 0.6 and cell["members"] > 10):
            correlation = 0.85 + 0.14 * (p - 0.65) / 0.35
        if p > 0.62:
            accuracy = 0.93 + 0.004 * doublings
            train_accuracy = 0.995
            member_accuracy = 0.93
            if cell["gamma"] == "M":
                member_accuracy += 0.003 * doublings
        else:
            accuracy = bump(cell["members"], 0.95)
            train_accuracy = 1 - 0.05 * doublings
            member_accuracy = 0.9 - 0.01 * doublings
        if cell["law"] == "signs":
            accuracy += 0.01
            member_accuracy += 0.01
        return make_row(cell, noise, accuracy, member_accuracy, train_accuracy, correlation)

    @staticmethod
    def contradicting_rows(cell, noise):
        doublings, p = math.log2(cell["members"]), cell["p"]
        correlation = 0.4 + min(p, 0.4) - 0.1 * max(0, p - 0.4)
        if p > 0.35:
            accuracy = 0.93 - 0.004 * doublings
            train_accuracy = 0.95 - 0.02 * doublings
            member_accuracy = 0.93
            if cell["gamma"] == "M":
                member_accuracy -= 0.003 * doublings
        else:
            accuracy = 0.9 + 0.01 * doublings
            train_accuracy = 0.5 + 0.002 * doublings
            member_accuracy = 0.3 + 0.01 * doublings
        if cell["law"] == "signs":
            accuracy -= 0.01
            member_accuracy -= 0.01
        return make_row(cell, noise, accuracy, member_accuracy, train_accuracy, correlation)


def make_row(cell, noise, accuracy, member_accuracy, train_accuracy, correlation):
    if cell["members"] == 1:
        correlation = math.nan
    elif cell["p"] == 1:
        correlation = 1.0  # all members are one model
    return {
        "accuracy": accuracy + noise(0.0005),
        "member_accuracy": member_accuracy,
        "member_train_accuracy": train_accuracy,
        "correlation": correlation,
        "coupling": cell["p"] ** 6,
    }


def make_table(correlations):
    """Return a table of two seeds and two M from the correlation at each p."""
    rows = []
    for seed in range(2):
        for members in (4, 8):
            for p, correlation in correlations.items():
                row = {"seed": seed, "members": members, "p": p, "correlation": correlation}
                rows.append(row)
    return pandas.DataFrame(rows).assign(law=transition.NORMAL, gamma="M", member_accuracy=0.5)


@pytest.mark.parametrize("larger", [{}, {1.0: 1.0}, {0.95: 0.9}])
def test_transition_is_half_way_to_one_for_any_largest_p(larger):
    # The range of p is the same in every preset: at p=1 members are one model.
    correlations = {0.0: 0.2, 0.5: 0.2, 0.7: 0.2, 0.8: 0.4, 0.9: 0.8, **larger}

    assert transition_point(Rows(make_table(correlations))) == pytest.approx(0.85)


def test_transition_needs_several_values_of_p():
    with pytest.raises(MissingCellsError, match="at least 5 values of p"):
        transition_point(Rows(make_table({0.0: 0.2, 0.9: 0.8})))


@pytest.mark.parametrize(
    ("correlations", "grows"),
    [
        # 0.7 and 0.8 lie below a transition at 0.88; above it correlation falls from 0.9 to 0.95.
        ({0.0: 0.2, 0.7: 0.3, 0.8: 0.5, 0.9: 0.9, 0.95: 0.8}, False),
        ({0.0: 0.2, 0.7: 0.7, 0.8: 0.8, 0.9: 0.9, 0.95: 0.8}, True),
    ],
)
def test_growth_above_the_transition_starts_at_the_measured_transition(correlations, grows):
    judged = judge(transition.CLAIMS, make_table(correlations))

    claims = {claim.statement: claim for claim in judged}
    growth = claims["above the transition the correlation grows with p"].value
    assert (growth > 0) == grows
    assert growth != 0
