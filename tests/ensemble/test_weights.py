"""Weights of one member."""

import pytest
import torch
from torch import nn

from embens.ensemble.weights import modulated_weight
from embens.sites import find_layers

LAYERS = {
    "linear": lambda: nn.Linear(6, 4),
    "conv": lambda: nn.Conv2d(6, 4, 3),
    "grouped conv": lambda: nn.Conv2d(6, 4, 3, groups=2),
    "conv1d": lambda: nn.Conv1d(6, 4, 3),
    "transposed": lambda: nn.ConvTranspose2d(6, 4, 3),
    "grouped transposed": lambda: nn.ConvTranspose1d(6, 4, 3, groups=2),
}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("sides", ["pre", "post", "both", "none"])
def test_modulated_weights_modulate_activations(make, sides):
    module = make().double()
    (layer,) = find_layers(module).values()
    x = torch.randn(2, 6, *(5,) * layer.spatial, dtype=torch.float64)
    v = torch.randn(4, dtype=torch.float64) if sides in ("pre", "both") else None
    u = torch.randn(6, dtype=torch.float64) if sides in ("post", "both") else None
    shape = (-1, *(1,) * layer.spatial)
    expected = module(x if u is None else x * u.view(shape))
    if v is not None:
        expected = expected * v.view(shape)
    with torch.no_grad():
        module.weight.copy_(modulated_weight(layer, module.weight, v, u))
        if v is not None:
            module.bias.mul_(v)

    torch.testing.assert_close(module(x), expected)
