"""Chains: networks in nn.Sequential without code."""

from __future__ import annotations

import pytest
import torch
from theory.measured import images, points
from torch import nn

from embens import theory
from embens.networks import Conv2d, Linear
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


def test_one_activation_may_occur_several_times():
    act = nn.Tanh()
    first, second, head = Linear(5, 4), Linear(4, 4), Linear(4, 1)
    shared = nn.Sequential(first, act, second, act, head)
    separate = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), head)
    x = points()
    assert torch.equal(theory.kernels(shared, x).nngp.same, theory.kernels(separate, x).nngp.same)


def test_one_pooling_may_occur_several_times():
    pool = nn.AvgPool2d(2)
    first, second, head = Conv2d(2, 4, 3, padding=1), Conv2d(4, 4, 3, padding=1), Linear(4, 1)
    shared = nn.Sequential(first, pool, nn.ReLU(), second, pool, nn.Flatten(), head)
    separate = nn.Sequential(
        first, nn.AvgPool2d(2), nn.ReLU(), second, nn.AvgPool2d(2), nn.Flatten(), head
    )
    x = images()
    assert torch.equal(theory.kernels(shared, x).nngp.same, theory.kernels(separate, x).nngp.same)


def test_layers_with_a_common_parameter_are_refused():
    first, second = Linear(4, 4), Linear(4, 4)
    second.weight = first.weight
    tied = nn.Sequential(Linear(5, 4), nn.ReLU(), first, nn.ReLU(), second, nn.ReLU(), Linear(4, 1))
    with pytest.raises(TypeError, match=r"'4' \(Linear\) shares a parameter with '2'"):
        theory.kernels(tied, points())
