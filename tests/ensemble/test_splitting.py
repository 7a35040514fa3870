"""Split batches against rows that are given to each member by hand."""

import pytest
import torch
from torch import nn

import embens


def make_ensemble(members=3):
    reference = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 2))
    return embens.batch_ensemble(reference, members)


@pytest.mark.parametrize("rows", [1, 2, 6, 7, 9])
def test_row_i_goes_to_member_i_modulo_their_number(rows):
    ensemble, x = make_ensemble(), torch.randn(rows, 4)
    outputs = ensemble(x, batch="split")
    assert outputs.shape == (rows, 2)
    for i in range(rows):
        expected = ensemble.member(i % 3)(x[i : i + 1])[0]
        torch.testing.assert_close(outputs[i], expected)


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x, shift=None):
        return self.second(torch.tanh(self.first(x) + shift))


@pytest.mark.parametrize("rows", [6, 7])
def test_named_tensors_are_split_like_the_others(rows):
    ensemble = embens.batch_ensemble(Named(), 3)
    x, shift = torch.randn(rows, 4), torch.randn(rows, 6)
    outputs = ensemble(x, shift=shift, batch="split")
    for i in range(rows):
        expected = ensemble.member(i % 3)(x[i : i + 1], shift[i : i + 1])[0]
        torch.testing.assert_close(outputs[i], expected)


def test_gradients_reach_every_row():
    ensemble = make_ensemble()
    x = torch.randn(7, 4, requires_grad=True)
    ensemble(x, batch="split").square().sum().backward()
    assert (x.grad != 0).all()
