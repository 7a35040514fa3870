"""Advice: proposals within a budget, their costs, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from finite.test_forecasting import mlp, task

import embens
from embens import networks
from embens.finite import advise


def test_proposals_keep_to_the_budget_and_are_sorted_by_what_to_expect():
    found = advise(mlp(), *task(), parameters=2.0, time=6.0, epochs=6)
    assert 1 <= len(found) <= 3
    assert all(p.cost.parameters <= 2 and p.cost.time <= 6 for p in found)
    losses = [p.log_loss for p in found]
    assert losses == sorted(losses)
    assert len({p.one_network for p in found}) == 1
    for p in found:
        better = p.forecast.nll.value < p.forecast.reference_nll.value
        assert ("not worth it" in str(p)) == (not better)
    assert len({p.call.replace(str(p.members), "") for p in found}) == len(found)


def test_a_proposal_is_code_that_makes_an_ensemble_of_that_cost():
    network = mlp()
    for proposal in advise(network, *task(), epochs=6, members=(2, 4)):
        names = {"embens": embens, "laws": embens.laws, "reference": network}
        made = eval(f"embens.{proposal.call}", names)
        assert made.members == proposal.members == proposal.forecast.members
        numbers = sum(p.numel() for p in made.parameters())
        alone = sum(p.numel() for p in network.parameters())
        assert proposal.cost.parameters == pytest.approx(numbers / alone)
        assert f"{proposal.cost.parameters:.2f} × the parameters" in str(proposal)


def test_separate_networks_cost_as_many_times_as_there_are():
    found = advise(mlp(), *task(), epochs=6, members=(4,), proposals=99)
    (separate,) = [p for p in found if p.call.startswith("independent")]
    assert separate.cost.parameters == separate.cost.time == 4
    (last,) = [p for p in found if p.call.startswith("last_layer")]
    assert last.cost.parameters == 1
    assert last.cost.time < 2.5


def test_widths_are_searched_where_the_reference_is_a_function():
    def build(width: float):
        return networks.mlp(6, round(16 * width), 2, 3, generator=torch.Generator().manual_seed(0))

    found = advise(build, *task(), epochs=6, members=(2,), widths=(1.0, 2.0), proposals=99)
    assert {p.width for p in found} <= {1.0, 2.0}
    narrow = advise(build, *task(), epochs=6, members=(2,), parameters=1.5, widths=(1.0, 2.0))
    assert all(p.width == 1.0 for p in narrow)


def test_a_check_trains_the_proposals():
    (found,) = advise(mlp(), *task(), epochs=6, members=(2,), proposals=1, check=3)
    assert found.checked is not None
    assert 0 <= found.checked["accuracy"] <= 1
    assert math.isfinite(found.checked["log loss"])
    assert "checked" in str(found)


def test_a_budget_that_nothing_keeps_to_is_an_error():
    with pytest.raises(ValueError, match=r"no ensemble keeps to this budget.*parameters=0.5"):
        advise(mlp(), *task(), parameters=0.5)
    with pytest.raises(ValueError, match="time must be a number above 0"):
        advise(mlp(), *task(), time=-1)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"members": (2, 0)}, ValueError, "must be at least 1; got 0"),
        ({"check": 0}, ValueError, "must be at least 1; got 0"),
        ({"widths": (0.0,)}, ValueError, "widths must be numbers above 0"),
        ({"reference": None}, TypeError, "expected a network, or a function from a width; got N"),
        ({"x": [1.0]}, TypeError, "x: expected a tensor"),
        ({"lr": 1e4, "epochs": 60}, ValueError, "would diverge"),
    ],
)
def test_bad_arguments_are_named(given, error, message):
    x, y = task()
    given = {"reference": mlp(), "x": x, "epochs": 6} | given
    with pytest.raises(error, match=message):
        advise(given.pop("reference"), given.pop("x"), y, **given)
