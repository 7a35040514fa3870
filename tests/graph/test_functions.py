"""Functions and methods of tensors in the folded form."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import embens


class Reshaping(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.b(self.a(x).view(-1, 6).view(-1, 3))


def test_reshaping_does_not_join_rows_of_two_members():
    ensemble = embens.batch_ensemble(Reshaping(), 4)
    assert ensemble(torch.randn(2, 3)).shape == (4, 2, 2)
    assert ensemble.executor == "folded"
    with pytest.raises(RuntimeError, match="not divisible"):
        ensemble(torch.randn(1, 3))


class ChangedByPosition(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        F.elu(x, 1.0, True)
        return self.b(torch.tanh(self.a(x)))


def test_a_positional_inplace_argument_is_seen():
    ensemble = embens.batch_ensemble(ChangedByPosition(), 2)
    x = torch.full((2, 3), -1.0)
    outputs = ensemble(x)
    assert torch.equal(x, torch.full((2, 3), -1.0))
    torch.testing.assert_close(outputs[0], ensemble.member(0)(x))


class Squeezing(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)).squeeze(1))


def test_an_axis_that_is_not_removed_later_is_refused():
    ensemble = embens.batch_ensemble(Squeezing(), 4)
    assert ensemble(torch.randn(5, 1, 3)).shape == (4, 5, 2)
    assert ensemble.executor == "folded"
    with pytest.raises(RuntimeError, match="squeezes an axis with more than one element"):
        ensemble(torch.randn(5, 2, 3))
