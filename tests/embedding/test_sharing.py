"""What is computed once, and where the border between common and separate rows runs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cases import ARCHITECTURES
from torch import nn

import embens


class Net(nn.Module):
    def __init__(self, run):
        super().__init__()
        for name in "abcd":
            setattr(self, name, nn.Linear(6, 6))
        self.drop = nn.Dropout(0.5)
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))
        self.run = run

    def forward(self, x):
        return self.run(self, x)


BORDERS = {
    "a chain": (lambda s, x: s.b(torch.tanh(s.a(x))), {"a"}),
    "functions of the input": (lambda s, x: s.b(torch.tanh(s.a(x / 2 + 1))), {"a"}),
    "two from the input": (lambda s, x: s.c(s.a(x) + s.b(x)), {"a", "b"}),
    "around the first": (lambda s, x: s.b(s.a(x) + x), None),
    "around the last": (lambda s, x: s.b(s.a(x)) + x, None),
    "the input itself": (lambda s, x: (s.b(s.a(x)), x), None),
}


@pytest.mark.parametrize(("run", "border"), BORDERS.values(), ids=BORDERS)
def test_the_border_is_where_members_begin_to_differ(run, border):
    ensemble = embens.embed(Net(run), 3)
    folding = ensemble.plan.folding
    assert folding.shares is (border is not None)
    assert set(folding.border) == (border or set())
    x = torch.randn(4, 6)
    one, all_ = ensemble(x, chunk=1), ensemble(x, chunk=3)
    torch.testing.assert_close(one, all_)


def test_a_result_that_is_used_on_both_sides_is_repeated():
    def run(s, x):
        h = s.a(x)
        return s.c(torch.tanh(s.b(h))) + h

    ensemble = embens.embed(Net(run), 3, sites=["b"])
    assert [(m.module, m.repeat) for m in ensemble.plan.shared] == [("a", True)]
    x = torch.randn(4, 6)
    torch.testing.assert_close(ensemble(x, chunk=1), ensemble(x, chunk=3))


@pytest.mark.parametrize(
    ("run", "random"),
    [
        (lambda s, x: s.b(s.drop(s.a(x))), False),
        (lambda s, x: s.b(s.a(s.drop(x))), True),
        (lambda s, x: s.b(s.a(F.dropout(x, 0.5, s.training))), True),
        (lambda s, x: s.b(s.inner(s.a(x))), False),
    ],
)
def test_only_randomness_before_the_border_counts(run, random):
    ensemble = embens.embed(Net(run), 3, post=None)
    assert ensemble.plan.random is random
    a, b, c = ensemble.train()(torch.ones(64, 6), chunk=3)
    assert not torch.equal(a, b)
    assert not torch.equal(b, c)


@pytest.mark.parametrize("case", ARCHITECTURES, ids=str)
def test_separate_networks_have_every_tensor_for_themselves(case):
    reference = case.build()
    ensemble = embens.independent(reference, 2)
    assert list(ensemble.shared_parameters()) == []
    assert not ensemble.plan.shared
    count = sum(p.numel() for p in reference.parameters())
    assert sum(p.numel() for p in ensemble.parameters()) == 2 * count


def test_a_forward_that_compares_the_types_of_layers_is_warned_of():
    class Comparing(nn.Sequential):
        def forward(self, x):
            for layer in self:
                x = layer(x).relu() if type(layer) is nn.Linear else layer(x)
            return x

    with pytest.warns(UserWarning, match=r"forward of 'the reference' compares .* isinstance"):
        embens.batch_ensemble(Comparing(nn.Linear(3, 4), nn.Linear(4, 2)), 2)


def test_strides_before_a_layer_make_room_for_more_members():
    def chosen(*between):
        layers = nn.Conv2d(3, 8, 3, padding=1), *between, nn.Conv2d(8, 64, 3), nn.Conv2d(64, 4, 3)
        return embens.embed(nn.Sequential(*layers), 8).chunk_size((torch.zeros(16, 3, 32, 32),))

    assert chosen() == 1
    assert chosen(nn.ReLU(), nn.AvgPool2d(2)) == 2
    assert chosen(nn.Conv2d(8, 8, 2, stride=2), nn.MaxPool2d((2, 2))) == 4
    assert chosen(nn.AvgPool2d(4), nn.ConvTranspose2d(8, 8, 4, stride=4)) == 1
