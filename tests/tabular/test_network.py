"""The reference network of a table: its dropout, and heads that see all members at once."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import embens
from embens.estimators.network import Dropout


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_drops_as_often_as_asked_and_keeps_the_mean(rate):
    torch.manual_seed(0)
    count = 400_001
    found = Dropout(rate)(torch.ones(count))
    true = round(256 * rate) / 256
    error = math.sqrt(true * (1 - true) / count)
    assert float((found == 0).double().mean()) == pytest.approx(true, abs=4 * error)
    assert float(found.mean()) == pytest.approx(1.0, abs=4 * error / (1 - true))
    assert abs(true - rate) < 1 / 256


def test_dropout_differs_between_members_and_neighbours_and_ends_with_training():
    torch.manual_seed(0)
    layer = Dropout(0.5)
    masks = torch.func.vmap(layer, randomness="different")(torch.ones(8, 1000)) > 0
    together = (masks[:, None] == masks).double().mean(-1)
    assert together[~torch.eye(8, dtype=torch.bool)].sub(0.5).abs().max() < 5 * 0.5 / 1000**0.5
    assert (masks[:, 1:] == masks[:, :-1]).double().mean() == pytest.approx(0.5, abs=0.03)
    x = torch.randn(3, 5)
    assert layer.eval()(x) is x
    assert Dropout(0.0)(x) is x


def test_dropout_is_read_by_embed_like_torchs_own():
    def plan(kind):
        body = [nn.Linear(3, 8), nn.ReLU(), kind(0.1), nn.Linear(8, 8), nn.ReLU(), kind(0.1)]
        return embens.batch_ensemble(nn.Sequential(*body, nn.Linear(8, 2)), 4).plan

    assert plan(Dropout) == plan(nn.Dropout)
    assert not plan(Dropout).folding.impossible
    assert not plan(Dropout).folding.unclear
