"""Single members: what they share runs once, and nothing of the ensemble changes."""

from __future__ import annotations

import torch
from torch import nn

import embens
from embens.finite.gradients import gradient_norms
from embens.finite.members import member_gradients, shared_layers


def test_what_members_share_runs_once_and_the_loop_can_stop():
    calls = []
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    net[0].register_forward_hook(lambda *_: calls.append(1))
    ensemble = embens.last_layer_dropout(net, 4)
    calls.clear()
    x, y = torch.randn(4, 3), torch.zeros(4).long()
    gradients = member_gradients(ensemble, x, y, nn.functional.cross_entropy)
    assert next(gradients).loss != next(gradients).loss
    gradients.close()
    assert len(calls) == 1
    gradient_norms(ensemble, x, y)  # the pass was closed


def test_only_the_first_members_run_where_a_number_is_given():
    ensemble = embens.batch_ensemble(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)), 4)
    x, y = torch.randn(4, 3), torch.zeros(4).long()
    every, few = (
        [m.loss for m in member_gradients(ensemble, x, y, nn.functional.cross_entropy, members=n)]
        for n in (None, 2)
    )
    assert len(every) == 4
    assert few == every[:2]


def test_a_parameter_belongs_to_the_first_layer_that_holds_it():
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    net[2].weight = net[0].weight
    ensemble = embens.last_layer_dropout(net, 2)
    assert {n: len(found) for n, found in shared_layers(ensemble).items()} == {"0": 2, "2": 1}
