"""Layers that stand in for those of the reference."""

from __future__ import annotations

import torch
from torch import nn

import embens
from embens.ensemble.layers import Once


class Optional(nn.Module):
    """Code that asks whether it has a module, as much code does."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.extra, self.none = nn.Tanh(), nn.Sequential()

    def forward(self, x):
        if self.extra:
            x = self.extra(x)
        if self.none:
            raise AssertionError
        return self.last(self.first(x))


def test_what_is_computed_once_is_as_true_as_the_module_itself():
    ensemble = embens.last_layer_dropout(Optional(), 3)
    assert ensemble(torch.zeros(2, 4)).shape == (3, 2, 3)
    for inner in (nn.Linear(2, 2), nn.Sequential(), nn.Sequential(nn.ReLU())):
        assert bool(Once(inner, random=False, keep=True, repeat=True)) == bool(inner)
