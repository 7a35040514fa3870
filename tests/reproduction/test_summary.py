"""The README's picture states values of the table."""

from __future__ import annotations

import pandas

from reproduction.competitors import FOUR_NETWORKS, ONE, SEPARATE, SIGNS, TWO_NETWORKS
from reproduction.summary import draw_summary, with_same_networks
from tests.reproduction.battery import check_figure

LOSSES = {(ONE, 1): 9.0, (ONE, 2): 0.5, (ONE, 4): 0.1, (SIGNS[0], 1): 0.0, (SIGNS[0], 2): 0.4}


def make_table(losses):
    """Return a table of one seed; the accuracy is one minus the loss."""
    rows = []
    for (system, budget), loss in losses.items():
        row = {"system": system, "budget": budget, "seed": 0, "guessing": 2.77}
        rows.append({**row, "accuracy": 1 - loss, "nll": loss, "scaled_nll": loss})
    return pandas.DataFrame(rows)


def test_it_states_values_of_the_strongest_competitors_at_the_largest_budget():
    figure = draw_summary(make_table(LOSSES))

    check_figure(figure)
    accuracies, losses = figure.panels[:2]
    assert accuracies.title == "accuracy at 2 ×: two members 60.0%, one network 50.0%"
    assert losses.title == "log loss at 2 ×: two members 0.40, one network 0.50"
    assert "guessing: 2.77" in losses.y_label
    assert [curve.label for curve in accuracies.curves] == [ONE, "two members"]
    assert [curve.style for curve in accuracies.curves] == ["dash", "line"]


def test_it_includes_separate_networks_if_they_were_measured():
    figure = draw_summary(make_table({**LOSSES, (TWO_NETWORKS, 2): 0.3}))

    expected = "two members 0.40, two networks 0.30, one network 0.50"
    assert figure.panels[2].title.endswith(expected)


def test_separate_networks_are_two_networks_at_the_compute_of_two():
    losses = {(SEPARATE, 2): 0.3, (SEPARATE, 4): 0.2, (TWO_NETWORKS, 4): 0.1}
    table = with_same_networks(make_table(losses)).set_index(["system", "budget"])["nll"]
    expected = {**losses, (TWO_NETWORKS, 2): 0.3, (FOUR_NETWORKS, 4): 0.2}
    assert table.to_dict() == expected
    measured = {(SEPARATE, 2): 0.3, (TWO_NETWORKS, 2): 0.31}
    assert len(with_same_networks(make_table(measured))) == 2
