"""Modulated layers look like the layers inside them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import embens


def mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(3, 8), nn.ReLU(), nn.Identity(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)
    )


def test_reading_a_modulated_weight_past_its_layer_is_an_error_and_other_attributes_are_not():
    ensemble = embens.batch_ensemble(mlp(), 3)
    assert ensemble.network[3].in_features == 8
    weight = ensemble.network[3].weight
    assert (weight.dtype, weight.device.type, weight.shape) == (torch.float32, "cpu", (8, 8))
    assert weight.requires_grad
    for read in (
        lambda: weight * 2,
        lambda: weight[0],
        lambda: F.linear(torch.zeros(1, 8), weight),
        lambda: torch.zeros(1, 8) @ weight,
        lambda: weight.data,
        lambda: weight.norm(),
        lambda: weight**2,
        lambda: 1 / weight,
        lambda: abs(weight),
        lambda: torch.stack([weight]),
        lambda: torch.matmul(torch.zeros(1, 8), other=weight),
    ):
        with pytest.raises(AttributeError, match="without calling the layer"):
            read()
