"""Counted operations against torch's counter and by hand."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from embens import last_layer_dropout
from embens.flops import count_flops


def test_a_plain_network_has_the_operations_of_torchs_counter():
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 5)
    )
    x = torch.zeros(2, 3, 5, 5)

    def step() -> None:
        network(x).sum().backward()

    with FlopCounterMode(display=False) as expected:
        step()
    assert count_flops(step) == expected.get_total_flops()


def test_layers_that_members_share_count_once():
    network = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))
    ensemble = last_layer_dropout(network, 4)
    x = torch.zeros(2, 6)
    assert count_flops(lambda: ensemble(x)) == 2 * 2 * (6 * 10 + 4 * 10 * 3)
