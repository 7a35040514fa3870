"""Copies of the reference for the members, and the attributes that they have."""

import copy

import pytest
import torch
from torch import nn

import embens
from embens.ensemble.copies import Attributes

X = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Counts calls in training mode, and has a bound method among its attributes."""

    def __init__(self):
        super().__init__()
        self.a, self.out = nn.Linear(3, 5), nn.Linear(5, 2)
        self.calls, self.factors = 1, [1.0]
        self.activate = self.apply_tanh

    def apply_tanh(self, x):
        return torch.tanh(self.a(x))

    def forward(self, x):
        h = self.activate(x)
        if self.training:
            self.calls += 1
            self.last = h
        return self.out(h) * self.calls * self.factors[0] + x.mean()


def outputs_of_members(ensemble, x):
    members = [ensemble.member(a) for a in range(ensemble.members)]
    return torch.stack([member.train(ensemble.training)(x) for member in members])


def test_attributes_yield_what_is_new_changed_and_removed():
    net = Net()
    attributes = Attributes(net)
    assert list(attributes.changes()) == []
    net.calls = 2
    net.factors.append(3.0)
    net.late = 1
    del net.activate
    changed = {key for _, key, _ in attributes.changes()}
    assert changed == {"calls", "factors", "late", "activate"}
    assert list(attributes.changes()) == []


def test_attributes_that_training_changes_are_those_of_the_members_in_evaluation():
    ensemble = embens.batch_ensemble(Net().double(), 3)
    for training in (False, True, True, False):
        ensemble.train(training)
        expected = outputs_of_members(ensemble, X)
        torch.testing.assert_close(ensemble(X), expected)


def test_attributes_changed_on_the_reference_reach_every_member():
    ensemble = embens.batch_ensemble(Net().double(), 3)
    ensemble.train()(X)
    ensemble.reference.factors[0] = 2.0
    expected = outputs_of_members(ensemble, X)

    torch.testing.assert_close(ensemble(X), expected)
    assert ensemble.member(1).factors == [2.0]


@pytest.mark.parametrize("copied", [False, True])
def test_bound_methods_belong_to_the_member(copied):
    ensemble = embens.batch_ensemble(Net().double(), 3)
    ensemble.train()(X)
    if copied:
        ensemble = copy.deepcopy(ensemble)
    member = ensemble.member(2)

    assert member.activate.__self__ is member
