"""Chains: networks in nn.Sequential without code."""

from __future__ import annotations

from torch import nn

from embens.theory.chain import first_layer, is_chain, pixel_axes, split_chain


class Code(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x)


def test_sequences_of_layers_are_chains():
    assert is_chain(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 1))))
    assert not is_chain(nn.Sequential(nn.Linear(2, 2), Code()))
    assert not is_chain(nn.Sequential(nn.Embedding(3, 2), nn.Flatten(), nn.Linear(4, 1)))


def test_modules_before_the_first_layer_are_split_off():
    before, after = split_chain(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))
    assert [type(module) for module in before] == [nn.Flatten]
    assert [name for name, _ in after] == ["1"]


def test_layers_have_pixel_axes():
    assert pixel_axes(nn.Conv2d(1, 1, 3)) == 2
    assert pixel_axes(nn.Linear(2, 2)) == 0
    assert first_layer(nn.ReLU()) is None
