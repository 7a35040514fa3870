"""The mean of the members as one network."""

import pytest
import torch
from torch import nn

import embens


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def test_the_collapsed_network_has_the_mean_output():
    ensemble = embens.last_layer_dropout(perceptron(), members=5)
    x = torch.randn(6, 4).double()
    torch.testing.assert_close(ensemble.collapse()(x), ensemble(x).mean(0))


def test_low_rank_last_layers_collapse():
    ensemble = embens.low_rank(perceptron(), members=3, rank=1, sites=["2"])
    x = torch.randn(6, 4).double()
    torch.testing.assert_close(ensemble.collapse()(x), ensemble(x).mean(0))


def test_weights_that_multiply_each_other_do_not_collapse():
    ensemble = embens.batch_ensemble(perceptron(), members=3)
    with pytest.raises(ValueError, match="the weights of '0' and '2' multiply each other"):
        ensemble.collapse()


def test_recurrent_layers_do_not_collapse():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 5, batch_first=True)
            self.head = nn.Linear(5, 2)

        def forward(self, x):
            return self.head(self.lstm(x)[0].mean(1))

    ensemble = embens.embed(Recurrent(), 3, pre=None, post=None, own="lstm")
    with pytest.raises(ValueError, match="not linear in the output of 'lstm'"):
        ensemble.collapse()
