"""What is computed once, cut off the graph and backpropagated at the end."""

from __future__ import annotations

import pytest
import torch
from embens.ensemble.shared import SharedResults
from torch import nn

import embens


class Twice(nn.Module):
    """Two residual blocks before the last layer."""

    def __init__(self):
        super().__init__()
        self.stem, self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        h = self.stem(x).relu()
        g = self.a(h).relu() + h
        return self.head(self.b(g).relu() + g)


@pytest.mark.parametrize("family", [embens.last_layer_dropout, embens.batch_ensemble])
def test_gradients_go_through_all_cuts_once(family):
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    ensemble = family(Twice(), 4)
    embens.objective(ensemble(x), y).backward()
    expected = [p.grad.clone() for p in ensemble.parameters()]
    for chunk in (1, 2, 3, 4):
        ensemble.zero_grad()
        ensemble.backward(x, y, chunk=chunk)
        for p, right in zip(ensemble.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, right)


def test_a_cut_passes_on_what_was_left_at_it():
    class Once:
        module, keep = nn.Linear(2, 2), True

    results = SharedResults(cut=True)
    x = torch.ones(1, 2)
    leaf = results.once(Once, (x,), {})
    results.restart()
    assert results.once(Once, (x,), {}) is leaf, "computed once"
    (3 * leaf).sum().backward()
    assert Once.module.weight.grad is None
    results.backward()
    torch.testing.assert_close(Once.module.weight.grad, torch.full((2, 2), 3.0))
