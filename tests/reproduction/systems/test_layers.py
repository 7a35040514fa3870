"""First and last layers are found by registration order."""

import pytest
from torch import nn

from reproduction.systems.layers import first_layer, last_layer


def test_norms_and_activations_are_not_layers():
    network = nn.Sequential(
        nn.BatchNorm2d(3),
        nn.Conv2d(3, 4, 3),
        nn.Sequential(nn.ReLU(), nn.Linear(4, 4)),
        nn.LayerNorm(4),
    )
    assert first_layer(network) == "1"
    assert last_layer(network) == "2.1"


@pytest.mark.parametrize("find", [first_layer, last_layer])
def test_a_network_with_one_layer_is_rejected(find):
    with pytest.raises(ValueError, match="at least two Linear or Conv layers, got 1"):
        find(nn.Sequential(nn.Linear(3, 2), nn.ReLU()))
