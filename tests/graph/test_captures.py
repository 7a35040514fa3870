"""Attributes that lead back to the user's network are refused by name."""

import functools
import weakref

import pytest
import torch
from torch import nn

from embens.graph.captures import check_captures


class Holder(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.held = make(self)

    def forward(self, x):
        return self.layer(x)

    def method(self, x):
        return x


REFUSED = {
    "closure": lambda s: lambda x: s.layer(x),
    "default": lambda s: lambda x, layer=s.layer: layer(x),
    "method in a closure": lambda s: (lambda call: lambda x: call(x))(s.method),
    "weak reference": lambda s: [weakref.ref(s)],
    "partial": lambda s: functools.partial(torch.add, s.layer.bias),
    "nested": lambda s: {"calls": [lambda x: s.layer(x)]},
}
ALLOWED = {
    "method": lambda s: s.method,
    "partial of a method": lambda s: functools.partial(s.method),
    "function": lambda s: torch.tanh,
    "closure over numbers": lambda s: (lambda factor: lambda x: factor * x)(2),
    "module": lambda s: [s.layer],
}


@pytest.mark.parametrize("case", REFUSED)
def test_functions_and_weak_references_are_refused_by_name(case):
    network = nn.Sequential(Holder(REFUSED[case]))
    with pytest.raises(ValueError, match="the attribute 'held' of '0' refers to the reference"):
        check_captures(network)


@pytest.mark.parametrize("case", ALLOWED)
def test_what_copying_replaces_is_allowed(case):
    check_captures(Holder(ALLOWED[case]))


def test_hooks_are_refused_by_the_name_of_their_module():
    network = Holder(lambda s: None)
    network.layer.register_forward_hook(lambda *args: network.method(args[-1]))
    with pytest.raises(ValueError, match="a hook of 'layer' refers to the reference"):
        check_captures(network)
