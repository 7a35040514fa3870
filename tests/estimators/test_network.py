"""The reference network of a table: its dropout, and heads that see all members at once."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import embens
from embens.estimators.heads import Classes, Gaussians
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
    assert plan(Dropout).foldable


@pytest.mark.parametrize(
    "head", [Classes((3,)), Classes((3,), True), Classes((2, 3)), Gaussians(2), Gaussians(1, True)]
)
def test_the_criterion_of_all_members_is_that_of_each(head):
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(4, 7, head.outputs, generator=generator, dtype=torch.float64)
    labels = len(head.sizes) if isinstance(head, Classes) else head.targets
    values = torch.randint(2, (7, labels), generator=generator)
    weights = torch.rand(7, generator=generator).double() if head.weighted else None
    target = head.pack(values, weights, torch.float64)
    together = head.criterion(outputs, target)
    alone = torch.stack([head.criterion(o, target) for o in outputs])
    torch.testing.assert_close(together, alone)
    if isinstance(head, Classes):
        chances = torch.stack([p.softmax(-1)[:, :, 0] for p in outputs.split(head.sizes, -1)])
        zero = head.pack(torch.zeros_like(values), weights, torch.float64)
        by_hand = -chances.log().sum(0) * (1.0 if weights is None else weights)
        torch.testing.assert_close(head.criterion(outputs, zero), by_hand)


def test_any_class_is_the_metric_averaged_over_what_the_class_may_be():
    head = Classes((3,))
    outputs = torch.randn(4, 7, 3, generator=torch.Generator().manual_seed(0))
    each = [head.metric(outputs, torch.full((7,), k)) for k in range(3)]
    torch.testing.assert_close(head.any_class(outputs), torch.stack(each).mean())
