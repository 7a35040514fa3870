"""A plan survives being written down, and is checked against a reference."""

from __future__ import annotations

import json

import pytest
from cases import ARCHITECTURES, Residual
from torch import nn

import embens
from embens.ensemble.plan import Plan


@pytest.mark.parametrize("case", ARCHITECTURES, ids=str)
@pytest.mark.parametrize(
    "family", [embens.batch_ensemble, embens.last_layer_dropout, embens.independent]
)
def test_json_gives_the_same_plan(case, family):
    plan = family(case.build(), 3).plan
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_a_plan_of_another_reference_names_what_is_missing():
    plan = embens.batch_ensemble(Residual(), 2).plan
    with pytest.raises(ValueError, match="the reference has no module"):
        plan.check(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    plan.check(Residual())
    other = Residual()
    other.head = nn.Linear(9, 5)
    with pytest.raises(ValueError, match="another shape"):
        plan.check(other)


def test_separate_networks_say_so():
    assert embens.independent(Residual(), 2).plan.separate
    assert not embens.batch_ensemble(Residual(), 2).plan.separate
