"""Layers that compute their weight."""

import torch
from torch import nn

import embens
from embens.ensemble.parametrizations import copy_with_plain_classes


class Tied(nn.Module):
    """Keeps a parametrized layer in a list, besides its registration."""

    def __init__(self):
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
        self.layers = [self.layer]

    def forward(self, x):
        return self.layers[0](x)


def test_copies_of_parametrized_layers_have_the_original_class_everywhere():
    reference = Tied()
    before = type(reference.layer)
    copied = copy_with_plain_classes(reference)
    assert type(copied.layer) is nn.Linear
    assert copied.layers[0] is copied.layer
    assert type(reference.layer) is before
    assert copied.layer is not reference.layer
    assert type(copy_with_plain_classes(reference.layer)) is nn.Linear
    ensemble = embens.batch_ensemble(nn.Sequential(reference, nn.ReLU(), nn.Linear(3, 2)), 2)
    x = torch.randn(4, 3)
    assert type(ensemble.member(1)[0].layers[0]) is nn.Linear
    torch.testing.assert_close(ensemble.member(1)(x), ensemble(x)[1])
